"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.kernels.precision import at_least_float32


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of `x` by its root mean square and multiply by `weight`.

    Args:
        x: [..., width].
        weight: [width].
        eps: Added to the mean square, against division by zero.

    Returns:
        A new tensor like `x`. The mean is taken in float32 at least.
    """
    wide = x.to(at_least_float32(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
