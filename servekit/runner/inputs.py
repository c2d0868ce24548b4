"""From a plan to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from servekit.core.plan import BlockCopy, Plan
from servekit.core.request import UNKNOWN_TOKEN, RequestId
from servekit.kernels import AttentionBatch
from servekit.runner.group import ONE_RANK, Group
from servekit.runner.queue import to_device
from servekit.runner.sampler import Stand


class SampledTokens:
    """The tokens that a step samples, for the step after it."""

    def __init__(self, request_ids: Sequence[RequestId], group: Group = ONE_RANK) -> None:
        """`request_ids`: whom the step samples for, in the order of its rows; `group`: who else computes with them."""
        self.request_ids = request_ids
        self._group = group
        self.tokens = torch.empty(0, dtype=torch.int64)
        """[S] int64, on the device, once the step's work has been done."""

    def rows_of(self, request_ids: Sequence[RequestId]) -> list[int]:
        """The rows of these requests."""
        row_of = {request_id: row for row, request_id in enumerate(self.request_ids)}
        return [row_of[request_id] for request_id in request_ids]

    def at(self, rows: Tensor) -> Tensor:
        """[U] int64: the tokens of these rows, which the other ranks are told."""
        return self._group.from_first(self.tokens[rows])

    def complete(self, stands: Sequence[Stand], request_ids: Sequence[RequestId]) -> None:
        """Put tokens where requests' histories lack their last one. Waits for the device if any does."""
        lacking = [i for i, stand in enumerate(stands) if stand.token_ids and stand.token_ids[-1] == UNKNOWN_TOKEN]
        rows = self.rows_of([request_ids[i] for i in lacking]) if lacking else []
        for i, row in zip(lacking, rows, strict=True):
            stands[i].token_ids[-1] = int(self.tokens[row])


class ToldTokens:
    """The same on another rank than the first, which samples."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def at(self, rows: Tensor) -> Tensor:
        """[U] int64: the tokens of these rows, once the first rank has told them."""
        return self._group.from_first(torch.empty_like(rows))


@dataclass(frozen=True, slots=True)
class Unknown:
    """Tokens that the step before samples."""

    places: Tensor
    """[U] int64: where they go, among the T."""
    rows: Tensor
    """[U] int64: which rows of the step before they are."""


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
    unknown: Unknown | None = None

    def on(self, device: torch.device) -> StepInputs:
        """The same on the device."""
        if device.type == "cpu":
            return self
        batch = replace(self.batch, query_start=to_device(self.batch.query_start, device),
                        context_lens=to_device(self.batch.context_lens, device),
                        block_tables=to_device(self.batch.block_tables, device),
                        slots=to_device(self.batch.slots, device))
        return replace(self, token_ids=to_device(self.token_ids, device), positions=to_device(self.positions, device),
                       batch=batch)

    def take_tokens(self, before: SampledTokens | ToldTokens) -> None:
        """Fill in the tokens that the step before has sampled, once it has."""
        if self.unknown is not None:
            device = self.token_ids.device
            places, rows = (to_device(indices, device) for indices in (self.unknown.places, self.unknown.rows))
            self.token_ids[places] = before.at(rows)


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What every rank needs to know of a step."""

    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    inputs: StepInputs | None
    """None where there are blocks to copy only."""
    graph_size: int | None
    """Decodes that the CUDA graph is made for that computes the step; None: no graph does."""


def build_inputs(plan: Plan, block_size_tokens: int, before: SampledTokens) -> StepInputs:
    """Lay the plan's items out one after the other, in the host's memory. Unknown tokens are those of `before`."""
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
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        context_lens=torch.from_numpy(context_lens.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        slots=torch.from_numpy(slots),
        max_query_tokens=int(lengths.max()),
        max_context_tokens=int(context_lens.max()),
        query_start_host=tuple(query_start.tolist()),
        context_lens_host=tuple(context_lens.tolist()))
    return StepInputs(torch.from_numpy(token_ids), torch.from_numpy(positions), batch, batch.query_start_host,
                      _unknown(plan, token_ids, request_of, before))


def _unknown(plan: Plan, token_ids: np.ndarray, request_of: np.ndarray, before: SampledTokens) -> Unknown | None:
    places = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
    if not len(places):
        return None
    rows = before.rows_of([plan.items[index].request.request_id for index in request_of[places].tolist()])
    return Unknown(torch.from_numpy(places), torch.from_numpy(np.asarray(rows)))


def _block_tables(plan: Plan, context_lens: np.ndarray, block_size_tokens: int) -> np.ndarray:
    """[R, most blocks] int32; rows are filled up with block 0, which no kernel reads past a context's end."""
    num_blocks = -(-context_lens // block_size_tokens)
    tables = np.zeros((len(plan.items), int(num_blocks.max())), np.int32)
    for row, (item, count) in enumerate(zip(plan.items, num_blocks.tolist(), strict=True)):
        tables[row, :count] = item.request.block_ids[:count]
    return tables
