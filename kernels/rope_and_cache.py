"""Rotary position embedding (Su et al., 2021) of queries and keys, and the keys' and values' way into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.kernels.fp8_linear import to_e4m3
from servekit.kernels.precision import movable


def reference(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor,
              key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
    """Rotate `q` and `k` by their tokens' positions and write `k` and `v` to their slots.

    Args:
        q: [T, num_heads, head_dim].
        k: [T, num_kv_heads, head_dim].
        v: [T, num_kv_heads, head_dim].
        cos_sin: [max_positions, head_dim]: per position the head_dim / 2 cosines, then as many sines. Dimension i
            is rotated together with dimension i + head_dim / 2. The rotation is computed in this table's format.
        positions: [T] int64.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], written in place. One in torch.float8_e4m3fn
            keeps the nearest number, and the format's largest for what is too large.
        value_cache: The same.
        slots: [T] int64, block * block_size + offset within the block; no slot twice.

    Returns:
        The rotated queries, like `q`.
    """
    write(key_cache, slots, rotate(k, cos_sin, positions))
    write(value_cache, slots, v)
    return rotate(q, cos_sin, positions)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Heads [T, n, head_dim], rotated by their tokens' positions."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put keys or values [T, num_kv_heads, head_dim] in their slots, rounded to the cache's format."""
    block_size = cache.shape[2]
    stored = to_e4m3(rows) if cache.dtype is torch.float8_e4m3fn else rows.to(cache.dtype)
    movable(cache)[slots // block_size, :, slots % block_size] = movable(stored)
