"""A paged KV cache for tests: blocks in shuffled order, and NaN wherever nothing was written."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from servekit.kernels import AttentionBatch
from servekit.model.decoder import Decoder


def attention_batch(query_lens: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[Sequence[int]],
                    block_size: int) -> AttentionBatch:
    """The batch of requests with these numbers of queries, contexts and blocks."""
    width = max(len(table) for table in block_tables)
    starts = (0, *accumulate(query_lens))
    slots = [table[position // block_size] * block_size + position % block_size
             for num_queries, context_len, table in zip(query_lens, context_lens, block_tables, strict=True)
             for position in range(context_len - num_queries, context_len)]
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in block_tables],
                                  dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
        max_query_tokens=max(query_lens),
        max_context_tokens=max(context_lens),
        query_start_host=starts,
        context_lens_host=tuple(context_lens),
    )


def empty_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A cache in which every unwritten number is NaN, so that reading one shows."""
    return torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)


class PagedRun:
    """Runs a decoder step by step, giving each request blocks from a shuffled free list."""

    def __init__(self, decoder: Decoder, block_size: int, num_blocks: int, seed: int = 0) -> None:
        spec = decoder.spec
        dtype = decoder.weights.embedding.dtype
        self._decoder = decoder
        self._block_size = block_size
        self._kv = [(empty_cache(num_blocks, spec.num_kv_heads, block_size, spec.head_dim, dtype),
                     empty_cache(num_blocks, spec.num_kv_heads, block_size, spec.head_dim, dtype))
                    for _ in range(spec.num_layers)]
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._context_lens: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute these tokens of each request; returns the logits [n, vocab] of each request's tokens."""
        query_lens = [len(tokens) for tokens in chunks.values()]
        for request, tokens in chunks.items():
            self._grow(request, len(tokens))
        batch = attention_batch(query_lens, [self._context_lens[request] for request in chunks],
                                [self._tables[request] for request in chunks], self._block_size)
        token_ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        positions = torch.tensor([position for request, tokens in chunks.items()
                                  for position in range(self._context_lens[request] - len(tokens),
                                                        self._context_lens[request])])
        logits = self._decoder.logits(self._decoder.forward(token_ids, positions, batch, self._kv))
        return dict(zip(chunks, torch.split(logits, query_lens), strict=True))

    def in_chunks(self, request: str, tokens: Sequence[int], chunk: int) -> Tensor:
        """Logits [n, vocab] of one request alone, computed `chunk` tokens at a time."""
        return torch.cat([self.step({request: tokens[start:start + chunk]})[request]
                          for start in range(0, len(tokens), chunk)])

    def _grow(self, request: str, num_tokens: int) -> None:
        self._context_lens[request] = self._context_lens.get(request, 0) + num_tokens
        table = self._tables.setdefault(request, [])
        while len(table) * self._block_size < self._context_lens[request]:
            table.append(self._free.pop())


def random_caches(lengths: Sequence[tuple[int, int]], block_size: int, num_kv_heads: int, head_dim: int,
                  dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Keys, values and batch of requests of (context, queries); fewer queries where the context is shorter.

    There are random numbers in their contexts, and NaN in every other place of the caches. Blocks lie in random order.
    A table that is shorter than the longest goes on with a block that is all NaN.
    """
    context_lens = [context for context, _ in lengths]
    needed = [-(-context // block_size) for context in context_lens]
    poisoned, *free = random.Random(seed).sample(range(sum(needed) + 1), sum(needed) + 1)
    tables = [[free.pop() for _ in range(count)] + [poisoned] * (max(needed) - count) for count in needed]
    keys, values = (empty_cache(sum(needed) + 1, num_kv_heads, block_size, head_dim, dtype) for _ in range(2))
    for index, (context, table) in enumerate(zip(context_lens, tables, strict=True)):
        position = torch.arange(context)
        blocks, offsets = torch.tensor(table, dtype=torch.long)[position // block_size], position % block_size
        for part, cache in enumerate((keys, values)):
            generator = torch.Generator().manual_seed(seed + 2 * index + part + 1)
            cache[blocks, :, offsets] = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
    return keys, values, attention_batch([min(pair) for pair in lengths], context_lens, tables, block_size)
