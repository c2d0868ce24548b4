"""What a run's records amount to."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from servekit.config.bench import SloConfig
from servekit.load.metrics import RequestLatencies, itl_s
from servekit.load.percentiles import Distribution, Percentile
from servekit.load.records import RequestRecord
from servekit.load.target import FailureKind

LAG_LIMIT_S = 0.010
"""p99 of the generator's lag from which on latencies say more about the generator than about the server."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of the requests that did not fail, in seconds; None where there is no sample."""

    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    """Pooled over all tokens of all requests."""
    max_itl_s: Distribution | None
    """The longest gap of each request."""
    e2e_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by how they ended."""

    warmup: int
    """Left out of every figure."""
    succeeded: int
    failed: int
    interrupted: int
    """In flight when the run was ended; neither good nor bad, and left out of every figure."""
    short: int
    """Succeeded, with fewer output tokens than wanted."""
    failures: dict[FailureKind, int]
    """The failed by kind."""

    @property
    def measured(self) -> int:
        """Requests that the figures are about."""
        return self.succeeded + self.failed


@dataclass(frozen=True, slots=True)
class Throughput:
    """Work of the requests that did not fail, over the window from the first intended send to the last end."""

    window_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens, cached ones included."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that meet every limit of the objective. A failed request meets none."""

    share: float
    """Of the measured requests."""
    requests_per_s: float
    """Over the window of the throughput."""


@dataclass(frozen=True, slots=True)
class LittlesLaw:
    """Mean number in the system against rate times mean time, over the window from first to last intended send.

    They agree when the run was stationary, and part when the queue grew or shrank (J. D. C. Little, 1961).
    """

    mean_in_system: float
    rate_per_s: float
    mean_time_s: float

    @property
    def predicted(self) -> float:
        """What the mean number would be in a steady state."""
        return self.rate_per_s * self.mean_time_s


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of the requests that did not fail, in tokens."""

    prompt_tokens: float
    output_tokens: float
    cached_share: float | None
    """Prompt tokens that the server took from its prefix cache, as a share; None if it does not say."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The figures of one tenant's requests, or of one class's."""

    succeeded: int
    failed: int
    prompt_tokens: int
    """Of the requests that did not fail; so are the output tokens and the latencies."""
    output_tokens: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    good_share: float | None
    """Share of its requests that meet the objective; None without one."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Every figure of a run. None where nothing was measured that it could be made of."""

    counts: Counts
    latencies: Latencies
    throughput: Throughput | None
    goodput: Goodput | None
    """None without an objective as well."""
    littles_law: LittlesLaw | None
    """None as well if the window is shorter than every request."""
    lengths: Lengths | None
    lag_s: Distribution | None
    """How late the generator sent, in seconds; None in a closed loop, which has no times to keep."""
    tenants: dict[str, GroupSummary] = field(default_factory=dict)
    """Of the requests that named one."""
    classes: dict[int, GroupSummary] = field(default_factory=dict)
    """By priority, of the requests that named one."""

    @property
    def is_generator_late(self) -> bool:
        """Whether the generator was too late for the latencies to be trusted."""
        return self.lag_s is not None and self.lag_s.percentiles[Percentile.p99] > LAG_LIMIT_S


def summarise(records: Iterable[RequestRecord], slo: SloConfig, is_open_loop: bool) -> Summary:
    """Compute every figure of a run from its records, in any order."""
    tally = Tally(slo, is_open_loop, ExactSample())
    for record in records:
        tally.add(record)
    return tally.summary()


class Sample(Protocol):
    """Numbers of which a distribution is wanted."""

    def extend(self, values: Sequence[float]) -> None: ...

    def distribution(self) -> Distribution | None:
        """None if there are no numbers."""


class ExactSample:
    """Keeps every number."""

    def __init__(self) -> None:
        self._values = array("d")

    def extend(self, values: Sequence[float]) -> None:
        self._values.extend(values)

    def distribution(self) -> Distribution | None:
        return Distribution.of(np.frombuffer(self._values, dtype=np.float64))


class RoundedSample:
    """Keeps how often each number occurs, rounded to four significant digits: exact to 0.05 %, and of bounded size."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def extend(self, values: Sequence[float]) -> None:
        self._counts.update(float(f"{value:.4g}") for value in values)

    def distribution(self) -> Distribution | None:
        values = np.fromiter(self._counts, np.float64, len(self._counts))
        return Distribution.of_counts(values, np.fromiter(self._counts.values(), np.int64, len(self._counts)))


class _Group:
    """The requests of one tenant or one class that have ended."""

    def __init__(self) -> None:
        self._num_failed = self._num_good = self._prompt_tokens = self._output_tokens = 0
        self._ttft_s, self._tpot_s, self._e2e_s = (array("d") for _ in range(3))

    def add(self, record: RequestRecord, slo: SloConfig) -> None:
        if record.failure is not None:
            self._num_failed += 1
            return
        latencies = RequestLatencies.of(record.timeline)
        self._ttft_s.append(latencies.ttft_s)
        self._e2e_s.append(latencies.e2e_s)
        if latencies.tpot_s is not None:
            self._tpot_s.append(latencies.tpot_s)
        self._num_good += slo.is_set and latencies.keep(slo)
        self._prompt_tokens += record.num_prompt_tokens
        self._output_tokens += record.num_output_tokens

    def summary(self, slo: SloConfig) -> GroupSummary:
        succeeded = len(self._e2e_s)
        good_share = self._num_good / (succeeded + self._num_failed) if slo.is_set else None
        return GroupSummary(succeeded, self._num_failed, self._prompt_tokens, self._output_tokens,
                            Distribution.of(self._ttft_s), Distribution.of(self._tpot_s), Distribution.of(self._e2e_s),
                            good_share)


class Tally:
    """Takes a run's records one at a time and keeps a few numbers of each; the gaps between tokens go to `gaps`."""

    def __init__(self, slo: SloConfig, is_open_loop: bool, gaps: Sample) -> None:
        self._slo = slo
        self._is_open_loop = is_open_loop
        self._gaps = gaps
        self._num_warmup = self._num_short = self._num_good = 0
        self._prompt_tokens = self._output_tokens = 0
        self._cached_tokens: int | None = None
        self._failures: Counter[FailureKind] = Counter()
        self._spans_s = array("d")
        """Intended send and end of every request, one after the other."""
        self._measured_spans_s = array("d")
        self._tenants: defaultdict[str, _Group] = defaultdict(_Group)
        self._classes: defaultdict[int, _Group] = defaultdict(_Group)
        self._lag_s, self._ttft_s, self._tpot_s, self._longest_gap_s, self._e2e_s = (array("d") for _ in range(5))

    def add(self, record: RequestRecord) -> None:
        """Take in one request that has ended."""
        self._spans_s.extend((record.intended_s, record.ended_s))
        if record.is_warmup:
            self._num_warmup += 1
            return
        if record.failure is not None:
            self._failures[record.failure.kind] += 1
            if record.failure.kind is FailureKind.interrupted:
                return
        self._measured_spans_s.extend((record.intended_s, record.ended_s))
        self._lag_s.append(record.lag_s)
        if record.failure is None:
            self._add_success(record)
        for group in self._groups_of(record):
            group.add(record, self._slo)

    def _groups_of(self, record: RequestRecord) -> Iterator[_Group]:
        if record.tenant:
            yield self._tenants[record.tenant]
        if record.priority is not None:
            yield self._classes[record.priority]

    def _add_success(self, record: RequestRecord) -> None:
        timeline = record.timeline
        latencies = RequestLatencies.of(timeline)
        self._gaps.extend(itl_s(timeline))
        for sample, value in ((self._ttft_s, latencies.ttft_s), (self._tpot_s, latencies.tpot_s),
                              (self._longest_gap_s, latencies.longest_itl_s), (self._e2e_s, latencies.e2e_s)):
            if value is not None:
                sample.append(value)
        self._num_short += record.num_output_tokens < record.wanted_output_tokens
        self._num_good += self._slo.is_set and latencies.keep(self._slo)
        self._prompt_tokens += record.num_prompt_tokens
        self._output_tokens += record.num_output_tokens
        if record.cached_tokens is not None:
            self._cached_tokens = (self._cached_tokens or 0) + record.cached_tokens

    def summary(self) -> Summary:
        """Every figure of the records so far."""
        throughput = self._throughput()
        return Summary(
            counts=self._counts(),
            latencies=Latencies(Distribution.of(self._ttft_s), Distribution.of(self._tpot_s),
                                self._gaps.distribution(), Distribution.of(self._longest_gap_s),
                                Distribution.of(self._e2e_s)),
            throughput=throughput,
            goodput=self._goodput(throughput),
            littles_law=self._littles_law(),
            lengths=self._lengths(),
            lag_s=Distribution.of(self._lag_s) if self._is_open_loop else None,
            tenants={tenant: self._tenants[tenant].summary(self._slo) for tenant in sorted(self._tenants)},
            classes={priority: self._classes[priority].summary(self._slo) for priority in sorted(self._classes)})

    @property
    def _num_succeeded(self) -> int:
        return len(self._e2e_s)

    @property
    def _num_measured(self) -> int:
        return len(self._measured_spans_s) // 2

    def _counts(self) -> Counts:
        failures: dict[FailureKind, int] = {kind: count for kind, count in self._failures.items()
                                            if kind is not FailureKind.interrupted}
        return Counts(warmup=self._num_warmup, succeeded=self._num_succeeded,
                      failed=self._num_measured - self._num_succeeded,
                      interrupted=self._failures[FailureKind.interrupted], short=self._num_short, failures=failures)

    def _throughput(self) -> Throughput | None:
        starts_s, ends_s = _spans(self._measured_spans_s)
        window_s = float(ends_s.max() - starts_s.min()) if len(ends_s) else 0.0
        if window_s == 0:
            return None
        return Throughput(window_s, self._num_succeeded / window_s, self._output_tokens / window_s,
                          (self._prompt_tokens + self._output_tokens) / window_s)

    def _goodput(self, throughput: Throughput | None) -> Goodput | None:
        if throughput is None or not self._slo.is_set:
            return None
        return Goodput(self._num_good / self._num_measured, self._num_good / throughput.window_s)

    def _littles_law(self) -> LittlesLaw | None:
        if self._num_measured < 2:
            return None
        measured_starts_s, measured_ends_s = _spans(self._measured_spans_s)
        start_s, end_s = float(measured_starts_s.min()), float(measured_starts_s.max())
        times_s = measured_ends_s - measured_starts_s
        # By the shortest time, not the mean: where the queue grows the mean outgrows the window, and that must show.
        if end_s == start_s or end_s - start_s < times_s.min():
            return None
        starts_s, ends_s = _spans(self._spans_s)
        inside_s = np.maximum(0.0, np.minimum(ends_s, end_s) - np.maximum(starts_s, start_s))
        return LittlesLaw(float(inside_s.sum()) / (end_s - start_s), (self._num_measured - 1) / (end_s - start_s),
                          float(times_s.mean()))

    def _lengths(self) -> Lengths | None:
        if not self._num_succeeded:
            return None
        return Lengths(self._prompt_tokens / self._num_succeeded, self._output_tokens / self._num_succeeded,
                       None if self._cached_tokens is None else self._cached_tokens / self._prompt_tokens)


def _spans(flat_s: array[float]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Starts and ends."""
    spans_s = np.frombuffer(flat_s, dtype=np.float64).reshape(-1, 2)
    return spans_s[:, 0], spans_s[:, 1]
