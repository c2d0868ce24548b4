"""In which number format sums, roots and angles are computed, and as which numbers are moved."""

from __future__ import annotations

import torch
from torch import Tensor


def movable(numbers: Tensor) -> Tensor:
    """The same memory in a type that torch gathers and scatters on every device: eight-bit floats as bytes."""
    return numbers.view(torch.uint8) if numbers.dtype is torch.float8_e4m3fn else numbers


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself, or float32 where `dtype` has fewer bits."""
    return torch.promote_types(dtype, torch.float32)
