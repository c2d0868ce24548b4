"""`servekit simulate`: a workload through the scheduler on a virtual clock, measured as `servekit bench` measures."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from servekit.config.bench import TraceWorkloadConfig
from servekit.config.errors import require
from servekit.config.simulate import SimulateConfig
from servekit.core.plan import Plan
from servekit.core.scheduler import Scheduler
from servekit.load.arrivals import schedule
from servekit.load.bench import check_trace, limits_of
from servekit.load.driver import Limits
from servekit.load.records import RequestRecord
from servekit.load.report import DocumentFile, Run, SimulatedFacts, check_out, count_failures, print_report
from servekit.load.summary import RoundedSample, Tally
from servekit.load.workload import ConfiguredWorkload, Vocabulary, shapes
from servekit.sim.engine_model import EngineModel, engine_model
from servekit.sim.simulation import Simulation
from servekit.sim.timeline import Timeline, write_page, write_perfetto

if TYPE_CHECKING:
    from servekit.config.compose import Composed


def run(composed: Composed[SimulateConfig]) -> int:
    """Simulate and print the figures; returns the exit status, 0 if at least one request succeeded.

    Raises ConfigError, before anything is simulated, for what cannot be: a trace that cannot be read, a model that
    is not known, requests that the KV cache can never hold.
    """
    config = composed.config
    _check_files(config)
    finished = simulate(config, Console(stderr=True))
    print_report(finished, Console())
    return 0 if finished.summary.counts.succeeded else 1


def simulate(config: SimulateConfig, console: Console) -> Run:
    """Run the simulation that a configuration describes, showing progress on `console`. Raises ConfigError."""
    seed = secrets.randbits(32) if config.seed is None else config.seed
    limits = limits_of(config)
    engine = engine_model(config)
    total = check_trace(config, limits)
    _check_lengths(config, engine, limits, seed)
    scheduler = engine.scheduler(config.scheduler)
    timeline = Timeline(config.timeline_s) if config.perfetto or config.timeline else None
    workload = ConfiguredWorkload(config.workload, Vocabulary(config.vocab_low, config.vocab_high), seed)
    simulation = Simulation(schedule(workload, config.arrival, seed), scheduler, engine.step_time, limits,
                            None if timeline is None else _Watch(timeline, scheduler))
    finished = _measure(config, seed, engine, simulation, total, console)
    if timeline is not None:
        _write_timeline(config, timeline)
    return finished


def _measure(config: SimulateConfig, seed: int, engine: EngineModel, simulation: Simulation,
             total: int | None, console: Console) -> Run:
    """Take in each request as it ends; Ctrl-C ends the run with what it has."""
    started_at, started_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    tally = Tally(config.slo, is_open_loop=False, gaps=RoundedSample())
    failures: Counter[tuple[str, int | None, str]] = Counter()
    is_interrupted = False
    with ExitStack() as stack:
        document = None if config.out is None else stack.enter_context(DocumentFile(config.out, config.slo))
        try:
            for record in _shown(simulation, total, console):
                tally.add(record)
                failures += count_failures([record])
                if document is not None:
                    document.add(record)
        except KeyboardInterrupt:
            is_interrupted = True
        facts = SimulatedFacts(engine.name, engine.num_kv_blocks, engine.block_size_tokens, engine.max_model_len,
                               simulation.num_steps, time.monotonic() - started_s)
        finished = Run(f"simulated: {engine.name}, {simulation.num_steps:,} steps over {simulation.now_s:,.1f} s "
                       f"in {facts.elapsed_s:.1f} s", config, seed, started_at, is_interrupted, facts,
                       tally.summary(), failures)
        if document is not None:
            document.finish(finished)
    return finished


def _shown(simulation: Simulation, total: int | None, console: Console) -> Iterator[RequestRecord]:
    """The records as they come, with a bar on a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for record in simulation.run():
            yield record
            bar.update(task, advance=1, description=f"{simulation.now_s:,.0f} virtual seconds")


def _check_files(config: SimulateConfig) -> None:
    """Refuse files that cannot be written, and two that are one. Raises ConfigError."""
    keys: dict[Path, str] = {}
    for key in ("out", "perfetto", "timeline"):
        path = getattr(config, key)
        if path is not None:
            check_out(path, config.overwrite, key)
            other = keys.setdefault(Path(path).resolve(), key)
            require(other == key, key, path, f"is the file of {other} too", "give another name")


def _check_lengths(config: SimulateConfig, engine: EngineModel, limits: Limits, seed: int) -> None:
    """Refuse a workload with a request that the engine can never serve. Raises ConfigError."""
    bounded = isinstance(config.workload, TraceWorkloadConfig) or limits.total_requests is not None
    for number, shape in enumerate(islice(shapes(config.workload, seed), limits.total_requests if bounded else 10_000)):
        prompt = shape.own_tokens + sum(segment.num_tokens for segment in shape.shared)
        require(prompt + shape.output_tokens <= engine.max_model_len, "memory.max_model_len", engine.max_model_len,
                f"request {number} of the workload has {prompt} prompt and {shape.output_tokens} output tokens, which "
                "the engine can never serve",
                "set memory.max_model_len and memory.num_kv_blocks higher, or workload.length_scale lower")


class _Watch:
    """Passes steps on to a timeline."""

    def __init__(self, timeline: Timeline, scheduler: Scheduler) -> None:
        self._timeline = timeline
        self._scheduler = scheduler

    def __call__(self, plan: Plan, start_s: float, end_s: float) -> None:
        self._timeline.step(plan, start_s, end_s, self._scheduler.kv.pool.num_used)


def _write_timeline(config: SimulateConfig, timeline: Timeline) -> None:
    if config.perfetto is not None:
        write_perfetto(timeline, Path(config.perfetto))
    if config.timeline is not None:
        write_page(timeline, Path(config.timeline))
