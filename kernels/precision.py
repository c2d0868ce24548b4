"""In which number format sums, roots and angles are computed."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself, or float32 where `dtype` has fewer bits."""
    return torch.promote_types(dtype, torch.float32)
