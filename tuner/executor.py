"""Measures candidates on the real engine: hot where its weights can stay, cold where they cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from pathlib import Path
from typing import Any

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, RestartPolicy
from servekit.engine.client import EngineState, EngineUnavailable, StartError
from servekit.engine.messages import EngineFacts, EngineStats, Loading, StepRecord
from servekit.engine.process_client import ProcessClient
from servekit.model.local import LocalModel
from servekit.sim.fitted import TimedStep
from servekit.sim.step_time import PromptChunk, StepShape
from servekit.tuner.engine_target import EngineTarget
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.machine import MachineUse
from servekit.tuner.measure import Measurement, Tolerance, measure
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.run_log import RunLog
from servekit.tuner.slo import Slo
from servekit.tuner.trial import Candidate, Ending, Outcome, violations

_RUNS_WITHOUT_INCUMBENT = 6
_COLD_ONLY = ("model", "engine", "memory.kv_dtype")
"""Keys that a live engine refuses to change."""


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


class EngineExecutor:
    """An `Executor` over engine processes, one at a time. To be closed."""

    def __init__(self, local: LocalModel, cache_dir: Path, slo: Slo, plan: LoadPlan, length: RunLength,
                 runs_folder: Path, tolerance: Tolerance) -> None:
        self._local = local
        self.cache_dir = cache_dir
        self._slo = slo
        self.plan = plan
        self.length = length
        self.runs_folder = runs_folder
        self._tolerance = tolerance
        self._runner = asyncio.Runner()
        self._client: ProcessClient | None = None
        self._loaded: Config | None = None
        self._steps: list[TimedStep] = []
        self._num_runs = 0
        self.start_per_s = 1.0
        """Where the search for a rate begins as long as no trial has held any."""
        self.incumbent_per_s = 0.0
        """Best rate that any trial has held; 0: none yet."""
        self.on_run: Callable[[Config, EngineFacts, Sequence[TimedStep]], None] = lambda config, facts, steps: None
        """Told of the steps of every run that nothing disturbed."""
        self.always_cold: Callable[[], frozenset[str]] = frozenset
        """Knobs that were found to behave differently in a live engine."""

    def close(self) -> None:
        """End the engine."""
        self._runner.run(self._stop())
        self._runner.close()

    def run(self, candidate: Candidate) -> Outcome:
        """Measure one: find the highest rate at which it keeps the objective."""
        started_s = time.monotonic()
        try:
            warm = self._runner.run(self._prepare(candidate.config))
            outcome = self._search_rate(candidate, warm)
        except EngineFailed as failure:
            if failure.ending is Ending.crashed:
                self._runner.run(self._stop())
            return Outcome(failure.ending, facts={"error": str(failure), "duration_s": time.monotonic() - started_s})
        self.incumbent_per_s = max(self.incumbent_per_s, outcome.rate_per_s)
        return replace(outcome, facts={**outcome.facts, "duration_s": time.monotonic() - started_s})

    def measure_at(self, config: Config, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                   stops_early: bool) -> tuple[Measurement, Path]:
        """One run of one configuration at one rate; its raw log is the second value.

        Raises EngineFailed.
        """
        warm = self._runner.run(self._prepare(config, cold=cold))
        return self._runner.run(self._measure(config, rate_per_s, num_requests, stream, warm, stops_early))

    def facts_of(self, config: Config) -> EngineFacts:
        """What an engine of this configuration is like. Raises EngineFailed."""
        self._runner.run(self._prepare(config))
        assert self._client is not None
        return self._client.facts

    # --- one trial ---

    def rate_search(self) -> RateSearch:
        """A search that begins where the incumbent holds. Until there is one, how bad a configuration is matters."""
        if self.incumbent_per_s > 0:
            return RateSearch(self.incumbent_per_s)
        return RateSearch(self.start_per_s, max_losing_runs=_RUNS_WITHOUT_INCUMBENT)

    def _search_rate(self, candidate: Candidate, warm: Warm) -> Outcome:
        search, runs = self.rate_search(), list[dict[str, Any]]()
        closest: dict[str, float] = {}
        lowest_per_s = float("inf")
        while (rate_per_s := search.next_rate()) is not None:
            stream = f"trial {candidate.number} run {len(runs)}"
            measured, path = self._runner.run(self._measure(
                candidate.config, rate_per_s, self.length.at(rate_per_s), stream, warm, stops_early=True))
            runs.append(_described(rate_per_s, measured, path))
            if measured.engine_failures:
                raise EngineFailed(Ending.crashed, f"{measured.engine_failures} requests were lost at "
                                   f"{rate_per_s:.2f} req/s")
            if measured.problems:
                return Outcome(Ending.invalid, facts={"runs": runs, "problems": [p.value for p in measured.problems]})
            search.tell(rate_per_s, measured.holds)
            if rate_per_s < lowest_per_s or measured.holds:
                lowest_per_s, closest = rate_per_s, violations(measured.tallies)
        return Outcome(Ending.measured, search.held_per_s, closest,
                       {"runs": runs, "warm": warm.value, "bound": self._bounds()})

    async def _measure(self, config: Config, rate_per_s: float, num_requests: int, stream: str, warm: Warm,
                       stops_early: bool) -> tuple[Measurement, Path]:
        client = self._client
        assert client is not None
        self._steps.clear()
        machine = MachineUse(lambda: [] if client.process_id is None else [client.process_id])
        load = self.plan.load(rate_per_s, num_requests, stream, client.facts.vocab_size)
        measured = await measure(EngineTarget(client), load, self._slo, machine, self._steps, self._tolerance,
                                 stops_early)
        self._num_runs += 1
        path = self.runs_folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{self._num_runs:04}.json"
        RunLog(rate_per_s, stream, warm.value, num_requests, self.plan.warmup_requests, config, measured).write(path)
        if client.state is not EngineState.ready:
            raise EngineFailed(Ending.crashed, "the engine process ended under load")
        if not measured.problems:
            self.on_run(config, client.facts, self._steps)
        await self._empty()
        return measured, path

    # --- the engine ---

    async def _prepare(self, config: Config, cold: bool = False) -> Warm:
        """Bring up an engine of this configuration with nothing in its caches. Raises EngineFailed."""
        config = _for_trials(config)
        if self._client is not None and not cold and not self._needs_fresh(config):
            try:
                await self._client.reconfigure(config)
                self._loaded = config
                return Warm.hot
            except ConfigError as error:
                if error.key not in _COLD_ONLY:
                    raise EngineFailed(_refusal(error), str(error)) from error
            except EngineUnavailable:
                pass
        await self._stop()
        await self._start(config)
        return Warm.cold

    def _needs_fresh(self, config: Config) -> bool:
        """Whether a knob that was found to behave differently hot has another value now."""
        assert self._loaded is not None
        return any(_value(config, key) != _value(self._loaded, key) for key in self.always_cold())

    async def _start(self, config: Config) -> None:
        client = ProcessClient(config, self._local, self.cache_dir, _ignore_progress)
        try:
            await client.start()
        except ConfigError as error:
            await client.shutdown()
            raise EngineFailed(_refusal(error), str(error)) from error
        except StartError as error:
            await client.shutdown()
            ending = Ending.hung if "was not ready after" in str(error) else Ending.crashed
            raise EngineFailed(ending, str(error)) from error
        client.observe(self._note_step)
        self._client, self._loaded = client, config

    async def _stop(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.shutdown()

    async def _empty(self) -> None:
        """Wait until what an early stop has left in the engine is gone, and forget cached prefixes."""
        assert self._client is not None
        deadline_s = time.monotonic() + 10.0
        while (self._client.stats.num_running or self._client.stats.num_waiting) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        try:
            await self._client.reset_prefix_cache()
        except EngineUnavailable as error:
            raise EngineFailed(Ending.crashed, str(error)) from error

    def _note_step(self, stats: EngineStats, step: StepRecord | None) -> None:
        if step is not None:
            self._steps.append(TimedStep(_shape(step), step.duration_s))

    def _bounds(self) -> Mapping[str, int]:
        assert self._client is not None
        breakdown = self._client.stats.breakdown
        return {} if breakdown is None else dict(breakdown.bounds)


def _shape(step: StepRecord) -> StepShape:
    chunks = tuple(PromptChunk(num_tokens, num_computed) for num_tokens, num_computed in step.chunks)
    return StepShape(step.num_requests - len(chunks), step.decode_context_tokens, chunks, step.num_sampled,
                     step.num_swapped_blocks)


def _for_trials(config: Config) -> Config:
    """A dead engine ends its trial: nobody waits for another one."""
    return replace(config, engine=replace(config.engine, restart=RestartPolicy.never))


def _refusal(error: ConfigError) -> Ending:
    is_memory = error.key.startswith("memory.") or error.key == "model.max_model_len"
    return Ending.out_of_memory_at_start if is_memory else Ending.illegal


def _value(config: Config, key: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _ignore_progress(_: Loading) -> None:
    pass


def _described(rate_per_s: float, measured: Measurement, path: Path) -> dict[str, Any]:
    """A run in the facts of its trial."""
    return {"rate_per_s": rate_per_s, "verdict": measured.verdict.value, "duration_s": measured.duration_s,
            "stopped_early": measured.is_stopped_early, "log": path.name,
            "misses": {tally.promise.name: tally.num_missed + tally.num_late for tally in measured.tallies}}
