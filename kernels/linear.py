"""Multiplication by a weight matrix."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].

    Returns:
        [..., out].
    """
    return F.linear(x, weight, bias)
