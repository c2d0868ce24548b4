"""Attention of requests with one query: the context is split into parts, so that a few requests fill the GPU.

Each part has a softmax of its own; a second kernel merges them by their sums (Flash-Decoding; Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.triton.attention_tiles import attend, cache_rows, quotient
from servekit.kernels.triton.e4m3 import widen
from servekit.kernels.triton.launch import Tuned, launch

_PROGRAMS_PER_PROCESSOR = 2
_MOST_PARTS = 64
_SHORTEST_PART_TOKENS = 256
_LEAST_ROWS = 16
"""Rows that a tensor core multiplies at least; further ones than a key head has queries are empty."""


def num_parts(num_requests: int, num_kv_heads: int, max_context_tokens: int, num_processors: int) -> int:
    """Into how many parts to split each context.

    It depends on lengths only by their bound, so a captured graph serves any contexts up to the bound that it was
    captured with.
    """
    wanted: int = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, num_requests * num_kv_heads)
    longest: int = triton.cdiv(max_context_tokens, _SHORTEST_PART_TOKENS)
    return max(1, min(wanted, longest, _MOST_PARTS))


def attend_decodes(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                   log2_scale: float, window: int, scales: KVScales, parts: int) -> None:
    """Write the rows of `out` that belong to requests with one query, and no other.

    Args:
        q: [T, num_heads, head_dim].
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim]; bytes are e4m3.
        value_cache: The same.
        batch: See `AttentionBatch`. A context of 0 gives zeros.
        out: [T, num_heads, head_dim].
        log2_scale: Factor from q k to the logarithm to base 2 of a weight, without that of the keys.
        window: Positions that a query sees at most.
        scales: Of the cache.
        parts: Programs that share one context.
    """
    num_requests, num_heads, head_dim = len(batch.context_lens), q.shape[1], q.shape[2]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    width = triton.next_power_of_2(head_dim)
    sums = torch.empty((num_requests, num_heads, parts, head_dim), dtype=torch.float32, device=q.device)
    logs = torch.empty((num_requests, num_heads, parts), dtype=torch.float32, device=q.device)
    _PARTS.launch(
        (num_requests, num_kv_heads, parts),
        q, key_cache, value_cache, batch.query_start, batch.context_lens, batch.block_tables, out, sums, logs,
        log2_scale * scales.key, scales.value, q.stride(0), q.stride(1), batch.block_tables.stride(0), num_kv_heads,
        window, GROUP=group, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), HEAD_DIM=head_dim, WIDTH=width,
        BLOCK_SIZE=block_size, PARTS=parts)
    if parts > 1:
        launch(_merge, (num_requests, num_heads), sums, logs, batch.query_start, out, num_heads, scales.value,
               HEAD_DIM=head_dim, WIDTH=width, PARTS=parts, PARTS_WIDTH=triton.next_power_of_2(parts), num_warps=4)


@triton.jit
def _attend_part(q, key_cache, value_cache, query_start, context_lens, block_tables, out, sums, logs, log2_scale,
                 value_scale, q_token_stride, q_head_stride, table_stride, num_kv_heads, window, GROUP: tl.constexpr,
                 ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 PARTS: tl.constexpr, KEYS: tl.constexpr):
    request, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) - token != 1:
        return
    context_len = tl.load(context_lens + request)
    first_seen = tl.maximum(context_len - window, 0)
    first_tile, end_tile = first_seen // KEYS, tl.cdiv(context_len, KEYS)
    tiles = tl.cdiv(end_tile - first_tile, PARTS)
    first_tile += part * tiles

    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    head = kv_head * GROUP + row
    is_query = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(q + token * q_token_stride + (head * q_head_stride)[:, None] + dim[None, :], mask=is_query,
                    other=0.0)
    weighted = tl.zeros((ROWS, WIDTH), tl.float32)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for tile in range(first_tile, tl.minimum(first_tile + tiles, end_tile)):
        position = tile * KEYS + tl.arange(0, KEYS)
        is_seen = (position >= first_seen) & (position < context_len)
        line = cache_rows(block_tables + request.to(tl.int64) * table_stride, position, is_seen, kv_head,
                          num_kv_heads, BLOCK_SIZE) * HEAD_DIM
        is_number = dim < HEAD_DIM
        key = tl.load(key_cache + line[None, :] + dim[:, None], mask=is_seen[None, :] & is_number[:, None], other=0.0)
        value = tl.load(value_cache + line[:, None] + dim[None, :], mask=is_seen[:, None] & is_number[None, :],
                        other=0.0)
        scores = tl.dot(query, widen(key, query.dtype), input_precision="tf32x3") * log2_scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        weighted, best, total = attend(scores, widen(value, query.dtype), weighted, best, total)

    mean = quotient(weighted, total)
    num_heads = num_kv_heads * GROUP
    if PARTS == 1:
        place = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + place, (mean * value_scale).to(out.dtype.element_ty), mask=is_query)
    else:
        place = (request.to(tl.int64) * num_heads + head) * PARTS + part
        tl.store(sums + place[:, None] * HEAD_DIM + dim[None, :], mean, mask=is_query)
        tl.store(logs + place, best + tl.log2(total), mask=row < GROUP)


@triton.jit
def _merge(sums, logs, query_start, out, num_heads, value_scale, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
           PARTS: tl.constexpr, PARTS_WIDTH: tl.constexpr):
    """Weigh each part's mean by the sum of its weights, whose logarithm to base 2 is in `logs`."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) - token != 1:
        return
    part, dim = tl.arange(0, PARTS_WIDTH), tl.arange(0, WIDTH)
    place = (request * num_heads + head) * PARTS + part
    log = tl.load(logs + place, mask=part < PARTS, other=float("-inf"))
    best = tl.max(log, axis=0)
    weights = tl.exp2(log - tl.where(best == float("-inf"), 0.0, best))
    is_inside = (part < PARTS)[:, None] & (dim < HEAD_DIM)[None, :]
    mean = tl.load(sums + place[:, None] * HEAD_DIM + dim[None, :], mask=is_inside, other=0.0)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(weights[:, None] * mean, axis=0) / tl.where(total == 0.0, 1.0, total) * value_scale
    tl.store(out + (token * num_heads + head) * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


_PARTS = Tuned(
    _attend_part,
    [triton.Config({"KEYS": keys}, num_warps=warps, num_stages=stages)
     for keys, warps, stages in ((32, 4, 4), (64, 4, 3), (64, 4, 2), (128, 8, 2), (128, 4, 2), (32, 2, 3), (16, 4, 4))],
    key=["GROUP", "HEAD_DIM", "BLOCK_SIZE"])
