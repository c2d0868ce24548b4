"""Draws plot.png from result.json: time of schedule() by waiting requests, one line a policy.

    python experiments/scheduler-overhead/plot.py [result.json [plot.png]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    rows = result["by_waiting"]
    figure, axes = plt.subplots(figsize=(8, 5))
    for policy, marker in zip(dict.fromkeys(row["policy"] for row in rows), "osv^D<P*", strict=False):
        own = [row for row in rows if row["policy"] == policy]
        waiting = [row["waiting"] for row in own]
        (line,) = axes.plot(waiting, [row["schedule_ms"]["median"] for row in own], marker=marker, label=policy)
        axes.plot(waiting, [row["schedule_ms"]["min"] for row in own], color=line.get_color(), linestyle="--",
                  linewidth=0.8)
    axes.axhline(result["limit_ms"], color="black", linestyle=":", label=f"limit, {result['limit_ms']:g} ms")
    axes.set(xscale="log", xlabel="waiting requests", ylabel="schedule(), ms", ylim=(0, 1.3 * result["limit_ms"]),
             title="256 running; one ends and one arrives before each step\n"
                   "(solid: median of 300 steps; dashed: least)")
    axes.set_xticks([100, 1_000, 10_000, 100_000], ["100", "1,000", "10,000", "100,000"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(ncols=5, fontsize=8, loc="upper center")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
