"""Draws plot.png from result.json.

    python experiments/continuous-batching/plot.py [result.json [plot.png]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
COLOURS = {"static": "#8a93a3", "dynamic": "#e08b3e", "continuous": "#3f7fbf"}


def draw_ratios(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        ratio = row["over_static"]["continuous"]
        ends = [[ratio["median"] - ratio["min"]], [ratio["max"] - ratio["median"]]]
        axes.bar(place, ratio["median"], yerr=ends, capsize=4, color=COLOURS["continuous"])
        axes.plot([place - 0.4, place + 0.4], [row["limit"]] * 2, "k:",
                  label="if prompts took no time and steps all the same" if place == 0 else None)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [f"{row['outputs']}\nbatch {row['batch']}" for row in rows], fontsize=8)
    axes.set(ylabel="output tok/s, continuous over static", title="512 requests at once", ylim=(0, None))
    axes.legend(fontsize=8, loc="upper left")


def draw_slots(axes: Axes, busy: dict[str, list[int]]) -> None:
    for name, steps in busy.items():
        axes.step(range(1, len(steps) + 1), steps, where="mid", color=COLOURS[name], label=name, linewidth=1)
    axes.axvline(50, color="black", linestyle=":", linewidth=1, label="step 50")
    axes.set(xlabel="step", ylabel="slots in use, of 8", ylim=(0, 8.4), xlim=(0, 700),
             title="batches of seven 50-token requests and one of 200\n(static goes on to step 1,600)")
    axes.legend(fontsize=8)


def draw_latency(axes: Axes, result: dict[str, Any]) -> None:
    for name, points in result["curves"].items():
        kind, batch = name.split()
        axes.plot([rate for rate, _ in points], [1e3 * latency for _, latency in points], marker="o", markersize=3,
                  color=COLOURS[kind], linestyle="-" if batch == "32" else "--", label=f"{kind}, batch {batch}")
    for row in result["equal_latency"]["limits"]:
        axes.axhline(1e3 * row["limit_s"], color="black", linestyle=":", linewidth=1)
        axes.text(0.52, 1e3 * row["limit_s"] * 1.04, f"limit: {row['factor']} × a lone request's", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="Poisson arrivals, requests/s",
             ylabel="median normalised latency, ms per output token", title="prompts 32–512, outputs 1–128 tokens")
    ticks = [0.5, 1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper left")


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    draw_ratios(left, result["burst"])
    draw_slots(middle, result["tail_waste"]["busy_slots"])
    draw_latency(right, result)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle("Simulated: Llama-2-7B on one A100 80 GB; bars: median of 5 seeds, with the ends", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
