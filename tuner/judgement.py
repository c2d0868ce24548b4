"""What logged runs prove: pure functions of the logs, so that anybody can compute the same again.

A configuration is confirmed at a rate when every promise held there by count, in each run and in all of them together.
Its bounds come from blocks in time, since requests of one busy period are slow together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from math import inf, isfinite
from typing import TypeAlias

import numpy as np

from servekit.load.metrics import RequestLatencies
from servekit.load.percentiles import rank
from servekit.tuner.run_log import LoggedRequest, LoggedRun
from servekit.tuner.slo import Promise, Slo
from servekit.tuner.statistics import (
    Array,
    block_bootstrap,
    blocks_by_time,
    miss_share,
    percentile_interval_by_blocks,
)

RUNS_PER_RATE = 2
"""Runs that confirm a configuration at a rate: one on the way there and one on the way back (A-B-B-A)."""
_BLOCK_IN_ANSWERS = 3.0
"""A block of time is this many times as long as the mean answer takes."""
_SMALLEST_BLOCK_SHARE = 0.05
"""But no shorter than this share of its run: more blocks tell nothing more."""
_SAME_RATE = 1e-9

Flags: TypeAlias = Array
"""One 0 or 1 for each request: whether it missed."""


class Role(Enum):
    """Why a configuration was measured again."""

    tuned = "tuned"
    """The search found it."""
    default = "default"
    """What the user had."""
    rule_of_thumb = "rule_of_thumb"
    random = "random"
    """The best that random search found in the same time."""


@dataclass(frozen=True)
class NamedRun:
    """A run, and whose it was."""

    finalist: str
    run: LoggedRun


@dataclass(frozen=True)
class PromiseFinding:
    """How a promise stood at one rate. A share or ratio without a bound is None: the sample is too small for one."""

    promise: str
    num_requests: int
    num_missed: int
    num_allowed: int
    """Misses that leave the promise kept."""
    effective_requests: float
    """Independent requests that would tell as much."""
    share_low: float
    """Bounds of the true share of misses, two-sided at 95 %."""
    share_high: float
    share_at_most: float
    """One-sided at 95 %."""
    use: float | None
    """The latency at the promised percentile as a share of its limit; of several limits, the worst. None: it failed."""
    use_low: float | None
    use_high: float | None
    is_proven: bool
    """Whether the one-sided bound alone keeps the promise."""
    is_disproven: bool
    """Whether even the lower bound breaks it."""

    @property
    def holds(self) -> bool:
        """By count."""
        return self.num_missed <= self.num_allowed


@dataclass(frozen=True)
class RateFinding:
    """What a configuration did at one rate."""

    rate_per_s: float
    num_runs: int
    holds: bool
    """By count, in each run and in all together."""
    promises: tuple[PromiseFinding, ...]

    @property
    def is_confirmed(self) -> bool:
        """Whether it held in as many runs as it takes."""
        return self.holds and self.num_runs >= RUNS_PER_RATE


@dataclass(frozen=True)
class FinalistFinding:
    """What a configuration did at all rates that it was measured at."""

    name: str
    role: Role
    rates: tuple[RateFinding, ...]
    """In ascending order."""
    survives_attack: bool | None
    """Whether it survived the memory attack; None: it was not attacked."""

    @property
    def confirmed_per_s(self) -> float | None:
        """The highest rate at which it was confirmed."""
        return max((found.rate_per_s for found in self.rates if found.is_confirmed), default=None)

    @property
    def failed_per_s(self) -> float | None:
        """The lowest rate above that at which it failed."""
        floor = self.confirmed_per_s or 0.0
        return min((found.rate_per_s for found in self.rates if not found.holds and found.rate_per_s > floor),
                   default=None)

    def at(self, rate_per_s: float) -> RateFinding | None:
        """What it did at a rate."""
        return next((found for found in self.rates if is_same_rate(found.rate_per_s, rate_per_s)), None)


@dataclass(frozen=True)
class Ratio:
    """The winner's rate over the default's. A bound is None where nothing was measured that would give one."""

    value: float | None
    """None: the default held at no rate that was tried."""
    low: float | None
    """Over the lowest rate at which the default failed."""
    high: float | None
    """From the lowest rate at which the winner failed."""


@dataclass(frozen=True)
class Difference:
    """Winner against default on the same requests at the same rate: the difference of their shares of misses."""

    promise: str
    rate_per_s: float
    num_pairs: int
    winner_missed: int
    default_missed: int
    low: float | None
    """Of winner minus default at 95 %, by a bootstrap over blocks of time; None: too few blocks."""
    high: float | None


@dataclass(frozen=True)
class Judgement:
    """What was confirmed."""

    finalists: tuple[FinalistFinding, ...]
    winner: str | None
    """The confirmed one with the highest rate; None: no configuration held the objective."""
    ratio: Ratio | None
    """None without a winner or without a default."""
    differences: tuple[Difference, ...]

    def find(self, name: str) -> FinalistFinding:
        """The finding of a finalist."""
        return next(found for found in self.finalists if found.name == name)

    @property
    def default(self) -> FinalistFinding | None:
        """What the default did."""
        return next((found for found in self.finalists if found.role is Role.default), None)


def judge(slo: Slo, roles: Mapping[str, Role], runs: Sequence[NamedRun],
          attacks: Mapping[str, bool] | None = None) -> Judgement:
    """What these runs prove of the finalists named in `roles`.

    `attacks` says of those that were attacked whether they survived; one that did not cannot win.
    """
    evidence = [named for named in runs if is_evidence(named.run)]
    survived = attacks or {}
    findings = tuple(FinalistFinding(name, role, _at_each_rate(slo, runs_of(name, evidence)), survived.get(name))
                     for name, role in roles.items())
    winner = best(findings)
    default = next((found for found in findings if found.role is Role.default), None)
    if winner is None or default is None:
        return Judgement(findings, winner.name if winner else None, None, ())
    return Judgement(findings, winner.name, _ratio(winner, default), tuple(_differences(
        slo, winner, runs_of(winner.name, evidence), runs_of(default.name, evidence))))


def is_evidence(run: LoggedRun) -> bool:
    """Whether a run counts: from a fresh process, whole, and nothing wrong with the measurement."""
    return run.warm == "cold" and not run.problems and len(run.measured) == run.num_requests


def is_same_rate(one_per_s: float, other_per_s: float) -> bool:
    """Whether two rates are equal but for rounding."""
    return abs(one_per_s - other_per_s) <= _SAME_RATE * one_per_s


def runs_of(name: str, runs: Iterable[NamedRun]) -> list[LoggedRun]:
    """Those of one finalist."""
    return [named.run for named in runs if named.finalist == name]


def best(findings: Iterable[FinalistFinding]) -> FinalistFinding | None:
    """The winner. Of equal rates the earlier finalist, the default before any other: what is there needs no change."""
    standing = [found for found in findings if found.confirmed_per_s is not None and found.survives_attack is not False]
    return max(standing, key=lambda found: (found.confirmed_per_s or 0.0, found.role is Role.default), default=None)


# --- one configuration at one rate ------------------------------------------------------------------------------------

def _at_each_rate(slo: Slo, runs: Sequence[LoggedRun]) -> tuple[RateFinding, ...]:
    rates = sorted({run.rate_per_s for run in runs})
    return tuple(rate_finding(slo, [run for run in runs if run.rate_per_s == rate_per_s]) for rate_per_s in rates)


def rate_finding(slo: Slo, runs: Sequence[LoggedRun]) -> RateFinding:
    """What some runs at one rate say together."""
    return RateFinding(runs[0].rate_per_s, len(runs), holds(slo, runs),
                       tuple(promise_finding(promise, runs) for promise in slo.promises))


def holds(slo: Slo, runs: Sequence[LoggedRun]) -> bool:
    """Whether every promise was kept by count, in each run and in all of them together."""
    latencies = [latencies_of(run) for run in runs]
    return all(map(slo.holds, latencies)) and slo.holds(list(chain(*latencies)))


def latencies_of(run: LoggedRun) -> list[RequestLatencies | None]:
    """Of the requests that count, in order; None for one that failed."""
    return [request.latencies for request in run.measured]


def promise_finding(promise: Promise, runs: Sequence[LoggedRun]) -> PromiseFinding:
    """A promise over all requests of some runs."""
    uses = [block for run in runs for block in _blocks(run, uses_of(promise, run))]
    missed = [block for run in runs for block in _blocks(run, flags_of(promise, run))]
    share = miss_share(missed, uses)
    bounds = percentile_interval_by_blocks(uses, promise.per_mille)
    pooled = np.sort(np.concatenate(uses))
    allowed_share = 1 - promise.per_mille / 1000
    return PromiseFinding(
        promise.name, share.num_requests, share.num_missed, promise.misses_allowed(share.num_requests),
        share.effective_requests, share.interval.low, share.interval.high, share.upper_bound,
        finite(float(pooled[rank(promise.per_mille, len(pooled)) - 1])), finite(bounds.low), finite(bounds.high),
        is_proven=share.upper_bound <= allowed_share, is_disproven=share.interval.low > allowed_share)


def flags_of(promise: Promise, run: LoggedRun) -> Flags:
    """For each request that counts, whether it broke the promise."""
    return np.array([promise.is_missed_by(latencies) for latencies in latencies_of(run)], dtype=np.float64)


def uses_of(promise: Promise, run: LoggedRun) -> Array:
    """For each request that counts, its latency as a share of the limit; infinite if it failed."""
    return np.array([use_of(promise, latencies) for latencies in latencies_of(run)], dtype=np.float64)


def use_of(promise: Promise, latencies: RequestLatencies | None) -> float:
    """How much of its limits a request used up: above 1 exactly when it broke the promise. No gap uses nothing."""
    if latencies is None:
        return inf
    measured = {"ttft_s": latencies.ttft_s, "tpot_s": latencies.tpot_s, "itl_s": latencies.longest_itl_s,
                "e2e_s": latencies.e2e_s}
    limits_s: dict[str, float | None] = asdict(promise.limits)
    return max((measured[name] or 0.0) / limit_s for name, limit_s in limits_s.items() if limit_s is not None)


def finite(value: float) -> float | None:
    """None for a bound that is none."""
    return value if isfinite(value) else None


def _blocks(run: LoggedRun, values: Array) -> list[Array]:
    arrivals_s = [request.intended_s for request in run.measured]
    return blocks_by_time(arrivals_s, values, _block_s(run.measured))


def _block_s(requests: Sequence[LoggedRequest]) -> float:
    arrivals_s = [request.intended_s for request in requests]
    mean_answer_s = float(np.mean([request.ended_s - request.intended_s for request in requests]))
    span_s = max(arrivals_s) - min(arrivals_s)
    return max(_BLOCK_IN_ANSWERS * mean_answer_s, _SMALLEST_BLOCK_SHARE * span_s, 1e-3)


# --- winner against default -------------------------------------------------------------------------------------------

def _ratio(winner: FinalistFinding, default: FinalistFinding) -> Ratio:
    held, failed = winner.confirmed_per_s, winner.failed_per_s
    assert held is not None
    if winner is default:
        return Ratio(1.0, 1.0, 1.0)
    return Ratio(_quotient(held, default.confirmed_per_s), _quotient(held, default.failed_per_s),
                 _quotient(failed, default.confirmed_per_s))


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _differences(slo: Slo, winner: FinalistFinding, winner_runs: Sequence[LoggedRun],
                 default_runs: Sequence[LoggedRun]) -> Iterator[Difference]:
    if winner.role is Role.default or winner.confirmed_per_s is None:
        return
    pairs = [(mine, other) for mine in winner_runs for other in default_runs
             if mine.stream == other.stream and is_same_rate(mine.rate_per_s, other.rate_per_s)
             and is_same_rate(mine.rate_per_s, winner.confirmed_per_s)]
    for promise in slo.promises if pairs else ():
        yield _difference(promise, winner.confirmed_per_s, pairs)


def _difference(promise: Promise, rate_per_s: float, pairs: Sequence[tuple[LoggedRun, LoggedRun]]) -> Difference:
    blocks = [block for mine, other in pairs
              for block in _blocks(mine, np.column_stack((flags_of(promise, mine), flags_of(promise, other))))]
    rows = np.concatenate(blocks)
    bounds = block_bootstrap(blocks, lambda drawn: float((drawn[:, 0] - drawn[:, 1]).mean()))
    return Difference(promise.name, rate_per_s, len(rows), int(rows[:, 0].sum()), int(rows[:, 1].sum()),
                      finite(bounds.low), finite(bounds.high))
