"""Fits step times to some setups, predicts the others, and says how far off the predictions are."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measure import Measured, Row, measured, run_path, step_log
from scipy.stats import spearmanr
from setups import CAPACITY, SHARES, Setup, open_load

sys.path.append(str(Path(__file__).parent.parent))

from simulated import highest_rate

from servekit.config.bench import PoissonArrivalConfig
from servekit.config.compose import compose
from servekit.config.roots import simulate_root
from servekit.config.simulate import SimulateConfig
from servekit.core.build import build_scheduler
from servekit.engine.step_log import Added, Opened, Planned, Record, Updated, read_step_log
from servekit.load.arrivals import schedule
from servekit.load.bench import limits_of
from servekit.load.metrics import tpot_s, ttft_s
from servekit.load.records import RequestRecord
from servekit.load.workload import ConfiguredWorkload, Vocabulary
from servekit.sim.engine_model import read_timed_steps, timed_steps
from servekit.sim.fitted import FittedStepTime, TimedStep
from servekit.sim.simulation import Simulation

LIMITS = {"throughput": 0.05, "p50": 0.10, "p99": 0.20, "spearman": 0.95}
"""What is to be reached: relative errors, and the least rank correlation."""
SLO_TTFT_S, SLO_TPOT_S, SLO_SHARE = 0.5, 0.04, 0.9
LOADS = (CAPACITY, *(open_load(Setup(""), share, 1.0, 1.0, 0).name for share in SHARES))


@dataclass(frozen=True)
class Latencies:
    """One request's."""

    ttft_s: float
    tpot_s: float | None

    @property
    def keeps_slo(self) -> bool:
        return self.ttft_s <= SLO_TTFT_S and (self.tpot_s is None or self.tpot_s <= SLO_TPOT_S)


@dataclass(frozen=True)
class Predictor:
    """The simulator, and what it does not simulate."""

    step_time: FittedStepTime
    offset_s: float
    """From the client's sending to the request's arrival at the engine, and from the token's end of step to the
    client: HTTP, parsing, the way between the processes."""

    def records(self, config: SimulateConfig, opened: Opened) -> list[RequestRecord]:
        """The run of a configuration on the engine that a log began with."""
        assert config.seed is not None
        scheduler = build_scheduler(config.scheduler, opened.num_kv_blocks, opened.block_size_tokens,
                                    opened.max_model_len, opened.num_host_blocks)
        workload = ConfiguredWorkload(config.workload, Vocabulary(config.vocab_low, config.vocab_high), config.seed)
        simulation = Simulation(schedule(workload, config.arrival, config.seed), scheduler, self.step_time,
                                limits_of(config))
        return [record for record in simulation.run() if not record.is_warmup]

    def latencies(self, records: Sequence[RequestRecord]) -> list[Latencies]:
        return [Latencies(ttft_s(record.timeline) + self.offset_s, tpot_s(record.timeline)) for record in records]


def compare(out: Path, setups: Sequence[Setup]) -> dict[str, Any]:
    """Everything that was measured beside what is predicted of it."""
    found = [setup for setup in setups if run_path(out, setup, CAPACITY).exists()]
    fitted = [setup for setup in found if setup.is_fitted]
    if not fitted:
        raise SystemExit("no setup to fit the step-time model to has been measured")
    predictor = _fit(out, fitted)
    runs = [run for setup in found for run in _runs(out, setup, predictor)]
    rates = [row for setup in found if (row := _slo_rate(out, setup, predictor)) is not None]
    predicted = [run for run in runs if not run["is_fitted"]]
    return {"limits": LIMITS, "slo": {"ttft_s": SLO_TTFT_S, "tpot_s": SLO_TPOT_S, "share": SLO_SHARE},
            "fit": {"setups": [setup.name for setup in fitted], "num_steps": predictor.step_time.num_steps,
                    "median_error": predictor.step_time.median_error,
                    "coefficients": predictor.step_time.coefficients, "offset_s": predictor.offset_s},
            "summary": {"predicted": _summary(predicted), "fitted": _summary([r for r in runs if r["is_fitted"]])},
            "slo_rates": rates, "runs": runs}


def _fit(out: Path, setups: Sequence[Setup]) -> Predictor:
    steps: list[TimedStep] = []
    for setup in setups:
        steps += read_timed_steps(step_log(out, setup))[1]
    offsets_s = [offset for setup in setups for offset in _offsets_s(out, setup)]
    return Predictor(FittedStepTime.fit(steps), median(offsets_s))


def _offsets_s(out: Path, setup: Setup) -> Iterator[float]:
    """What the client's TTFT has beyond the engine's, under the lightest load: of requests that found the engine idle,
    since others wait for a step's end, which the simulator knows of.

    Client and log are put in order of arrival, which they share.
    """
    load = LOADS[1]
    if not run_path(out, setup, load).exists():
        return
    run = measured(out, setup, load)
    records = _records_from(step_log(out, setup), run.log_offset_bytes)
    rows = sorted(run.requests, key=lambda row: row.sent_s)
    for row, of_engine_s in zip(rows, _lone_ttfts_s(records), strict=False):
        if row.ttft_s is not None and of_engine_s is not None:
            yield row.ttft_s - of_engine_s


def _lone_ttfts_s(records: Iterator[Record]) -> list[float | None]:
    """For each request, in order of arrival: the time from the planning of its first step to the end of the one with
    its first token; None if it was not alone when it came."""
    planned_s: dict[str, float] = {}
    found: dict[str, float | None] = {}
    open_tokens: dict[str, int] = {}
    for record in records:
        match record:
            case Added(_, specs):
                for spec in specs:
                    found[spec.request_id] = None
                    if not open_tokens:
                        planned_s[spec.request_id] = 0.0
                    open_tokens[spec.request_id] = spec.sampling.max_tokens
            case Planned(at_s, items):
                for item in items:
                    if planned_s.get(item.request_id) == 0.0:
                        planned_s[item.request_id] = at_s
            case Updated(at_s, _, sampled):
                for request_id in sampled.keys() & open_tokens.keys():
                    if request_id in planned_s:
                        found[request_id] = at_s - planned_s.pop(request_id)
                    open_tokens[request_id] -= 1
                    if open_tokens[request_id] == 0:
                        del open_tokens[request_id]
    return list(found.values())


def _records_from(path: Path, offset_bytes: int) -> Iterator[Record]:
    """The records of a log from a position on."""
    read = 0
    with path.open("rb") as lines:
        sizes = [len(line) for line in lines]
    for size, record in zip(sizes, read_step_log(path), strict=False):
        if read >= offset_bytes:
            yield record
        read += size


# --- one run ----------------------------------------------------------------------------------------------------------

def _runs(out: Path, setup: Setup, predictor: Predictor) -> Iterator[dict[str, Any]]:
    opened, _ = read_timed_steps(step_log(out, setup))
    for load in LOADS:
        if not run_path(out, setup, load).exists():
            continue
        run = measured(out, setup, load)
        yield {"setup": setup.name, "load": load, "is_fitted": setup.is_fitted, "words": run.words,
               "step_error": _step_error(out, setup, run, predictor) if load == LOADS[-1] else None,
               **_beside(_of_bench(run), _of_simulation(setup, run, opened, predictor))}
        print(f"predicted {setup.name}, load {load}", file=sys.stderr, flush=True)


def _config(setup: Setup, run: Measured) -> SimulateConfig:
    scheduler = [word for word in setup.scheduler if word.startswith("scheduler")]
    return compose(simulate_root(), [*scheduler, *run.words]).config


def _of_simulation(setup: Setup, run: Measured, opened: Opened, predictor: Predictor) -> dict[str, float]:
    records = predictor.records(_config(setup, run), opened)
    window_s = max(r.ended_s for r in records) - min(r.intended_s for r in records)
    return _figures(predictor.latencies(records), sum(r.num_output_tokens for r in records) / window_s)


def _of_bench(run: Measured) -> dict[str, float]:
    return _figures(_latencies(run.requests), run.summary["throughput"]["output_tokens_per_s"])


def _latencies(rows: Sequence[Row]) -> list[Latencies]:
    return [Latencies(row.ttft_s, row.tpot_s) for row in rows if row.ttft_s is not None and not row.is_warmup]


def _figures(latencies: Sequence[Latencies], tokens_per_s: float) -> dict[str, float]:
    found = {"tokens_per_s": tokens_per_s}
    for name, values in (("ttft_s", [one.ttft_s for one in latencies]),
                         ("tpot_s", [one.tpot_s for one in latencies if one.tpot_s is not None])):
        found |= {f"{name}_mean": float(np.mean(values)),
                  **{f"{name}_p{p}": float(np.percentile(values, p, method="inverted_cdf")) for p in (50, 99)}}
    return found


def _beside(real: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, Any]:
    return {"measured": real, "predicted": predicted,
            "error": {name: predicted[name] / real[name] - 1 for name in real}}


def _step_error(out: Path, setup: Setup, run: Measured, predictor: Predictor) -> dict[str, float]:
    """How far off single steps are, and their sum: what the fit contributes to the errors."""
    steps = list(timed_steps(_records_from(step_log(out, setup), run.log_offset_bytes)))
    real_s = np.array([step.duration_s for step in steps])
    predicted_s = np.array([predictor.step_time.step_s(step.shape) for step in steps])
    return {"median_of_step": float(np.median(np.abs(predicted_s / real_s - 1))),
            "of_sum": float(predicted_s.sum() / real_s.sum() - 1)}


# --- all runs ---------------------------------------------------------------------------------------------------------

def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each figure: the median and the largest error, how many runs keep the limit, the rank correlation."""
    rows = {}
    for name in runs[0]["error"] if runs else ():
        errors = [abs(run["error"][name]) for run in runs]
        limit = LIMITS["throughput"] if name == "tokens_per_s" else LIMITS.get(name[-3:])
        pairs = [(run["measured"][name], run["predicted"][name]) for run in runs]
        rows[name] = {"median_error": median(errors), "largest_error": max(errors), "limit": limit,
                      "within": None if limit is None else sum(error <= limit for error in errors), "of": len(runs),
                      "spearman": float(spearmanr(*zip(*pairs, strict=True)).statistic) if len(pairs) > 2 else None}
    return rows


def _slo_rate(out: Path, setup: Setup, predictor: Predictor) -> dict[str, Any] | None:
    """The highest rate that holds the SLO: between two measured loads, and by simulation."""
    loads = [load for load in LOADS[1:] if run_path(out, setup, load).exists()]
    runs = [measured(out, setup, load) for load in loads]
    if not runs:
        return None
    opened, _ = read_timed_steps(step_log(out, setup))
    config = _config(setup, runs[-1])
    rates = [_rate_per_s(setup, run) for run in runs]
    held = [_share(_latencies(run.requests)) >= SLO_SHARE for run in runs]
    low, high = _bracket(rates, held)

    def holds(rate_per_s: float) -> bool:
        asked = replace(config, arrival=PoissonArrivalConfig(rate_per_s=rate_per_s))
        return _share(predictor.latencies(predictor.records(asked, opened))) >= SLO_SHARE

    try:
        predicted = highest_rate(holds, rates[0], rates[-1])
    except ValueError:
        return {"setup": setup.name, "is_fitted": setup.is_fitted, "measured_from": low, "measured_to": high,
                "predicted": None, "is_inside": None}
    inside = (low is None or predicted >= low) and (high is None or predicted <= high)
    return {"setup": setup.name, "is_fitted": setup.is_fitted, "measured_from": low, "measured_to": high,
            "predicted": predicted, "is_inside": inside}


def _bracket(rates: Sequence[float], held: Sequence[bool]) -> tuple[float | None, float | None]:
    """The highest rate below which everything was held, and the next; None beyond the measured ones."""
    count = bisect_right([not all(held[:i + 1]) for i in range(len(held))], False)
    return rates[count - 1] if count else None, rates[count] if count < len(rates) else None


def _share(latencies: Sequence[Latencies]) -> float:
    return sum(one.keeps_slo for one in latencies) / len(latencies)


def _rate_per_s(setup: Setup, run: Measured) -> float:
    arrival = _config(setup, run).arrival
    assert isinstance(arrival, PoissonArrivalConfig)
    return arrival.rate_per_s
