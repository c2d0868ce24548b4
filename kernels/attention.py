"""Attention over a paged KV cache (PagedAttention; Kwon et al., 2023), with queries of variable length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from servekit.kernels.precision import movable


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which queries of a step attend to which blocks.

    T tokens belong to R requests; the tokens of one request are consecutive and are the last ones of its context.
    Query i of request r stands at position `context_lens[r] - num_queries[r] + i` and sees the positions up to its
    own.
    """

    query_start: Tensor
    """[R + 1] int32: request r has the tokens query_start[r] up to query_start[r + 1]."""
    context_lens: Tensor
    """[R] int32: tokens of each request in the KV cache after this step's write."""
    block_tables: Tensor
    """[R, max_blocks] int32: each request's blocks in order; columns past its context are never read."""
    slots: Tensor
    """[T] int64: where each token's key and value go, block * block_size + offset."""
    max_query_tokens: int
    max_context_tokens: int
    query_start_host: tuple[int, ...]
    """`query_start` in host memory: reading the tensor on a GPU would wait for the device."""
    context_lens_host: tuple[int, ...]
    """`context_lens` in host memory."""


def reference(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
              window: int | None) -> Tensor:
    """Causal attention, one request after the other, so that none can depend on its neighbours.

    Args:
        q: [T, num_heads, head_dim]. Query head h reads key head h // (num_heads / num_kv_heads).
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], this step's keys included; in any format.
        value_cache: The same for values.
        batch: See `AttentionBatch`.
        scale: Factor of the scores before the softmax.
        window: A query sees only the last `window` positions, its own included; None: all.

    Returns:
        [T, num_heads, head_dim].
    """
    out = torch.empty_like(q)
    tables = _tables_by_head(batch.block_tables, key_cache.shape[1])
    for index, context_len in enumerate(batch.context_lens_host):
        start, end = batch.query_start_host[index], batch.query_start_host[index + 1]
        num_queries = end - start
        first_seen = 0 if window is None else max(0, context_len - num_queries - window + 1)
        keys = _gather(key_cache, tables[index], first_seen, context_len).to(q.dtype)
        values = _gather(value_cache, tables[index], first_seen, context_len).to(q.dtype)
        mask = _visible(num_queries, context_len - first_seen, window, q.device) if num_queries > 1 else None
        attended = F.scaled_dot_product_attention(q[start:end].transpose(0, 1).unsqueeze(0), keys.unsqueeze(0),
                                                  values.unsqueeze(0), mask, scale=scale, enable_gqa=True)
        out[start:end] = attended.squeeze(0).transpose(0, 1)
    return out


def _tables_by_head(block_tables: Tensor, num_kv_heads: int) -> Tensor:
    """[R, num_kv_heads, max_blocks]: where each head's part of each block lies if heads count as blocks."""
    heads = torch.arange(num_kv_heads, device=block_tables.device)
    return block_tables.unsqueeze(1) * num_kv_heads + heads.unsqueeze(1)


def _gather(cache: Tensor, table: Tensor, start: int, end: int) -> Tensor:
    """The rows of positions `start` up to `end` of one request, [num_kv_heads, end - start, head_dim].

    Gathering by head puts each head's rows one after the other without a second copy.
    """
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    first_block = start // block_size
    parts = table[:, first_block:-(-end // block_size)].flatten()
    by_head = movable(cache).view(num_blocks * num_kv_heads, block_size, head_dim)
    rows = by_head.index_select(0, parts).view(cache.dtype)
    offset = first_block * block_size
    return rows.view(num_kv_heads, -1, head_dim)[:, start - offset:end - offset]


def _visible(num_queries: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """[n, L] bool: which of L positions each of the last n may see."""
    own = torch.arange(context_len - num_queries, context_len, device=device).unsqueeze(1)
    others = torch.arange(context_len, device=device)
    causal = others <= own
    return causal if window is None else causal & (others > own - window)
