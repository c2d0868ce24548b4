"""One run of a load at one rate, stopped as soon as its verdict is certain, and what may be wrong with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from statistics import median

import numpy as np

from servekit.load.driver import Limits, LoadRun
from servekit.load.percentiles import Percentile, nearest_rank
from servekit.load.records import GOOD_FINISH_REASONS, RequestRecord
from servekit.load.target import FailureKind, Observation, Target
from servekit.load.workload import WorkloadRequest
from servekit.sim.fitted import FittedStepTime, TimedStep
from servekit.tuner.machine import MachineUse
from servekit.tuner.slo import Slo
from servekit.tuner.verdict import RunningVerdict, Tally, Verdict

_LOOK_EVERY_S = 0.05
"""How often a running verdict is looked at."""
_LAG_LIMIT_S = 0.010
_LAG_LIMIT_SHARE = 0.02
"""Of the shortest limit of the objective: a generator that is later than both distorts the verdict."""
_FEWEST_STEPS = 90
_MOST_FITTED_STEPS = 2000


class Problem(Enum):
    """What makes a measurement say more about the circumstances than about the configuration."""

    generator_late = "the load generator was late"
    cache_polluted = "prompts that were never sent before were found in the prefix cache"
    machine_busy = "something else used the machine"
    drift = "steps of equal size became slower during the run"


@dataclass(frozen=True)
class Tolerance:
    """From when on a run counts as disturbed. None: not checked."""

    busy_share: float | None = 0.10
    """Share of the machine that others may use."""
    slowdown: float | None = 1.25
    """Factor by which steps of equal size may slow down between the first and the last third of a run."""


@dataclass(frozen=True)
class Load:
    """What one run sends."""

    requests: Iterable[WorkloadRequest]
    """In the order of their arrival times."""
    num_requests: int
    """That are judged, after the warm-up."""
    warmup_requests: int
    timeout_s: float
    shares_prefixes: bool
    """Whether its prompts have beginnings in common, so that cache hits are no pollution."""


@dataclass(frozen=True)
class Measurement:
    """A run that has ended."""

    verdict: Verdict
    tallies: tuple[Tally, ...]
    records: Sequence[RequestRecord]
    """Of all requests that ended, the warm-up included; those in flight at an early stop say `interrupted`."""
    duration_s: float
    problems: tuple[Problem, ...]
    is_stopped_early: bool
    is_given_up: bool = False
    """Whether it was stopped without a verdict: it had too many misses for its length, and its time was used up."""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict is Verdict.holds

    @property
    def engine_failures(self) -> int:
        """Requests that the engine itself lost."""
        lost = (FailureKind.connection, FailureKind.stream)
        return sum(record.failure is not None and record.failure.kind in lost for record in self.records)


async def measure(target: Target, load: Load, slo: Slo, machine: MachineUse, steps: Sequence[TimedStep],
                  tolerance: Tolerance, stops_early: bool = True, losing_s: float = inf) -> Measurement:
    """Send a load, open loop, and judge it.

    `steps` is what the engine reports of its steps while the run goes on; `machine` tells how much of the machine
    others used. Without `stops_early` every request is waited for, so that its figures are those of the whole load.
    With it, a run that would fail if it went on as it has begun is given up after `losing_s`.
    """
    judge = _Judge(target, slo, load)
    limits = Limits(num_requests=load.num_requests, warmup_requests=load.warmup_requests, timeout_s=load.timeout_s)
    run = LoadRun(load.requests, judge, limits)
    judge.watches(run)
    machine.start()
    started_s = time.monotonic()
    watcher = asyncio.create_task(_stop_when_certain(judge, run, started_s + losing_s)) if stops_early else None
    records = await run.run()
    given_up_at: tuple[Tally, ...] = ()
    if watcher is not None:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            given_up_at = await watcher
    duration_s = time.monotonic() - started_s
    tallies = given_up_at or judge.verdict.tallies(time.monotonic())
    verdict = Verdict.undecided if given_up_at else judge.verdict.at(time.monotonic())
    problems = _problems(records, load, slo, machine.share_of_others(), steps, tolerance)
    return Measurement(verdict, tallies, records, duration_s, problems, run.is_stopped, bool(given_up_at))


async def _stop_when_certain(judge: _Judge, run: LoadRun, give_up_s: float) -> tuple[Tally, ...]:
    """Stop a run; how its promises stood if it was given up, and nothing if its verdict is certain."""
    while judge.verdict.at(now_s := time.monotonic()) is Verdict.undecided:
        if now_s >= give_up_s:
            tallies = judge.verdict.tallies(now_s)
            if any(tally.is_losing for tally in tallies):
                run.cut()
                return tallies
        await asyncio.sleep(_LOOK_EVERY_S)
    run.cut()
    return ()


class _Judge:
    """Passes requests on to a target, and tells the verdict what becomes of those that count."""

    def __init__(self, target: Target, slo: Slo, load: Load) -> None:
        self.verdict = RunningVerdict(slo, load.num_requests)
        self._target = target
        self._warmup_requests = load.warmup_requests
        self._run: LoadRun | None = None

    def watches(self, run: LoadRun) -> None:
        """The run whose clock the arrival times are on."""
        self._run = run

    def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        is_warmup = request.index < self._warmup_requests
        return self._target.send(request) if is_warmup else self._judged(request)

    async def _judged(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        assert self._run is not None and request.arrival_s is not None
        self.verdict.sent(request.index, self._run.started_s + request.arrival_s, request.output_tokens)
        num_tokens, finish_reason = 0, None
        try:
            async with aclosing(self._target.send(request)) as observations:
                async for seen in observations:
                    if seen.output_tokens is not None:
                        for _ in range(seen.output_tokens - num_tokens):
                            self.verdict.token(request.index, seen.at_s)
                        num_tokens = seen.output_tokens
                    finish_reason = seen.finish_reason or finish_reason
                    yield seen
            if finish_reason in GOOD_FINISH_REASONS:
                self.verdict.finished(request.index, time.monotonic())
            else:
                self.verdict.failed(request.index)
        except BaseException:
            # Also what ran out of time, which arrives as a cancellation. One that an early stop abandons is undecided.
            if not self._run.is_stopped:
                self.verdict.failed(request.index)
            raise


def _problems(records: Sequence[RequestRecord], load: Load, slo: Slo, share_of_others: float | None,
              steps: Sequence[TimedStep], tolerance: Tolerance) -> tuple[Problem, ...]:
    measured = [record for record in records if not record.is_warmup]
    found = []
    if measured:
        lags = np.sort([record.lag_s for record in measured])
        if nearest_rank(lags, Percentile.p99) > max(_LAG_LIMIT_S, _LAG_LIMIT_SHARE * shortest_limit_s(slo)):
            found.append(Problem.generator_late)
    if not load.shares_prefixes and any(record.cached_tokens for record in measured):
        found.append(Problem.cache_polluted)
    if None not in (share_of_others, tolerance.busy_share) and share_of_others > tolerance.busy_share:  # type: ignore[operator]
        found.append(Problem.machine_busy)
    if tolerance.slowdown is not None and slowdown(steps) > tolerance.slowdown:
        found.append(Problem.drift)
    return tuple(found)


def shortest_limit_s(slo: Slo) -> float:
    """The tightest limit on any latency, in seconds."""
    limits = (limit for promise in slo.promises for limit in
              (promise.limits.ttft_s, promise.limits.tpot_s, promise.limits.itl_s, promise.limits.e2e_s))
    return min(limit for limit in limits if limit is not None)


def slowdown(steps: Sequence[TimedStep]) -> float:
    """By which factor steps of equal size take longer in the last third than in the first; 1 if too few to tell.

    Times are compared with those of a model fitted to all of them, by the median, so that neither a growing batch nor
    a few slow steps count as drift.
    """
    if len(steps) < _FEWEST_STEPS:
        return 1.0
    model = FittedStepTime.fit(steps[::-(-len(steps) // _MOST_FITTED_STEPS)])
    third = len(steps) // 3
    first, last = (median(step.duration_s / model.step_s(step.shape) for step in part)
                   for part in (steps[:third], steps[-third:]))
    return last / first
