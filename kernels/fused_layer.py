"""A whole decoder layer as one operation, for implementations that gain by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from servekit.kernels.attention import AttentionBatch

Product = Callable[[Tensor], Tensor]
"""x [..., in] to x W^T [..., out], with a weight matrix W that was prepared for it."""

KVLayer = tuple[Tensor, Tensor]
"""Key and value cache of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""

FusedLayer = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionBatch, KVLayer], tuple[Tensor, Tensor]]
"""(normed [T, hidden], residual [T, hidden], cos_sin, positions [T], batch, kv) to the next layer's normed input and
residual. The result is that of the single operations: attention, norm, feed-forward, norm."""


@dataclass(frozen=True)
class LayerOperands:
    """A layer without biases and without norms of its queries and keys."""

    qkv: Product
    o: Product
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Product
    down: Product
    next_norm: Tensor
    """[hidden], of the layer that follows."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rms_eps: float


def reference(operands: LayerOperands) -> FusedLayer | None:
    """None: the layer is computed operation by operation."""
    return None
