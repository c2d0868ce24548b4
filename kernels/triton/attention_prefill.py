"""Attention of requests with several queries, in tiles of queries that share the keys they read.

A tile holds some consecutive queries of one request with all query heads of one key head, so that each key is read once
for the whole group (FlashAttention-2; Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.triton.attention_tiles import attend, cache_rows, quotient
from servekit.kernels.triton.e4m3 import widen
from servekit.kernels.triton.launch import Tuned

MOST_HEADS_PER_KEY_HEAD = 32
"""Rows of the smallest tile: it holds one query at least with all heads of a key head."""


def attend_prefills(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                    log2_scale: float, window: int | None, scales: KVScales) -> None:
    """Write the rows of `out` that belong to requests with two queries or more, and no other.

    The arguments are those of `attend_decodes`; window None: no limit. Raises ValueError for more heads a key head
    than a tile holds.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group, num_requests = num_heads // num_kv_heads, len(batch.context_lens)
    if group > MOST_HEADS_PER_KEY_HEAD:
        raise ValueError(f"{group} query heads a key head: the Triton attention takes {MOST_HEADS_PER_KEY_HEAD}; use "
                         "the reference")

    def grid(meta: dict[str, int]) -> tuple[int, ...]:
        # Each request has at most one tile more than its queries fill.
        return num_tokens // (meta["ROWS"] // group) + num_requests, num_kv_heads

    _TILES.launch(
        grid,
        q, key_cache, value_cache, batch.query_start, batch.context_lens, batch.block_tables, out,
        log2_scale * scales.key, scales.value, q.stride(0), q.stride(1), batch.block_tables.stride(0), num_kv_heads,
        num_requests, window or 0, GROUP=group, HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, REQUESTS=triton.next_power_of_2(num_requests), HAS_WINDOW=window is not None)


@triton.jit
def _attend_tile(q, key_cache, value_cache, query_start, context_lens, block_tables, out, log2_scale, value_scale,
                 q_token_stride, q_head_stride, table_stride, num_kv_heads, num_requests, window, GROUP: tl.constexpr,
                 HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, REQUESTS: tl.constexpr,
                 HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    QUERIES: tl.constexpr = ROWS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = _request_of(tile, query_start, num_requests, REQUESTS, QUERIES)
    start = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - start
    first_query = (tile - start // QUERIES - request) * QUERIES
    if num_queries == 1 or first_query >= num_queries:
        return
    first_position = tl.load(context_lens + request) - num_queries + first_query
    last_position = first_position + tl.minimum(QUERIES, num_queries - first_query) - 1

    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query_index, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    is_query = ((row < QUERIES * GROUP) & (query_index < num_queries))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + query_index).to(tl.int64)
    query = tl.load(q + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :], mask=is_query,
                    other=0.0)
    own_position = first_position + row // GROUP
    table = block_tables + request.to(tl.int64) * table_stride
    weighted = tl.zeros((ROWS, WIDTH), tl.float32)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)

    # Tiles of keys that every query of the tile sees need no mask; they lie between those that some do not.
    end_tile = last_position // KEYS + 1
    end_whole = (first_position + 1) // KEYS
    first_whole = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - window + 1, 0) // KEYS
        first_whole = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS), end_tile)
        weighted, best, total = _attend_keys(
            query, key_cache, value_cache, table, weighted, best, total, first_tile, first_whole, own_position,
            last_position, window, kv_head, num_kv_heads, log2_scale, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, True, True)
    end_whole = tl.maximum(first_whole, end_whole)
    weighted, best, total = _attend_keys(
        query, key_cache, value_cache, table, weighted, best, total, first_whole, end_whole, own_position,
        last_position, window, kv_head, num_kv_heads, log2_scale, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, False, False)
    weighted, best, total = _attend_keys(
        query, key_cache, value_cache, table, weighted, best, total, end_whole, end_tile, own_position,
        last_position, window, kv_head, num_kv_heads, log2_scale, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, True, HAS_WINDOW)

    place = (token * num_kv_heads * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + place, (quotient(weighted, total) * value_scale).to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _request_of(tile, query_start, num_requests, REQUESTS: tl.constexpr, QUERIES: tl.constexpr):
    """The request of a tile: request r has the tiles from query_start[r] // QUERIES + r up to the next one's first."""
    request = tl.arange(0, REQUESTS)
    start = tl.load(query_start + request, mask=request < num_requests, other=0)
    is_before = (request < num_requests) & (start // QUERIES + request <= tile)
    return tl.sum(is_before.to(tl.int32), axis=0) - 1


@triton.jit
def _attend_keys(query, key_cache, value_cache, table, weighted, best, total, first_tile, end_tile, own_position,
                 last_position, window, kv_head, num_kv_heads, log2_scale, HEAD_DIM: tl.constexpr,
                 WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
                 HAS_WINDOW: tl.constexpr):
    dim = tl.arange(0, WIDTH)
    for tile in range(first_tile, end_tile):
        position = tile * KEYS + tl.arange(0, KEYS)
        is_read = position <= last_position
        line = cache_rows(table, position, is_read, kv_head, num_kv_heads, BLOCK_SIZE) * HEAD_DIM
        key_place, value_place = line[None, :] + dim[:, None], line[:, None] + dim[None, :]
        is_number = dim < HEAD_DIM
        key = tl.load(key_cache + key_place, mask=is_read[None, :] & is_number[:, None], other=0.0)
        value = tl.load(value_cache + value_place, mask=is_read[:, None] & is_number[None, :], other=0.0)
        scores = tl.dot(query, widen(key, query.dtype), input_precision="tf32x3") * log2_scale
        if IS_MASKED:
            is_seen = position[None, :] <= own_position[:, None]
            if HAS_WINDOW:
                is_seen &= position[None, :] > own_position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        weighted, best, total = attend(scores, widen(value, query.dtype), weighted, best, total)
    return weighted, best, total


_TILES = Tuned(
    _attend_tile,
    [triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
     for rows, keys, warps, stages in ((32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 2),
                                       (128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2))],
    key=["GROUP", "HEAD_DIM", "BLOCK_SIZE"])
