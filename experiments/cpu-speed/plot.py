"""Draws plot.png from result.json: time between tokens by batch and by context, and the share of the machine's limit.

    python experiments/cpu-speed/plot.py [result.json [plot.png]]

The limit of a step is the longer of two times: reading the weights and the batch's KV cache once at the measured read
bandwidth, and the matrix products at the measured int8 rate. It is drawn for int8 weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LAYER_WEIGHTS = 30 * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536)
HEAD_WEIGHTS = 49152 * 576
WEIGHT_BYTES = {"servekit int8": LAYER_WEIGHTS + HEAD_WEIGHTS * 9 / 8,
                "servekit int4": LAYER_WEIGHTS * 5 / 8 + HEAD_WEIGHTS * 9 / 8}
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2
TOKENS_IN_BATCH_RUN = 64


def limit_ms(batch: int, context: int, facts: dict[str, float], name: str = "servekit int8") -> float:
    """The least time of one decode step of SmolLM2-135M."""
    read_s = (WEIGHT_BYTES[name] + batch * context * KV_BYTES_PER_TOKEN) / (facts["read_gb_s"] * 1e9)
    compute_s = 2 * batch * (LAYER_WEIGHTS + HEAD_WEIGHTS) / (facts["int8_gop_s"] * 1e9)
    return 1e3 * max(read_s, compute_s)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "result.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "plot.png"
    result = json.loads(source.read_text())
    facts, growth = result["facts"], result["growth"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5))
    for name, found in growth.items():
        by_batch = {int(size): value for size, value in found["by_batch_ms"].items()}
        by_context = {int(size): row["tpot_ms"] for size, row in found["by_context"].items()}
        left.plot(by_batch.keys(), by_batch.values(), marker="o", label=name)
        middle.plot(by_context.keys(), by_context.values(), marker="o", label=name)
        if name in WEIGHT_BYTES:
            shares = [100 * limit_ms(size, TOKENS_IN_BATCH_RUN, facts, name) / value
                      for size, value in by_batch.items()]
            right.plot(by_batch.keys(), shares, marker="o", label=f"{name}, by batch")
            shares = [100 * limit_ms(1, size, facts, name) / value for size, value in by_context.items()]
            right.plot(by_context.keys(), shares, marker="s", label=f"{name}, by context")
    sizes = sorted({int(size) for found in growth.values() for size in found["by_batch_ms"]})
    left.plot(sizes, [limit_ms(size, TOKENS_IN_BATCH_RUN, facts) for size in sizes], "k:", label="limit")
    contexts = sorted({int(size) for found in growth.values() for size in found["by_context"]})
    middle.plot(contexts, [limit_ms(1, size, facts) for size in contexts], "k:", label="limit")
    for axes, title, x in ((left, "requests at once", "batch"), (middle, "one request", "context, tokens")):
        axes.set(title=title, xlabel=x, ylabel="ms between tokens", yscale="log")
    for axes, ticks in ((left, sizes), (middle, contexts), (right, [1, 4, 16, 128, 1024, 4096])):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    right.set(title="share of the limit that servekit reaches", xlabel="batch, or context in tokens", ylabel="%",
              ylim=(0, 105))
    middle.set_ylim(top=2.5 * middle.get_ylim()[1])  # Room for the legend.
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left" if axes is not right else "upper right")
    figure.suptitle(f"SmolLM2-135M-Instruct on {facts['cores']} cores of {facts['processor']}, {facts['date']}")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
