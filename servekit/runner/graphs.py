"""Decode steps as CUDA graphs: recorded once for a few batch sizes, then done again without the host's help.

The tables of sizes, the filling up and the input buffers are plain tensors' business; only `CudaCapturer` needs a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from servekit.core.plan import Plan
from servekit.kernels import AttentionBatch
from servekit.model.footprint import activation_bytes
from servekit.model.spec import ModelSpec
from servekit.runner.inputs import SampledTokens, StepInputs, ToldTokens
from servekit.runner.queue import pinned

_NO_SLOT = -1
"""Of a row that only fills up the batch: its keys and values are not written."""

_BYTES_PER_GRAPH = 8 * 2**20
"""What the driver keeps of one graph, roughly: some hundreds of kernels with their arguments."""

_LOGIT_BYTES = 4

_WARM_UPS = 2


class CapturedWork(Protocol):
    """Work that has been recorded."""

    def replay(self) -> Tensor:
        """Do it again on what its inputs hold now; the result is overwritten by the next replay."""


class Capturer(Protocol):
    """Records what work does on the device."""

    def capture(self, work: Callable[[], Tensor]) -> CapturedWork:
        """Record the work. It reads the same addresses at each replay, and does nothing that waits for the device."""


@dataclass(frozen=True)
class GraphSizes:
    """The batch sizes that decodes are captured for, ascending."""

    sizes: tuple[int, ...]

    def pick(self, num_decodes: int) -> int | None:
        """The smallest size that holds so many decodes; None above the largest."""
        index = bisect_left(self.sizes, num_decodes)
        return self.sizes[index] if index < len(self.sizes) else None


class GraphInputs:
    """What all graphs read: room for the largest one's decodes, of which a smaller one has the first rows."""

    def __init__(self, max_size: int, max_model_len: int, block_size_tokens: int, device: torch.device) -> None:
        def rows(dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.zeros((max_size, *columns), dtype=dtype, device=device)

        self._max_model_len = max_model_len
        self._token_ids, self._positions, self._slots = rows(torch.int64), rows(torch.int64), rows(torch.int64)
        self._context_lens = rows(torch.int32)
        self._block_tables = rows(torch.int32, -(-max_model_len // block_size_tokens))
        self._query_start = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        self._slots.fill_(_NO_SLOT)

    def of(self, size: int) -> StepInputs:
        """The inputs of one graph. What the host is told of lengths holds at every replay: they are bounds."""
        row_of = tuple(range(size + 1))
        batch = AttentionBatch(
            query_start=self._query_start[:size + 1], context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size], slots=self._slots[:size], max_query_tokens=1,
            max_context_tokens=self._max_model_len, query_start_host=row_of,
            context_lens_host=(self._max_model_len,) * size)
        return StepInputs(self._token_ids[:size], self._positions[:size], batch, row_of)

    def fill(self, inputs: StepInputs, size: int) -> None:
        """Take over a step of decodes, and fill it up to `size` rows."""
        def put(place: Tensor, values: Tensor, filling: int) -> None:
            full = F.pad(values, (0, size - len(values)), value=filling)
            place[:size].copy_(pinned(full, place.device), non_blocking=True)

        put(self._token_ids, inputs.token_ids, 0)
        put(self._positions, inputs.positions, 0)
        put(self._slots, inputs.batch.slots, _NO_SLOT)
        put(self._context_lens, inputs.batch.context_lens, 0)
        tables = inputs.batch.block_tables
        place = self._block_tables[:len(tables), :tables.shape[1]]
        place.copy_(pinned(tables, place.device), non_blocking=True)


@dataclass(frozen=True)
class _DecodeGraph:
    inputs: StepInputs
    work: CapturedWork


class DecodeGraphs:
    """A graph for each size. All share their inputs, and their memory, which the largest has claimed before the others.
    """

    def __init__(self, sizes: GraphSizes, inputs: GraphInputs, forward: Callable[[StepInputs], Tensor],
                 capturer: Capturer, on_progress: Callable[[int, int], None]) -> None:
        """Capture.

        Args:
            sizes: For which numbers of decodes.
            inputs: Room for the largest.
            forward: From inputs to logits [size, vocab].
            capturer: Records it.
            on_progress: Told (graphs captured, graphs in all).
        """
        self._sizes = sizes
        self._inputs = inputs
        self._graphs: dict[int, _DecodeGraph] = {}
        for number, size in enumerate(reversed(sizes.sizes)):
            on_progress(number, len(sizes.sizes))
            own = inputs.of(size)
            self._graphs[size] = _DecodeGraph(own, capturer.capture(partial(forward, own)))
        on_progress(len(sizes.sizes), len(sizes.sizes))

    def pick(self, plan: Plan) -> int | None:
        """The size of the graph that computes the plan; None if it is more than decodes, or more of them than any."""
        num_decodes = len(plan.items)
        is_pure = 0 < num_decodes == plan.num_tokens and all(item.samples for item in plan.items)
        return self._sizes.pick(num_decodes) if is_pure else None

    def logits(self, size: int, inputs: StepInputs, before: SampledTokens | ToldTokens) -> Tensor:
        """[R, vocab]: the logits of R decodes by the graph for `size`, valid until the next step."""
        graph = self._graphs[size]
        self._inputs.fill(inputs, size)
        replace(graph.inputs, unknown=inputs.unknown).take_tokens(before)
        return graph.work.replay()[:len(inputs.token_ids)]


def graph_bytes(spec: ModelSpec, sizes: Sequence[int], max_model_len: int, block_size_tokens: int,
                dtype_bytes: int) -> int:
    """Estimate of what graphs of these sizes take.

    They share a pool, which is as large as the temporary tensors of the largest one; beside these each keeps its logits
    and its kernels' arguments.
    """
    if not sizes:
        return 0
    largest = max(sizes)
    input_bytes = largest * (3 * 8 + 4 + 4 * -(-max_model_len // block_size_tokens))
    return (activation_bytes(spec, largest, largest, dtype_bytes) + input_bytes
            + sum(sizes) * spec.vocab_size * _LOGIT_BYTES + len(sizes) * _BYTES_PER_GRAPH)


class CudaCapturer:
    """Records CUDA graphs in one memory pool, on a stream of its own."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], Tensor]) -> CapturedWork:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):  # Kernels are compiled and tuned, libraries loaded: not while it is recorded.
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        return _CudaGraph(graph, result)


@dataclass(frozen=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.result
