"""Draws plot.png from result.json.

    python experiments/paging/plot.py [result.json [plot.png]]
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
LABELS = {"longest": "reserve the longest (2048)", "power of two": "reserve the next power of two",
          "exact": "reserve the exact length", "paged": "paged, on demand"}
COLOURS = dict(zip(LABELS, ("#8a93a3", "#c9a227", "#e08b3e", "#3f7fbf"), strict=True))


def draw_latency(axes: Axes, online: dict[str, Any]) -> None:
    for name, points in online["points"].items():
        axes.plot([rate for rate, _ in points], [1e3 * latency for _, latency in points], marker="o", markersize=3,
                  color=COLOURS[name], label=LABELS[name])
    limit_ms = 1e3 * online["limit_s"]
    axes.axhline(limit_ms, color="black", linestyle=":", label=f"limit, {limit_ms:.0f} ms")
    axes.set(yscale="log", xlabel="Poisson arrivals, requests/s", xlim=(0, None),
             ylabel="mean normalised latency, ms per output token", title="latency by rate (one seed)")
    axes.set_yticks([10, 20, 50, 100], ["10", "20", "50", "100"])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def draw_speed(axes: Axes, rows: dict[str, Any]) -> None:
    for place, (name, row) in enumerate(rows.items()):
        speed = row["tokens_per_s"]
        axes.bar(place, speed["median"], color=COLOURS[name], capsize=4,
                 yerr=[[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]])
        axes.text(place, speed["max"] * 1.02, f"{row['mean_batch']:.1f} at once", ha="center", fontsize=8)
    axes.set_xticks(range(len(rows)), list(rows), fontsize=8)
    most = max(row["tokens_per_s"]["max"] for row in rows.values())
    axes.set(ylabel="output tok/s", title="all requests at once (median and ends of 3 seeds)", ylim=(0, 1.12 * most))


def draw_memory(axes: Axes, rows: dict[str, Any]) -> None:
    for place, row in enumerate(rows.values()):
        filled = 100 * row["filled_share"] * row["held_share"]
        parts = (("tokens", filled, "#3f7fbf"), ("held, empty", 100 * row["held_share"] - filled, "#e08b3e"),
                 ("free", 100 * (1 - row["held_share"]), "#d7dbe2"))
        bottom = 0.0
        for label, share, colour in parts:
            axes.bar(place, share, bottom=bottom, color=colour, label=label if place == 0 else None)
            bottom += share
    axes.set_xticks(range(len(rows)), list(rows), fontsize=8)
    axes.set(ylabel="share of the KV cache, %", ylim=(0, 118), title="what the KV cache holds, all requests at once")
    axes.legend(fontsize=8, loc="upper center", ncols=3)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    draw_latency(left, result["online"])
    draw_speed(middle, result["offline"])
    draw_memory(right, result["offline"])
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"Simulated: Llama-2-7B on one A100 with a KV cache of {result['kv_tokens']:,} tokens; prompts and "
                    f"outputs of {result['means']['prompt_tokens']:.0f} and {result['means']['output_tokens']:.0f} "
                    "tokens on average", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
