"""Measures candidates: finds the highest rate at which each keeps the objective, on whatever a host brings up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, inf, sqrt
from pathlib import Path
from typing import Any, Protocol

from servekit.garbage import left_alone
from servekit.load.target import Target
from servekit.sim.fitted import TimedStep
from servekit.tuner.launch import Configuration
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.machine import MachineUse
from servekit.tuner.measure import Measurement, Tolerance, measure
from servekit.tuner.rate_search import Allowance, RateSearch
from servekit.tuner.run_log import RunLog
from servekit.tuner.slo import Slo
from servekit.tuner.study import Trial
from servekit.tuner.trial import Candidate, Ending, Outcome, violations

_RUNS_WITHOUT_INCUMBENT = 6


class Warm(Enum):
    """How a trial found its engine."""

    hot = "hot"
    """Live, with new settings, its caches and counters emptied."""
    cold = "cold"
    """Just started."""


@dataclass(frozen=True)
class RunLength:
    """How many requests a run judges: enough for its percentiles, and enough to last.

    A few requests at a high rate are a burst that any queue absorbs; only a run that lasts shows whether it holds.
    """

    num_requests: int
    min_s: float
    available: int | None = None
    """All that a trace has, however short that is; None: there is no end."""

    def at(self, rate_per_s: float) -> int:
        """At a rate."""
        wanted = max(self.num_requests, ceil(rate_per_s * self.min_s))
        return wanted if self.available is None else min(wanted, self.available)


class EngineFailed(Exception):
    """The engine died, hung or could not start under a configuration."""

    def __init__(self, ending: Ending, message: str) -> None:
        super().__init__(message)
        self.ending = ending


@dataclass(frozen=True)
class Description:
    """What is measured, and on what."""

    model: str
    """As people would say it: `smollm2-135m, float32, quantization none`. So is the next."""
    device: str
    max_model_len: int | None
    """Longest prompt plus output, in tokens. None: it does not say; so is the next."""
    vocab_size: int | None
    details: Mapping[str, Any]
    """What else is to be kept of it, as JSON has it."""


class Host(Protocol):
    """Brings up one configuration at a time: servekit's own engine, or another server."""

    is_live: bool
    """Whether it can change a live engine; if not, every trial gets a fresh process."""

    @property
    def steps(self) -> Sequence[TimedStep]:
        """Of the run that goes on, as far as they are known; filled while it does."""

    @property
    def description(self) -> Description:
        """Of what is up."""

    @property
    def target(self) -> Target:
        """Where requests go."""

    @property
    def bounds(self) -> Mapping[str, int]:
        """Steps since the start by what bound them; empty if nothing is known of them."""

    def processes(self) -> Sequence[int]:
        """Ids of the processes that are up."""

    async def prepare(self, config: Configuration, *, cold: bool) -> Warm:
        """Bring up a configuration with nothing in its caches, in a fresh process if `cold`. Raises EngineFailed."""

    def begin_run(self) -> None:
        """A run is about to start."""

    async def end_run(self, is_disturbed: bool) -> None:
        """Wait until nothing of a run is left in what is up. Raises EngineFailed if it has not survived the run."""

    async def stop(self) -> None:
        """End what is up."""


class TrialExecutor:
    """An `Executor` over a host. To be closed."""

    def __init__(self, host: Host, slo: Slo, plan: LoadPlan, length: RunLength, runs_folder: Path,
                 tolerance: Tolerance) -> None:
        self.plan = plan
        self.length = length
        self.runs_folder = runs_folder
        self._host = host
        self._slo = slo
        self._tolerance = tolerance
        self._runner = asyncio.Runner()
        self._num_runs = 0
        self.allowance = Allowance()
        """What each trial may take."""
        self.start_per_s = 1.0
        """Where the search for a rate begins as long as no trial has held any; later on, what is expected."""
        self.incumbent_per_s = 0.0
        """Best rate that any trial has held; 0: none yet."""
        self.longest_start_s = 0.0
        """Longest time that a fresh process took until it was ready."""

    def close(self) -> None:
        """End the engine."""
        self._runner.run(self._host.stop())
        self._runner.close()

    def begin(self, start_per_s: float, trials: Iterable[Trial]) -> None:
        """Begin a study at a rate, or go on with one that has trials: the search begins where they left off."""
        self.start_per_s, self.incumbent_per_s = start_per_s, 0.0
        for trial in trials:
            if trial.ending is Ending.measured and trial.repeats is None:
                self._learn(trial.rate_per_s, trial.facts)

    def run(self, candidate: Candidate) -> Outcome:
        """Measure one: find the highest rate at which it keeps the objective. A run that is disturbed is made again."""
        started_s = time.monotonic()
        try:
            warm = self._prepare(candidate.config, cold=not self._host.is_live)
            outcome = self._search_rate(candidate, warm)
        except EngineFailed as failure:
            if failure.ending is Ending.crashed:
                self._runner.run(self._host.stop())
            return Outcome(failure.ending, facts={"error": str(failure), "duration_s": time.monotonic() - started_s})
        if outcome.ending is Ending.measured:
            self._learn(outcome.rate_per_s, outcome.facts)
        return replace(outcome, facts={**outcome.facts, "duration_s": time.monotonic() - started_s})

    def measure_at(self, config: Configuration, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                   stops_early: bool) -> tuple[Measurement, Path]:
        """One run of one configuration at one rate; its raw log is the second value.

        Raises EngineFailed.
        """
        warm = self._prepare(config, cold=cold)
        return self._runner.run(self._measure(config, rate_per_s, num_requests, stream, warm, stops_early))

    def describe(self, config: Configuration) -> Description:
        """What an engine of this configuration is like. Raises EngineFailed."""
        self._prepare(config, cold=False)
        return self._host.description

    # --- one trial ---

    def rate_search(self) -> RateSearch:
        """A search against the incumbent. Until there is one, how bad a configuration is matters."""
        if self.incumbent_per_s > 0:
            return RateSearch.against(self.incumbent_per_s, self.start_per_s, self.allowance)
        return RateSearch(self.start_per_s, max_losing_runs=_RUNS_WITHOUT_INCUMBENT, allowance=self.allowance,
                          proves_best=True)

    def _learn(self, rate_per_s: float, facts: Mapping[str, Any]) -> None:
        """The next search is against the best rate that any has held. Until one has, it begins halfway, by factors,
        between where this one began and what is below the rates at which it failed: the next may be much better.
        """
        self.incumbent_per_s = max(self.incumbent_per_s, rate_per_s)
        if self.incumbent_per_s == 0:
            lower_per_s = max(facts["lower_per_s"], self.allowance.lowest_per_s)
            self.start_per_s = min(self.start_per_s, sqrt(self.start_per_s * lower_per_s))

    def _prepare(self, config: Configuration, cold: bool) -> Warm:
        started_s = time.monotonic()
        warm = self._runner.run(self._host.prepare(config, cold=cold))
        if warm is Warm.cold:
            self.longest_start_s = max(self.longest_start_s, time.monotonic() - started_s)
        return warm

    def _search_rate(self, candidate: Candidate, warm: Warm) -> Outcome:
        search, runs = self.rate_search(), list[dict[str, Any]]()
        latest_at = dict[float, dict[str, float]]()
        was_disturbed = False
        while (rate_per_s := search.next_rate()) is not None:
            stream = f"trial {candidate.number} run {len(runs)}"
            measured, path = self._runner.run(self._measure(
                candidate.config, rate_per_s, self.length.at(rate_per_s), stream, warm, stops_early=True,
                losing_s=search.losing_left_s))
            runs.append(_described(rate_per_s, measured, path))
            if measured.engine_failures:
                raise EngineFailed(Ending.crashed, f"{measured.engine_failures} requests were lost at "
                                   f"{rate_per_s:.2f} req/s")
            if measured.problems and was_disturbed:
                return Outcome(Ending.invalid, facts={"runs": runs, "problems": runs[-1]["problems"]})
            was_disturbed = bool(measured.problems)
            if was_disturbed:
                continue
            search.tell(rate_per_s, measured.holds, measured.duration_s)
            latest_at[rate_per_s] = violations(measured.tallies, measured.is_given_up)
        return Outcome(Ending.measured, search.held_per_s, latest_at[search.held_per_s or search.lowest_tried_per_s],
                       {"runs": runs, "warm": warm.value, "bound": dict(self._host.bounds),
                        "lower_per_s": search.lower_per_s, "is_out_of_time": search.is_out_of_time})

    async def _measure(self, config: Configuration, rate_per_s: float, num_requests: int, stream: str, warm: Warm,
                       stops_early: bool, losing_s: float = inf) -> tuple[Measurement, Path]:
        host = self._host
        host.begin_run()
        vocab_size = host.description.vocab_size or self.plan.bench.vocab_high
        load = self.plan.load(rate_per_s, num_requests, stream, vocab_size)
        with left_alone():
            measured = await measure(host.target, load, self._slo, MachineUse(host.processes), host.steps,
                                     self._tolerance, stops_early, losing_s)
        self._num_runs += 1
        path = self.runs_folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{self._num_runs:04}.json"
        RunLog(rate_per_s, stream, warm.value, num_requests, self.plan.warmup_requests, config, measured).write(path)
        await host.end_run(is_disturbed=bool(measured.problems))
        return measured, path


def _described(rate_per_s: float, measured: Measurement, path: Path) -> dict[str, Any]:
    """A run in the facts of its trial."""
    return {"rate_per_s": rate_per_s, "verdict": measured.verdict.value, "duration_s": measured.duration_s,
            "stopped_early": measured.is_stopped_early, "log": path.name,
            "problems": [problem.value for problem in measured.problems],
            "misses": {tally.promise.name: tally.num_missed + tally.num_late for tally in measured.tallies}}
