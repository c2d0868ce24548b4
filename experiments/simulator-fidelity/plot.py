"""Draws plot.png from result.json: what was predicted against what was measured, one point a run.

    python experiments/simulator-fidelity/plot.py [result.json [plot.png]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
PANELS = {"tokens_per_s": ("throughput", "output tok/s", 1, "throughput"),
          "ttft_s_p50": ("median TTFT", "ms", 1e3, "p50"),
          "ttft_s_p99": ("p99 TTFT", "ms", 1e3, "p99"), "tpot_s_p50": ("median TPOT", "ms", 1e3, "p50"),
          "tpot_s_p99": ("p99 TPOT", "ms", 1e3, "p99")}
MARKERS = {"closed": "s", "40": "v", "70": "o", "95": "^"}


def draw(axes: Axes, figure: str, result: dict[str, Any], colours: dict[str, Any]) -> None:
    title, unit, scale, limit_name = PANELS[figure]
    runs, limit = result["runs"], result["limits"][limit_name]
    for run in runs:
        axes.scatter(scale * run["measured"][figure], scale * run["predicted"][figure], s=34,
                     marker=MARKERS[run["load"]], edgecolors=colours[run["setup"]],
                     facecolors="none" if run["is_fitted"] else colours[run["setup"]])
    values = [value for run in runs for kind in ("measured", "predicted") if (value := scale * run[kind][figure]) > 0]
    ends = np.array([min(values) * 0.8, max(values) * 1.25])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, ends * (1 - limit), ends * (1 + limit), color="black", alpha=0.08)
    row = result["summary"]["predicted"].get(figure)
    found = "" if row is None else (f"; within: {row['within']} of {row['of']}"
                                    + ("" if row["spearman"] is None else f", Spearman {row['spearman']:.3f}"))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"measured, {unit}",
             ylabel=f"predicted, {unit}", title=f"{title} (band: ±{limit:.0%}{found})")
    axes.title.set_fontsize(9)
    ticks = [tick for power in range(-1, 6) for step in (1, 2, 5) if ends[0] < (tick := step * 10 ** power) < ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)


def draw_legend(axes: Axes, result: dict[str, Any], colours: dict[str, Any]) -> None:
    axes.axis("off")
    fitted = {run["setup"]: run["is_fitted"] for run in result["runs"]}
    for setup, colour in colours.items():
        axes.scatter([], [], marker="o", edgecolors=colour, facecolors="none" if fitted[setup] else colour,
                     label=setup + (" (fitted)" if fitted[setup] else ""))
    for load, marker in MARKERS.items():
        axes.scatter([], [], marker=marker, color="black",
                     label="closed loop" if load == "closed" else f"{load} % of the capacity")
    axes.legend(loc="center", fontsize=8, ncols=2)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    names = list(dict.fromkeys(run["setup"] for run in result["runs"]))
    colours = dict(zip(names, plt.colormaps["turbo"](np.linspace(0.03, 0.97, len(names))), strict=True))
    figure, grid = plt.subplots(2, 3, figsize=(15, 10))
    for axes, name in zip(grid.flat, PANELS, strict=False):
        draw(axes, name, result, colours)
    draw_legend(grid.flat[-1], result, colours)
    facts = result["facts"]
    figure.suptitle(f"SmolLM2-135M-Instruct on {facts['cpus']} cores, {facts['date']}: step times fitted to "
                    f"{result['fit']['num_steps']:,} steps; filled: setups that the fit has not seen", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
