"""What the simulated experiments share: a system under test, its load and figures, the highest rate within a limit."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from servekit import __version__
from servekit.config.bench import PoissonArrivalConfig
from servekit.config.compose import compose
from servekit.config.roots import simulate_root
from servekit.config.simulate import SimulateConfig
from servekit.core.build import build_scheduler
from servekit.load.arrivals import schedule
from servekit.load.driver import Limits
from servekit.load.records import RequestRecord
from servekit.load.workload import WorkloadRequest
from servekit.sim.engine_model import EngineModel, engine_model
from servekit.sim.simulation import Simulation, StepObserver

_WITHOUT_LIMITS = ("scheduler.admission.max_queue_requests=null", "scheduler.admission.queue_timeout_s=null",
                   "scheduler.admission.request_timeout_s=null")
_ENDLESS_S = 1e9
_RATIO = 1.04
"""How close the two sides of a bracket come."""


class Lengths(NamedTuple):
    """One request's."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class System:
    """An engine and its scheduler, as words for `servekit simulate` describe them. Nobody is refused or out of time."""

    words: tuple[str, ...]
    config: SimulateConfig
    engine: EngineModel

    @classmethod
    def of(cls, *words: str) -> System:
        config = compose(simulate_root(), [*words, *_WITHOUT_LIMITS]).config
        return cls(words, config, engine_model(config))

    def run(self, requests: Iterable[WorkloadRequest], observer: StepObserver | None = None,
            max_tokens: int | None = None) -> list[RequestRecord]:
        """The records of all requests, none of which failed. `max_tokens`: see `Simulation`."""
        engine = self.engine
        scheduler = build_scheduler(self.config.scheduler, engine.num_kv_blocks, engine.block_size_tokens,
                                    engine.max_model_len, engine.num_host_blocks)
        limits = Limits(timeout_s=_ENDLESS_S)
        records = list(Simulation(requests, scheduler, engine.step_time, limits, observer, max_tokens).run())
        failures = [record.failure for record in records if record.failure is not None]
        assert not failures, f"{' '.join(self.words)}: {failures[0]}"
        return records


def burst(lengths: Sequence[Lengths]) -> Iterator[WorkloadRequest]:
    """All requests at once. Prompts are meant for engines without a prefix cache: their tokens do not matter."""
    for index, (prompt, output) in enumerate(lengths):
        yield WorkloadRequest(index, range(prompt), output, arrival_s=0.0, predicted_output_tokens=output)


def poisson(lengths: Sequence[Lengths], rate_per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Requests at independent times. Equal seeds at another rate: the same gaps, stretched."""
    return schedule(burst(lengths), PoissonArrivalConfig(rate_per_s=rate_per_s), seed)


def output_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Over the time from the first arrival to the last end."""
    window_s = max(r.ended_s for r in records) - min(r.intended_s for r in records)
    return sum(r.num_output_tokens for r in records) / window_s


def normalised_latency_s(record: RequestRecord) -> float:
    """Time from arrival to end for each output token (Orca, OSDI'22)."""
    return (record.ended_s - record.intended_s) / record.num_output_tokens


def after_warm_up(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """In order of arrival, without the first tenth, which found an empty system."""
    ordered = sorted(records, key=lambda record: record.index)
    return ordered[len(ordered) // 10:]


def highest_rate(keeps: Callable[[float], bool], low: float, high: float) -> float:
    """The highest rate that keeps a limit, to 4 %, where all lower rates keep it and all higher ones do not.

    `low` and `high` are a first guess. Raises ValueError when no rate within a factor of 1000 of it is the border.
    """
    least, most = low / 1000, high * 1000
    while not keeps(low):
        low, high = low / 2, low
        if low < least:
            raise ValueError("no rate keeps the limit")
    while keeps(high):
        low, high = high, high * 2
        if high > most:
            raise ValueError("every rate keeps the limit")
    while high / low > _RATIO:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median over the seeds, and the two ends."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shown(numbers: Mapping[str, float], digits: int = 2) -> str:
    """A spread, for people."""
    return f"{numbers['median']:.{digits}f} ({numbers['min']:.{digits}f}–{numbers['max']:.{digits}f})"


def progress(text: str) -> None:
    print(f"{time.process_time():5.0f} s  {text}", file=sys.stderr, flush=True)


def write_result(folder: Path, systems: Mapping[str, System], found: Mapping[str, Any]) -> None:
    """Write result.json to the place that `out=` names, or beside the script."""
    out = dict(argument.split("=", 1) for argument in sys.argv[1:]).get("out", folder / "result.json")
    facts = {"servekit": __version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
             "cpu_s": round(time.process_time(), 1)}
    engines = {name: {"command": " ".join(("servekit simulate", *system.words)), "engine": system.engine.name,
                      "num_kv_blocks": system.engine.num_kv_blocks, "max_model_len": system.engine.max_model_len}
               for name, system in systems.items()}
    Path(out).write_text(json.dumps({"facts": facts, "systems": engines, **found}, indent=1) + "\n")
