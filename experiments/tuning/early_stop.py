"""What the exact early stop saves, at rates below, at and above what the configuration holds.

    python experiments/tuning/early_stop.py [out=early_stop.json]

Simulated runs of the default configuration under the workload and the objective of `servekit tune chat` are replayed
into `RunningVerdict`, which is looked at every 50 ms as in a trial. Each run is judged three times: in full, as the
tuner does it, and by a counter that sees only the requests that have ended. All three must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from common import SimulatedEngine, latencies_of, print_table, progress, write
from matplotlib import pyplot as plt

from servekit.config.schema import Config
from servekit.load.records import RequestRecord
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.slo import Slo
from servekit.tuner.verdict import RunningVerdict, Tally, Verdict

NUM_REQUESTS, NUM_RUNS = 200, 12
CAPACITY_REQUESTS = 1000
SHARES = (0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3, 1.6, 2.0, 3.0)
"""Rates, over the one that the configuration holds."""
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Decision:
    """When a run was judged, and how."""

    verdict: Verdict
    at_s: float
    num_sent: int


def events(records: Sequence[RequestRecord]) -> list[tuple[float, Callable[[RunningVerdict], None]]]:
    """What a verdict is told, and when, in the order of time."""
    return sorted((event for record in records for event in _events(record)), key=lambda event: event[0])


def _events(record: RequestRecord) -> Iterator[tuple[float, Callable[[RunningVerdict], None]]]:
    index = record.index
    yield record.intended_s, lambda verdict: verdict.sent(index, record.intended_s, record.wanted_output_tokens)
    for at_s in record.chunk_times_s:
        yield at_s, lambda verdict, at_s=at_s: verdict.token(index, at_s)  # type: ignore[misc]
    if record.failure is None:
        yield record.ended_s, lambda verdict: verdict.finished(index, record.ended_s)
    else:
        yield record.ended_s, lambda verdict: verdict.failed(index)


def verdict_of(tallies: Sequence[Tally]) -> Verdict:
    verdicts = {tally.verdict for tally in tallies}
    return Verdict.fails if Verdict.fails in verdicts else max(verdicts, key=lambda one: one is Verdict.undecided)


def decide(slo: Slo, records: Sequence[RequestRecord], sees_late: bool) -> Decision:
    """The first look at which a run is decided; without `sees_late`, requests in flight count for nothing."""
    running, pending = RunningVerdict(slo, len(records)), events(records)
    done = 0
    for number in count(1):
        now_s = number * LOOK_EVERY_S
        while done < len(pending) and pending[done][0] <= now_s:
            pending[done][1](running)
            done += 1
        tallies = running.tallies(now_s)
        verdict = verdict_of(tallies if sees_late else [replace(tally, num_late=0) for tally in tallies])
        if verdict is not Verdict.undecided:
            return Decision(verdict, now_s, sum(record.intended_s <= now_s for record in records))
    raise AssertionError("never decided")


def in_full(slo: Slo, records: Sequence[RequestRecord]) -> Decision:
    holds = slo.holds([latencies_of(record) for record in records])
    return Decision(Verdict.holds if holds else Verdict.fails, max(record.ended_s for record in records), len(records))


def held_rate_per_s(engine: SimulatedEngine) -> float:
    """What the default configuration holds in a long run."""
    long, config = replace(engine, num_requests=CAPACITY_REQUESTS), default_of(engine)
    search = RateSearch(start_per_s=3.0, tolerance=0.02, max_runs=14)
    while (rate_per_s := search.next_rate()) is not None:
        search.tell(rate_per_s, in_full(long.settings.slo, list(long.run(config, rate_per_s, "capacity"))).verdict
                    is Verdict.holds)
    return search.held_per_s


def default_of(engine: SimulatedEngine) -> Config:
    assert isinstance(engine.settings.base, Config)
    return engine.settings.base


def at_rate(engine: SimulatedEngine, rate_per_s: float) -> dict[str, float]:
    """Means over some runs: what the early stop saves, and how often verdicts differ."""
    slo, rows = engine.settings.slo, []
    for seed in range(NUM_RUNS):
        records = list(engine.run(default_of(engine), rate_per_s, f"early stop {seed}"))
        full, early, ended = in_full(slo, records), decide(slo, records, True), decide(slo, records, False)
        rows.append({"held": full.verdict is Verdict.holds,
                     "differing": (early.verdict is not full.verdict) + (ended.verdict is not full.verdict),
                     "full_s": full.at_s, "early_s": early.at_s, "ended_s": ended.at_s,
                     "early_requests": early.num_sent, "ended_requests": ended.num_sent})
    total = {name: float(sum(row[name] for row in rows)) for name in rows[0]}
    requests = NUM_RUNS * engine.num_requests
    found = {"rate_per_s": rate_per_s, "held_share": total["held"] / NUM_RUNS, "differing": total["differing"],
             "requests_saved": 1 - total["early_requests"] / requests,
             "time_saved": 1 - total["early_s"] / total["full_s"],
             "requests_saved_by_ended": 1 - total["ended_requests"] / requests,
             "time_saved_by_ended": 1 - total["ended_s"] / total["full_s"]}
    progress(f"{rate_per_s:.2f} req/s: {found['time_saved']:.0%} of the time saved")
    return found


def draw(held_per_s: float, rows: Sequence[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.8))
    rates = [row["rate_per_s"] / held_per_s for row in rows]
    for name, label, colour, style in (
            ("time_saved", "time, as the tuner does it", "#1d3557", "-"),
            ("requests_saved", "requests, as the tuner does it", "#3f7fbf", "-"),
            ("time_saved_by_ended", "time, without those in flight", "#1d3557", ":"),
            ("requests_saved_by_ended", "requests, without those in flight", "#3f7fbf", ":")):
        axes.plot(rates, [100 * row[name] for row in rows], style, color=colour, label=label)
    axes.plot(rates, [100 * row["held_share"] for row in rows], color="#8a93a3", marker="o", markersize=4,
              label="runs that hold the objective, %")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel=f"rate over the one that is held in a long run ({held_per_s:.2f} requests/s)",
             ylabel="saved by the early stop, %", ylim=(-2, 102),
             title=f"simulated, chat objective, {NUM_RUNS} runs of {NUM_REQUESTS} requests each")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    engine = SimulatedEngine.of("chat", NUM_REQUESTS)
    held_per_s = held_rate_per_s(engine)
    rows = [at_rate(engine, share * held_per_s) for share in SHARES]
    assert not sum(row["differing"] for row in rows), "an early verdict differs from the full one"
    found: dict[str, Any] = {"num_requests": NUM_REQUESTS, "num_runs": NUM_RUNS, "held_per_s": held_per_s,
                             "objective": engine.settings.values["slo"], "rates": rows}
    plot = write("early_stop", found)
    print_table(["rate / held", "req/s", "runs that hold", "time saved", "requests saved",
                 "time saved without those in flight", "requests saved without those in flight"],
                [[share, f"{row['rate_per_s']:.2f}", *(f"{row[name]:.0%}" for name in (
                    "held_share", "time_saved", "requests_saved", "time_saved_by_ended", "requests_saved_by_ended"))]
                 for share, row in zip(SHARES, rows, strict=True)])
    draw(held_per_s, rows, plot)


if __name__ == "__main__":
    main()
