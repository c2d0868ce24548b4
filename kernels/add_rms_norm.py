"""The residual addition and the RMSNorm that follows it, as one operation."""

from __future__ import annotations

from torch import Tensor

from servekit.kernels import rms_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Args:
        x: [T, width], the output of a layer's half.
        residual: [T, width], the stream before it.
        weight: [width].
        eps: See `rms_norm`.

    Returns:
        The normalised sum and the sum itself, which is the new residual; both [T, width].
    """
    total = residual + x
    return rms_norm.reference(total, weight, eps), total
