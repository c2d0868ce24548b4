"""What a run's records amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from servekit.config.bench import SloConfig
from servekit.load.metrics import e2e_s, itl_s, meets, tpot_s, ttft_s
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

    @property
    def is_generator_late(self) -> bool:
        """Whether the generator was too late for the latencies to be trusted."""
        return self.lag_s is not None and self.lag_s.percentiles[Percentile.p99] > LAG_LIMIT_S


def summarise(records: Iterable[RequestRecord], slo: SloConfig, is_open_loop: bool) -> Summary:
    """Compute every figure of a run from its records, in any order."""
    everything = list(records)
    measured = [r for r in everything if not r.is_warmup and not _is_interrupted(r)]
    succeeded = [r for r in measured if r.failure is None]
    throughput = _throughput(measured, succeeded)
    return Summary(
        counts=_counts(everything, measured, succeeded),
        latencies=_latencies(succeeded),
        throughput=throughput,
        goodput=_goodput(measured, succeeded, slo, throughput),
        littles_law=_littles_law(everything, measured),
        lengths=_lengths(succeeded),
        lag_s=Distribution.of([r.lag_s for r in measured]) if is_open_loop else None)


def _is_interrupted(record: RequestRecord) -> bool:
    return record.failure is not None and record.failure.kind is FailureKind.interrupted


def _counts(everything: Sequence[RequestRecord], measured: Sequence[RequestRecord],
            succeeded: Sequence[RequestRecord]) -> Counts:
    warmup = sum(r.is_warmup for r in everything)
    return Counts(
        warmup=warmup, succeeded=len(succeeded), failed=len(measured) - len(succeeded),
        interrupted=len(everything) - warmup - len(measured),
        short=sum(r.num_output_tokens < r.wanted_output_tokens for r in succeeded),
        failures=dict(Counter(r.failure.kind for r in measured if r.failure is not None)))


def _latencies(succeeded: Sequence[RequestRecord]) -> Latencies:
    timelines = [r.timeline for r in succeeded]
    gaps = [itl_s(timeline) for timeline in timelines]
    return Latencies(
        ttft_s=Distribution.of([ttft_s(timeline) for timeline in timelines]),
        tpot_s=Distribution.of([tpot for timeline in timelines if (tpot := tpot_s(timeline)) is not None]),
        itl_s=Distribution.of([gap for of_request in gaps for gap in of_request]),
        max_itl_s=Distribution.of([max(of_request) for of_request in gaps if of_request]),
        e2e_s=Distribution.of([e2e_s(timeline) for timeline in timelines]))


def _throughput(measured: Sequence[RequestRecord], succeeded: Sequence[RequestRecord]) -> Throughput | None:
    window_s = max((r.ended_s for r in measured), default=0.0) - min((r.intended_s for r in measured), default=0.0)
    if window_s == 0:
        return None
    output = sum(r.num_output_tokens for r in succeeded)
    prompt = sum(r.num_prompt_tokens for r in succeeded)
    return Throughput(window_s, len(succeeded) / window_s, output / window_s, (prompt + output) / window_s)


def _goodput(measured: Sequence[RequestRecord], succeeded: Sequence[RequestRecord], slo: SloConfig,
             throughput: Throughput | None) -> Goodput | None:
    if throughput is None or not slo.is_set:
        return None
    good = sum(meets(r.timeline, slo) for r in succeeded)
    return Goodput(good / len(measured), good / throughput.window_s)


def _littles_law(everything: Sequence[RequestRecord], measured: Sequence[RequestRecord]) -> LittlesLaw | None:
    if len(measured) < 2:
        return None
    start_s, end_s = min(r.intended_s for r in measured), max(r.intended_s for r in measured)
    times_s = [r.ended_s - r.intended_s for r in measured]
    # By the shortest time, not the mean: where the queue grows the mean outgrows the window, and that must show.
    if end_s == start_s or end_s - start_s < min(times_s):
        return None
    inside_s = (max(0.0, min(r.ended_s, end_s) - max(r.intended_s, start_s)) for r in everything)
    return LittlesLaw(sum(inside_s) / (end_s - start_s), (len(measured) - 1) / (end_s - start_s), fmean(times_s))


def _lengths(succeeded: Sequence[RequestRecord]) -> Lengths | None:
    if not succeeded:
        return None
    prompt = sum(r.num_prompt_tokens for r in succeeded)
    cached = [r.cached_tokens for r in succeeded if r.cached_tokens is not None]
    return Lengths(prompt / len(succeeded), fmean(r.num_output_tokens for r in succeeded),
                   sum(cached) / prompt if cached else None)
