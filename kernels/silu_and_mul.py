"""The gated activation of the feed-forward half (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [..., 2 * width], the gate's columns first.

    Returns:
        [..., width].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
