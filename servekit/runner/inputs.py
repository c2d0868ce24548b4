"""From a plan to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servekit.core.plan import Plan
from servekit.kernels import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the decoder reads. T: tokens of the step; R: requests in it."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    batch: AttentionBatch
    row_of: tuple[int, ...]
    """First row of each plan item among the T, and T at the end."""


def build_inputs(plan: Plan, block_size_tokens: int, device: torch.device) -> StepInputs:
    """Lay the plan's items out one after the other."""
    counts = [item.num_tokens for item in plan.items]
    starts = np.fromiter((item.start for item in plan.items), np.int64, len(counts))
    lengths = np.asarray(counts, np.int64)
    query_start = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])
    context_lens = starts + lengths
    token_ids = np.fromiter((token for item in plan.items
                             for token in item.request.token_ids[item.start:item.start + item.num_tokens]),
                            np.int64, int(query_start[-1]))
    request_of = np.repeat(np.arange(len(counts)), lengths)
    positions = np.arange(len(token_ids)) - query_start[request_of] + starts[request_of]
    tables = _block_tables(plan, context_lens, block_size_tokens)
    slots = tables[request_of, positions // block_size_tokens].astype(np.int64) * block_size_tokens
    slots += positions % block_size_tokens
    batch = AttentionBatch(
        query_start=_to(device, query_start.astype(np.int32)),
        context_lens=_to(device, context_lens.astype(np.int32)),
        block_tables=_to(device, tables),
        slots=_to(device, slots),
        max_query_tokens=int(lengths.max()),
        max_context_tokens=int(context_lens.max()),
        query_start_host=tuple(query_start.tolist()),
        context_lens_host=tuple(context_lens.tolist()))
    return StepInputs(_to(device, token_ids), _to(device, positions), batch, batch.query_start_host)


def _block_tables(plan: Plan, context_lens: np.ndarray, block_size_tokens: int) -> np.ndarray:
    """[R, most blocks] int32; rows are filled up with block 0, which no kernel reads past a context's end."""
    num_blocks = -(-context_lens // block_size_tokens)
    tables = np.zeros((len(plan.items), int(num_blocks.max())), np.int32)
    for row, (item, count) in enumerate(zip(plan.items, num_blocks.tolist(), strict=True)):
        tables[row, :count] = item.request.block_ids[:count]
    return tables


def _to(device: torch.device, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
