"""How often bounds on the p99 hold that are said to hold in 95 of 100 runs.

    python experiments/tuning/coverage.py [out=coverage.json]

Requests come one after the other into a queue with a single server (Poisson arrivals, exponential service, mean 1 s,
first come first served), which makes neighbours slow together. Its latency is exponential with rate 1 - utilisation
(Kleinrock, 1975), so the true p99 is known, and a very long run must agree with it. Bounds on the share of misses are
tried on the limit that is the true p99: 1 % of the requests miss it.

Peeking is to look every 250 requests and to stop at the first bounds that leave the truth out: a verdict
that is wrong whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log, sqrt
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from common import print_table, progress, write
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from servekit.tuner.statistics import (
    Array,
    Interval,
    blocks_by_time,
    miss_share,
    miss_share_interval,
    miss_share_interval_anytime,
    percentile_interval,
    percentile_interval_by_blocks,
)

UTILISATIONS = (0.5, 0.7, 0.9)
REPLICATIONS, REPLICATIONS_SHOWN = 400, 50
NUM_REQUESTS, LOOK_EVERY = 1000, 250
RUN_LENGTHS = (500, 1000, 2000, 4000, 16000)
WARMUP_REQUESTS = 5
TRUE_SHARE, Z_95 = 0.01, 1.959964
LONG_RUN, LONG_RUNS = 2_000_000, 5


@dataclass(frozen=True)
class Sample:
    """The requests of one run, in the order of their arrival."""

    arrivals_s: Array
    latencies_s: Array

    def first(self, count: int) -> Sample:
        return Sample(self.arrivals_s[:count], self.latencies_s[:count])

    def missed(self, limit_s: float) -> Array:
        return (self.latencies_s > limit_s).astype(np.float64)

    def num_missed(self, limit_s: float) -> int:
        return int(self.missed(limit_s).sum())

    @property
    def num_requests(self) -> int:
        return len(self.latencies_s)

    def blocks(self, values: Array) -> list[Array]:
        return blocks_by_time(self.arrivals_s.tolist(), values, self._block_s)

    @cached_property
    def _block_s(self) -> float:
        """As the certificate chooses it: three mean answers, and a twentieth of the run at least."""
        return float(max(3 * self.latencies_s.mean(), 0.05 * (self.arrivals_s[-1] - self.arrivals_s[0])))


def true_p99_s(utilisation: float) -> float:
    return log(1 / TRUE_SHARE) / (1 - utilisation)


def queue(utilisation: float, num_requests: int, random: np.random.Generator, first_wait_s: float) -> Sample:
    """A run by Lindley's recursion (1952), w[i+1] = max(0, w[i] + service[i] - gap[i])."""
    services_s = random.exponential(size=num_requests)
    gaps_s = random.exponential(1 / utilisation, num_requests)
    walk_s = np.concatenate(([0.0], np.cumsum(services_s - gaps_s)[:-1]))
    waits_s = walk_s + np.maximum(first_wait_s, -np.minimum.accumulate(walk_s))
    return Sample(np.cumsum(gaps_s) - gaps_s[0], waits_s + services_s)


def steady_wait_s(utilisation: float, random: np.random.Generator) -> float:
    """What the first request of a run waits if the queue has always been there."""
    return random.exponential(1 / (1 - utilisation)) if random.random() < utilisation else 0.0


# --- bounds -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Method:
    """Two-sided bounds at 95 % from a sample and a limit, which is the true p99."""

    name: str
    bounds: Callable[[Sample, float], Interval]
    is_share: bool
    """Whether they are of the share of misses; otherwise of the p99 itself, in seconds."""
    is_wider_than: str | None = None
    """Another method whose bounds lie within these, so that these need not be computed where those hold."""
    colour: str = ""

    def relative(self, sample: Sample, limit_s: float) -> Interval:
        """The bounds over the true value: 1 lies between them if they hold."""
        found, truth = self.bounds(sample, limit_s), TRUE_SHARE if self.is_share else limit_s
        return Interval(found.low / truth, found.high / truth)

    def holds(self, sample: Sample, limit_s: float) -> bool:
        relative = self.relative(sample, limit_s)
        return relative.low <= 1 <= relative.high


def wilson(misses: int, requests: int) -> Interval:
    """Of a share, by the normal approximation of its score (Wilson, 1927)."""
    share, square = misses / requests, Z_95 ** 2
    middle = (share + square / (2 * requests)) / (1 + square / requests)
    half = Z_95 / (1 + square / requests) * sqrt(share * (1 - share) / requests + square / (4 * requests ** 2))
    return Interval(middle - half, middle + half)


def share_by_blocks(sample: Sample, limit_s: float) -> Interval:
    return miss_share(sample.blocks(sample.missed(limit_s)), sample.blocks(sample.latencies_s)).interval


METHODS = (
    Method("binomial", lambda run, limit: miss_share_interval(run.num_missed(limit), run.num_requests), True,
           colour="#8a93a3"),
    Method("Wilson", lambda run, limit: wilson(run.num_missed(limit), run.num_requests), True, colour="#c2c8d0"),
    Method("order statistics", lambda run, limit: percentile_interval(run.latencies_s, 990), False, colour="#e08b3e"),
    Method("anytime", lambda run, limit: miss_share_interval_anytime(run.num_missed(limit), run.num_requests), True,
           colour="#f0c070"),
    Method("ours, share", share_by_blocks, True, colour="#1d3557"),
    Method("ours, p99", lambda run, limit: percentile_interval_by_blocks(run.blocks(run.latencies_s), 990), False,
           is_wider_than="order statistics", colour="#3f7fbf"),
)
BINOMIAL, OURS = METHODS[0], METHODS[4]


# --- coverage ---------------------------------------------------------------------------------------------------------

def held(sample: Sample, limit_s: float) -> dict[str, bool]:
    """For each method, whether its bounds hold."""
    found: dict[str, bool] = {}
    for method in METHODS:
        narrower_holds = method.is_wider_than is not None and found[method.is_wider_than]
        found[method.name] = narrower_holds or method.holds(sample, limit_s)
    return found


def held_at_all_looks(sample: Sample, limit_s: float, at_the_end: dict[str, bool]) -> dict[str, bool]:
    """For each method, whether its bounds hold however often one looks."""
    found = dict(at_the_end)
    for count in range(LOOK_EVERY, NUM_REQUESTS, LOOK_EVERY):
        now = held(sample.first(count), limit_s)
        found = {name: held_before and now[name] for name, held_before in found.items()}
    return found


def cell(utilisation: float) -> dict[str, dict[str, float | None]]:
    """Coverage of every method at one utilisation, and how far its bounds are apart."""
    random, limit_s = np.random.default_rng(round(1000 * utilisation)), true_p99_s(utilisation)
    runs = [queue(utilisation, NUM_REQUESTS, random, steady_wait_s(utilisation, random)) for _ in range(REPLICATIONS)]
    once = [held(run, limit_s) for run in runs]
    peeking = [held_at_all_looks(run, limit_s, end) for run, end in zip(runs, once, strict=True)]
    found: dict[str, dict[str, float | None]] = {}
    for method in METHODS:
        relatives = [method.relative(run, limit_s) for run in runs[:REPLICATIONS_SHOWN]]
        found[method.name] = {
            "once": float(np.mean([end[method.name] for end in once])),
            "peeking": float(np.mean([looks[method.name] for looks in peeking])),
            "median_low": finite(float(np.median([relative.low for relative in relatives]))),
            "median_high": finite(float(np.median([relative.high for relative in relatives])))}
    progress(f"utilisation {utilisation}: " + ", ".join(f"{name} {row['once']:.0%}/{row['peeking']:.0%}"
                                                        for name, row in found.items()))
    return found


def finite(value: float) -> float | None:
    return None if abs(value) == inf else value


def by_length(utilisation: float) -> Iterator[dict[str, float]]:
    """How long a run must be. Proof: the one-sided bound that the certificate calls a proof, where 5 % may be wrong."""
    random, limit_s = np.random.default_rng(7), true_p99_s(utilisation)
    for length in RUN_LENGTHS:
        steady = [queue(utilisation, length, random, steady_wait_s(utilisation, random)) for _ in range(REPLICATIONS)]
        empty = [queue(utilisation, length + WARMUP_REQUESTS, random, 0.0) for _ in range(REPLICATIONS)]
        empty = [Sample(run.arrivals_s[WARMUP_REQUESTS:], run.latencies_s[WARMUP_REQUESTS:]) for run in empty]
        yield {"num_requests": length,
               "binomial": share_of(steady, lambda run: BINOMIAL.holds(run, limit_s)),
               "ours": share_of(steady, lambda run: OURS.holds(run, limit_s)),
               "ours_from_empty": share_of(empty, lambda run: OURS.holds(run, limit_s)),
               "wrong_proofs": share_of(steady, lambda run: is_proven(run, limit_s)),
               "wrong_proofs_from_empty": share_of(empty, lambda run: is_proven(run, limit_s))}


def share_of(runs: Sequence[Sample], has: Callable[[Sample], bool]) -> float:
    return float(np.mean([has(run) for run in runs]))


def is_proven(run: Sample, limit_s: float) -> bool:
    share = miss_share(run.blocks(run.missed(limit_s)), run.blocks(run.latencies_s))
    return share.upper_bound <= TRUE_SHARE


def long_run_p99_s(utilisation: float) -> float:
    """The p99 of very long runs, which must agree with the formula."""
    random = np.random.default_rng(1)
    runs = [queue(utilisation, LONG_RUN, random, 0.0).latencies_s for _ in range(LONG_RUNS)]
    return float(np.quantile(np.concatenate(runs), 1 - TRUE_SHARE))


# --- what is shown ----------------------------------------------------------------------------------------------------

def draw(cells: dict[str, Any], lengths: dict[str, Any], path: Path) -> None:
    figure, (once, peeking, by_run) = plt.subplots(1, 3, figsize=(16, 4.8))
    draw_bars(once, cells, "once", f"one look, after {NUM_REQUESTS} requests")
    draw_bars(peeking, cells, "peeking", f"a look every {LOOK_EVERY} requests, to the first wrong verdict")
    for (utilisation, found), colour in zip(lengths.items(), ("#8fd3d1", "#3f7fbf", "#1d3557"), strict=True):
        counts = [row["num_requests"] for row in found]
        by_run.plot(counts, [100 * row["ours"] for row in found], color=colour, marker="o",
                    label=f"ours, share, at {utilisation}")
        by_run.plot(counts, [100 * row["binomial"] for row in found], color=colour, linestyle=":",
                    label=f"binomial, at {utilisation}")
    by_run.set(xscale="log", xlabel="requests of a run", title="one look, by length of the run")
    for axes in (once, peeking, by_run):
        axes.axhline(95, color="black", linewidth=0.8)
        axes.set(ylabel="runs whose bounds hold, %", ylim=(0, 103))
        axes.grid(alpha=0.3)
    figure.legend(*once.get_legend_handles_labels(), fontsize=8, loc="lower left", ncols=len(METHODS))
    by_run.legend(fontsize=8, loc=(0.5, 0.56))
    figure.suptitle(f"bounds said to hold at 95 %, on the p99 of a single-server queue; {REPLICATIONS} runs each",
                    fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)


def draw_bars(axes: Axes, cells: dict[str, Any], figure: str, title: str) -> None:
    width = 0.8 / len(METHODS)
    for place, method in enumerate(METHODS):
        heights = [100 * found[method.name][figure] for found in cells.values()]
        axes.bar(np.arange(len(cells)) + (place - (len(METHODS) - 1) / 2) * width, heights, width,
                 color=method.colour, label=method.name)
    axes.set_xticks(range(len(cells)), list(cells))
    axes.set(xlabel="utilisation", title=title)


def relative_bounds(row: dict[str, float | None]) -> str:
    bounds = (row["median_low"], row["median_high"])
    return "–".join("none" if bound is None else f"{bound:.2f}" for bound in bounds)


def main() -> None:
    checks = {str(at): {"true_p99_s": true_p99_s(at), "long_run_p99_s": long_run_p99_s(at)} for at in UTILISATIONS}
    progress(f"the long run: {checks}")
    cells = {str(utilisation): cell(utilisation) for utilisation in UTILISATIONS}
    lengths = {str(utilisation): list(by_length(utilisation)) for utilisation in UTILISATIONS}
    plot = write("coverage", {"replications": REPLICATIONS, "num_requests": NUM_REQUESTS, "truth": checks,
                              "cells": cells, "by_length": lengths})
    for at, found in cells.items():
        print(f"utilisation {at}, {NUM_REQUESTS} requests")
        print_table(["bounds", "one look", "peeking", "median bounds / truth"],
                    [[name, f"{row['once']:.1%}", f"{row['peeking']:.1%}", relative_bounds(row)]
                     for name, row in found.items()])
    for at, by_run in lengths.items():
        print(f"utilisation {at}")
        print_table(list(by_run[0]), [[row["num_requests"], *(f"{value:.1%}" for value in list(row.values())[1:])]
                                      for row in by_run])
    draw(cells, lengths, plot)


if __name__ == "__main__":
    main()
