"""When waiting requests may join the running batch: the components of scheduler.batching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.bounds import at_least, fixed_kind
from servekit.config.errors import require

_SECTION = "scheduler.batching"


class Batching(Enum):
    """When waiting requests may join the running batch."""

    static = "static"
    dynamic = "dynamic"
    continuous = "continuous"


@dataclass(frozen=True)
class BatchingConfig:
    """Base of the batching components."""

    kind: Batching = Batching.continuous
    """Which component this is."""


@dataclass(frozen=True)
class ContinuousBatchingConfig(BatchingConfig):
    """Requests join and leave between any two steps (Orca)."""

    def __post_init__(self) -> None:
        fixed_kind("batching", self.kind, Batching.continuous)


@dataclass(frozen=True)
class StaticBatchingConfig(BatchingConfig):
    """A batch of scheduler.max_num_seqs requests runs to its end before the next one starts (FasterTransformer)."""

    kind: Batching = Batching.static
    """Which component this is."""
    max_batch_delay_ms: float = 100.0
    """How long the request that waits longest is held, in milliseconds, for a batch that is not full."""
    early_return: bool = False
    """Give answers out as they come; false: when the whole batch is done. Slots stay empty in both cases."""

    def __post_init__(self) -> None:
        fixed_kind("batching", self.kind, Batching.static)
        at_least(f"{_SECTION}.max_batch_delay_ms", self.max_batch_delay_ms, 0, 100)


@dataclass(frozen=True)
class DynamicBatchingConfig(BatchingConfig):
    """Batches are formed of what waits, by preferred sizes and a delay, and run to their end (Triton)."""

    kind: Batching = Batching.dynamic
    """Which component this is."""
    batches_in_flight: int = 1
    """Batches that run at once; each may hold scheduler.max_num_seqs divided by this many requests."""
    preferred_batch_sizes: tuple[int, ...] = ()
    """Sizes at which a batch starts at once; empty: only the largest one."""
    max_batch_delay_ms: float = 0.0
    """How long the request that waits longest is held, in milliseconds, for a batch of a preferred size."""

    def __post_init__(self) -> None:
        fixed_kind("batching", self.kind, Batching.dynamic)
        at_least(f"{_SECTION}.batches_in_flight", self.batches_in_flight, 1, 1)
        at_least(f"{_SECTION}.max_batch_delay_ms", self.max_batch_delay_ms, 0, 0)
        for size in self.preferred_batch_sizes:
            at_least(f"{_SECTION}.preferred_batch_sizes", size, 1, "[]")

    def batch_size(self, max_num_seqs: int) -> int:
        """Most requests in one batch. Raises `ConfigError` when it is no whole number or a preferred size exceeds it.
        """
        require(max_num_seqs % self.batches_in_flight == 0, f"{_SECTION}.batches_in_flight", self.batches_in_flight,
                f"must divide scheduler.max_num_seqs={max_num_seqs}, which the batches share evenly",
                f"set scheduler.max_num_seqs={_next_multiple(max_num_seqs, self.batches_in_flight)}")
        size = max_num_seqs // self.batches_in_flight
        require(max(self.preferred_batch_sizes, default=1) <= size, f"{_SECTION}.preferred_batch_sizes",
                list(self.preferred_batch_sizes),
                f"must not exceed {size}, which is scheduler.max_num_seqs={max_num_seqs} shared by "
                f"scheduler.batching.batches_in_flight={self.batches_in_flight}",
                "lower the preferred sizes or raise scheduler.max_num_seqs")
        return size


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
