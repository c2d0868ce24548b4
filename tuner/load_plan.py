"""Which requests a run sends: the workload's lengths and arrivals at a rate, with prompts that nobody has seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from zlib import crc32

from servekit.config.bench import (
    ArrivalConfig,
    BenchConfig,
    ClosedArrivalConfig,
    FixedArrivalConfig,
    GammaArrivalConfig,
    MooncakeWorkloadConfig,
    PoissonArrivalConfig,
    SharedPrefixWorkloadConfig,
    TraceArrivalConfig,
    TraceWorkloadConfig,
)
from servekit.config.errors import require
from servekit.load.arrivals import schedule
from servekit.load.workload import ConfiguredWorkload, Vocabulary, WorkloadRequest, shapes
from servekit.tuner.measure import Load


@dataclass(frozen=True)
class LoadPlan:
    """The load of every run of a study, but for rate, length and seed."""

    bench: BenchConfig
    """Workload and arrivals, as `servekit bench` takes them."""
    seed: int
    """Of the study."""
    warmup_requests: int
    timeout_s: float

    def load(self, rate_per_s: float, num_requests: int, stream: str, vocab_size: int) -> Load:
        """The load of one run, of random tokens below `vocab_size`.

        Equal names of `stream` give equal requests, different ones have nothing in common.
        """
        seed = crc32(f"{self.seed} {stream}".encode())
        workload = ConfiguredWorkload(self.bench.workload, self._vocabulary(vocab_size), seed)
        shares = isinstance(self.bench.workload, SharedPrefixWorkloadConfig | MooncakeWorkloadConfig)
        total = num_requests + self.warmup_requests
        return Load(islice(schedule(workload, self.at_rate(rate_per_s), seed), total), num_requests,
                    self.warmup_requests, self.timeout_s, shares)

    def at_rate(self, rate_per_s: float) -> ArrivalConfig:
        """The arrivals, sped up or slowed down to a mean rate."""
        match self.bench.arrival:
            case PoissonArrivalConfig() | GammaArrivalConfig() | FixedArrivalConfig() as arrival:
                return replace(arrival, rate_per_s=rate_per_s)
            case TraceArrivalConfig() as arrival:
                return replace(arrival, rate_scale=rate_per_s / self.trace_rate_per_s())
            case ClosedArrivalConfig():
                require(False, "workload.arrival", "closed", "has no rate to search",
                        "choose poisson, gamma, fixed or trace")
        raise TypeError(f"no rate for {self.bench.arrival}")

    def trace_rate_per_s(self) -> float:
        """Mean rate of the trace's own times."""
        times_s = [shape.arrival_s for shape in shapes(self.bench.workload, self.seed) if shape.arrival_s is not None]
        require(len(times_s) > 1 and times_s[-1] > times_s[0], "workload.trace", len(times_s),
                "needs at least two requests at different times to have a rate", "choose a longer trace")
        return (len(times_s) - 1) / (times_s[-1] - times_s[0])

    @cached_property
    def available(self) -> int | None:
        """Requests that may be judged in one run; None: any number. Raises ConfigError for a trace that cannot be read.
        """
        if not isinstance(self.bench.workload, TraceWorkloadConfig):
            return None
        return sum(1 for _ in shapes(self.bench.workload, self.seed)) - self.warmup_requests

    def longest_tokens(self, num_requests: int) -> int:
        """The longest prompt and output together among the first requests of the workload."""
        return max(shape.own_tokens + sum(part.num_tokens for part in shape.shared) + shape.output_tokens
                   for shape in islice(shapes(self.bench.workload, self.seed), num_requests))

    def sample(self, count: int, vocab_size: int) -> Iterator[WorkloadRequest]:
        """Some requests of the workload, without times."""
        return islice(iter(ConfiguredWorkload(self.bench.workload, self._vocabulary(vocab_size), self.seed)), count)

    def _vocabulary(self, vocab_size: int) -> Vocabulary:
        require(self.bench.vocab_low < vocab_size, "workload.vocab_low", self.bench.vocab_low,
                f"the model's vocabulary has {vocab_size} tokens", "set workload.vocab_low=0")
        return Vocabulary(self.bench.vocab_low, min(self.bench.vocab_high, vocab_size))
