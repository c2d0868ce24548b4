"""Rotary position embedding and the keys' and values' way into the cache, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.fp8_kv import UNSCALED, KVScales
from servekit.kernels.triton import e4m3
from servekit.kernels.triton.launch import launch

_HEADS_PER_PROGRAM = 4


def rope_and_cache(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, key_cache: Tensor,
                   value_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED) -> Tensor:
    """See `servekit.kernels.rope_and_cache.reference`, and for a cache in e4m3 `servekit.kernels.fp8_kv`.

    A token with a negative slot is not written: such are the padding rows of a CUDA graph.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    is_fp8 = key_cache.dtype is torch.float8_e4m3fn
    if is_fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    query_parts = triton.cdiv(num_heads, _HEADS_PER_PROGRAM)
    launch(
        _rope_and_cache, (num_tokens, query_parts + triton.cdiv(num_kv_heads, _HEADS_PER_PROGRAM)),
        q, k, v, cos_sin, positions, key_cache, value_cache, slots, out, q.stride(0), q.stride(1), k.stride(0),
        k.stride(1), v.stride(0), v.stride(1), num_heads, num_kv_heads, query_parts, block_size, 1 / scales.key,
        1 / scales.value, HALF=head_dim // 2, WIDTH=triton.next_power_of_2(head_dim // 2), HEADS=_HEADS_PER_PROGRAM,
        IS_FP8=is_fp8, num_warps=2)
    return out


@triton.jit
def _rope_and_cache(q, k, v, cos_sin, positions, key_cache, value_cache, slots, out, q_token_stride, q_head_stride,
                    k_token_stride, k_head_stride, v_token_stride, v_head_stride, num_heads, num_kv_heads, query_parts,
                    block_size, key_factor, value_factor, HALF: tl.constexpr, WIDTH: tl.constexpr,
                    HEADS: tl.constexpr, IS_FP8: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    turn = cos_sin + tl.load(positions + token) * 2 * HALF + pair
    cos = tl.load(turn, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(turn + HALF, mask=pair < HALF, other=0.0)[None, :]
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        is_inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]
        start = q + token * q_token_stride + (head * q_head_stride)[:, None] + pair[None, :]
        goal = out + (token * num_heads + head)[:, None] * 2 * HALF + pair[None, :]
        first, second = _turned_pair(start, cos, sin, is_inside, HALF)
        _store_pair(goal, first, second, is_inside, HALF, False)
    else:
        kv_head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + token)
        is_written = (kv_head < tl.where(slot >= 0, num_kv_heads, 0))[:, None] & (pair < HALF)[None, :]
        row = (slot // block_size * num_kv_heads + kv_head) * block_size + slot % block_size
        place = row[:, None] * 2 * HALF + pair[None, :]
        key = k + token * k_token_stride + (kv_head * k_head_stride)[:, None] + pair[None, :]
        key_first, key_second = _turned_pair(key, cos, sin, is_written, HALF)
        # In the keys' format first, so that a cache of eight bits holds the key that a wider one would hold.
        key_first, key_second = key_first.to(k.dtype.element_ty), key_second.to(k.dtype.element_ty)
        _store_pair(key_cache + place, key_first.to(tl.float32) * key_factor, key_second.to(tl.float32) * key_factor,
                    is_written, HALF, IS_FP8)
        value = v + token * v_token_stride + (kv_head * v_head_stride)[:, None] + pair[None, :]
        value_first, value_second = _load_pair(value, is_written, HALF)
        _store_pair(value_cache + place, value_first * value_factor, value_second * value_factor, is_written, HALF,
                    IS_FP8)


@triton.jit
def _turned_pair(start, cos, sin, is_inside, HALF: tl.constexpr):
    first, second = _load_pair(start, is_inside, HALF)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _load_pair(start, is_inside, HALF: tl.constexpr):
    """Dimensions i and i + HALF, in float32."""
    return (tl.load(start, mask=is_inside, other=0.0).to(tl.float32),
            tl.load(start + HALF, mask=is_inside, other=0.0).to(tl.float32))


@triton.jit
def _store_pair(goal, first, second, is_inside, HALF: tl.constexpr, IS_FP8: tl.constexpr):
    if IS_FP8:
        tl.store(goal, e4m3.encode(first), mask=is_inside)
        tl.store(goal + HALF, e4m3.encode(second), mask=is_inside)
    else:
        tl.store(goal, first.to(goal.dtype.element_ty), mask=is_inside)
        tl.store(goal + HALF, second.to(goal.dtype.element_ty), mask=is_inside)
