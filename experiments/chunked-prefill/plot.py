"""Draws plot.png from result.json.

    python experiments/chunked-prefill/plot.py [result.json [plot.png]]
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
COLOURS = {"prompts first": "#8a93a3", "whole, mixed": "#e08b3e", "chunked 256": "#1d3557", "chunked 512": "#3f7fbf",
           "chunked 1024": "#5fa8d3", "chunked 2048": "#8fd3d1"}


def draw_gaps(axes: Axes, result: dict[str, Any]) -> None:
    for name, points in result["gaps"].items():
        axes.plot([1e3 * gap for gap, _ in points], [100 * share for _, share in points], color=COLOURS[name],
                  label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.text(2200, 1.15, "p99", fontsize=8)
    for objective, row in result["capacity"].items():
        axes.axvline(1e3 * row["limit_s"], color="black", linestyle=":", linewidth=1)
        axes.text(1e3 * row["limit_s"] * 1.04, 40, f"{objective}\nSLO", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="time between two tokens, ms", xlim=(8, 4000),
             ylabel="share of the gaps that are longer, %",
             title=f"Poisson arrivals, mean {result['rate_per_s']:g}/s (one seed)")
    axes.set_xticks([10, 30, 100, 300, 1000, 3000], ["10", "30", "100", "300", "1000", "3000"])
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="lower left")


def draw_figures(axes: Axes, rows: dict[str, Any]) -> None:
    for place, (name, row) in enumerate(rows.items()):
        for offset, figure, hatch in ((-0.2, "ttft_p50_s", ""), (0.2, "tbt_max_s", "//")):
            found = row[figure]
            axes.bar(place + offset, found["median"], 0.38, color=COLOURS[name], hatch=hatch, edgecolor="white",
                     capsize=3, yerr=[[found["median"] - found["min"]], [found["max"] - found["median"]]],
                     label={"ttft_p50_s": "median TTFT", "tbt_max_s": "longest gap"}[figure] if place == 0 else None)
    axes.set_xticks(range(len(rows)), [name.replace(" ", "\n", 1) for name in rows], fontsize=8)
    axes.set(ylabel="seconds", title="first token against the worst stall")
    axes.legend(fontsize=8)


def draw_capacity(axes: Axes, rows: dict[str, Any]) -> None:
    place, ticks = 0.0, []
    for objective, row in rows.items():
        for name, rate in row["rate_per_s"].items():
            axes.bar(place, rate["median"], color=COLOURS[name], capsize=4,
                     yerr=[[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]])
            axes.text(place, rate["max"] + 0.06, f"{rate['median']:.2f}", ha="center", fontsize=8)
            ticks.append((place, f"{name}\n{objective}".replace(" ", "\n", 1)))
            place += 1
        place += 0.6
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=7)
    limits = ", ".join(f"{objective}: p99 gap ≤ {row['limit_s']:g} s" for objective, row in rows.items())
    axes.set(ylabel="requests/s", title=f"highest rate that keeps the SLO\n({limits})")


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    draw_gaps(left, result)
    draw_figures(middle, result["fixed_rate"])
    draw_capacity(right, result["capacity"])
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle("Simulated: Llama-3-8B on one A100 80 GB, lengths as in openchat_sharegpt4; "
                    "median and ends of 3 seeds", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
