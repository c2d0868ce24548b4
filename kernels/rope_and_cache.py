"""Rotary position embedding (Su et al., 2021) of queries and keys, and the keys' and values' way into the cache."""

from __future__ import annotations

import torch
from torch import Tensor


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
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], written in place.
        value_cache: The same.
        slots: [T] int64, block * block_size + offset within the block; no slot twice.

    Returns:
        The rotated queries, like `q`.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _write(key_cache, slots, _rotate(k, cos, sin))
    _write(value_cache, slots, v)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = rows.to(cache.dtype)
