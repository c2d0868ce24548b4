"""Copies of whole KV blocks, between tensors of one device or two (swapping)."""

from __future__ import annotations

from torch import Tensor


def reference(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copy block `source_blocks[i]` of `source` over block `target_blocks[i]` of `target`, for every i.

    Args:
        source: [num_blocks, num_kv_heads, block_size, head_dim], keys or values of one layer.
        target: The same shape but for the number of blocks; on any device.
        source_blocks: [N] int64.
        target_blocks: [N] int64, no block twice.
    """
    blocks = source[source_blocks.to(source.device)]
    target[target_blocks.to(target.device)] = blocks.to(device=target.device, dtype=target.dtype)
