"""Copies of whole KV blocks, between tensors of one device or two (swapping)."""

from __future__ import annotations

from torch import Tensor

from servekit.kernels.precision import movable


def reference(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copy block `source_blocks[i]` of `source` over block `target_blocks[i]` of `target`, for every i.

    Args:
        source: [num_blocks, num_kv_heads, block_size, head_dim], keys or values of one layer.
        target: The same shape but for the number of blocks; on any device.
        source_blocks: [N] int64.
        target_blocks: [N] int64, no block twice.

    Between a GPU and pinned memory the copies take their turn in the GPU's queue, and this does not wait for them.
    """
    if source.device != target.device:
        one_by_one(source, target, source_blocks, target_blocks)
    else:
        blocks = movable(source)[source_blocks.to(source.device)].view(source.dtype).to(target.dtype)
        movable(target)[target_blocks.to(target.device)] = movable(blocks)


def one_by_one(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """The same without gathering the blocks first, which would pass them through memory that is not pinned."""
    for origin, goal in zip(source_blocks.tolist(), target_blocks.tolist(), strict=True):
        target[goal].copy_(source[origin], non_blocking=True)
