"""What every part of the experiment is given: a device, sizes, limits, a deadline, and a stop-watch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from servekit.kernels import Kernels, reference_kernels
from servekit.kernels.triton import Gpu, find_gpu, triton_kernels

Row = dict[str, object]
"""One measurement, as it goes into the result."""
Part = Callable[["Bench"], Iterator[Row]]

_ROUNDS = 7
_LEAST_CALLS = 24
"""Calls between two looks at the clock: one alone may take less than the clock can tell."""
_CACHES = 3
"""How many times the last cache the copies of a call's data fill, so that nothing is found there."""
_INTERPRETED = Gpu(num_processors=4, has_fp8=True)


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    shape: str
    """Of the model."""
    batches: tuple[int, ...]
    context_tokens: int
    prefills: tuple[int, ...]
    mode_batches: tuple[int, ...]
    """Where graphs and overlap are switched on and off."""
    timed_steps: int
    peer_batches: tuple[int, ...]
    mixed_decodes: int
    mixed_prompts: int
    mixed_prompt_tokens: int
    mixed_chunk_tokens: int
    cases: int
    """Random cases of each check in each number format."""
    copied_bytes: int
    """For the bandwidth."""
    matrix_width: int
    """For the matrix rate."""


FULL = Sizes("llama-3.1-8b", (1, 8, 32, 64, 128, 256), 1024, (512, 1024, 2048, 4096, 8192), (1, 8, 64), 32,
             (1, 8, 32), 32, 6, 4096, 512, 4, 4 * 2**30, 8192)
TINY = Sizes("tiny", (1, 3), 40, (33,), (1,), 4, (1,), 2, 2, 60, 16, 1, 2**22, 128)


@dataclass(frozen=True)
class Limits:
    """What the device was measured to do at best."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By number format; those that it does not multiply are absent."""

    def seconds(self, num_bytes: float, flops: float, numbers: str = "bfloat16") -> float:
        """The least time for so much work."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s.get(numbers, float("inf")))


@dataclass(frozen=True)
class Bench:
    """Where a part runs, and until when."""

    device: torch.device
    sizes: Sizes
    limits: Limits | None
    """None until they are measured."""
    deadline_s: float
    """On time.monotonic; a part looks between two measurements whether there is time for another."""

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline_s

    @property
    def known_limits(self) -> Limits:
        assert self.limits is not None, "the part `limits` comes first"
        return self.limits

    @property
    def gpu(self) -> Gpu:
        """The GPU; on a CPU the one that is interpreted."""
        return find_gpu(self.device) if self.device.type == "cuda" else _INTERPRETED

    def kernels(self) -> Kernels:
        """The Triton operations."""
        return triton_kernels(reference_kernels(), self.gpu)

    def num_copies(self, num_bytes: float) -> int:
        """How many copies of a call's data the last cache cannot hold."""
        if self.device.type == "cpu":
            return 1
        cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        return 1 + int(_CACHES * cache_bytes / num_bytes)

    def seconds_per_call(self, calls: Sequence[Callable[[], object]]) -> float:
        """Mean time of the calls, one after the other: the median of some rounds.

        On a GPU they are replayed as a CUDA graph, if they can be one: else the host's launches count too. On a CPU
        each is called once, which says nothing but that it can be.
        """
        for call in calls:  # Compiled and tuned: not while it is measured.
            call()
        if self.device.type == "cpu":
            return _clocked(calls)
        repeated = list(calls) * -(-_LEAST_CALLS // len(calls))
        replay = _captured(repeated)
        return statistics.median(_device_seconds(replay) for _ in range(_ROUNDS)) / len(repeated)


def _clocked(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    _each(calls)
    return (time.perf_counter() - start) / len(calls)


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Does the calls again: by a CUDA graph, or one by one where they wait for the host."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _each(calls)
    except RuntimeError:
        return partial(_each, calls)
    return graph.replay


def _device_seconds(work: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
