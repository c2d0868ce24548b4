"""Continuous against static and dynamic batching, simulated. Usage: python run.py [out=result.json]"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from simulated import (
    Lengths,
    System,
    after_warm_up,
    burst,
    highest_rate,
    normalised_latency_s,
    output_tokens_per_s,
    poisson,
    progress,
    shown,
    spread,
    write_result,
)

from servekit.core.plan import Plan

HERE = Path(__file__).parent
SEEDS = (1, 2, 3, 4, 5)
BURST_REQUESTS = 512
STREAM_S, LEAST_REQUESTS = 100, 200
"""How long requests arrive, so that a queue that grows has the time to show, and how many at least."""
MEAN_OUTPUT, LONGEST_OUTPUT = 128, 1536
LATENCY_FACTORS = (2, 4, 10)
"""Limits on the median normalised latency, as multiples of a lone request's."""

ENGINE = ("step_time.model=llama-2-7b", "step_time.gpu=a100", "memory.max_model_len=2048")


def system(preset: str, batch: int) -> System:
    """A preset, with the same limit on the batch; one step holds the prompts of the whole batch."""
    return System.of(*ENGINE, f"+preset={preset}", f"scheduler.max_num_seqs={batch}",
                     f"scheduler.max_step_tokens={batch * 512}")


SYSTEMS = {f"{name} {batch}": system(preset, batch) for batch in (8, 32)
           for name, preset in (("static", "faster-transformer"), ("dynamic", "triton"), ("continuous", "orca"))}

OUTPUTS: Mapping[str, Callable[[random.Random], int]] = {
    "constant": lambda rng: MEAN_OUTPUT,
    "uniform": lambda rng: rng.randint(1, MEAN_OUTPUT),
    "exponential": lambda rng: min(LONGEST_OUTPUT, 1 + int(rng.expovariate(1 / MEAN_OUTPUT))),
}


def burst_ratios() -> Iterator[dict[str, object]]:
    """Output tokens per second of 512 requests at once, over those of static batching with the same batch."""
    for kind, draw in OUTPUTS.items():
        runs = [[Lengths(512, draw(rng)) for _ in range(BURST_REQUESTS)] for rng in map(random.Random, SEEDS)]
        for batch in (8, 32):
            speeds = {name: [output_tokens_per_s(SYSTEMS[f"{name} {batch}"].run(burst(lengths))) for lengths in runs]
                      for name in ("static", "dynamic", "continuous")}
            ratios = {name: spread([a / b for a, b in zip(speeds[name], speeds["static"], strict=True)])
                      for name in ("dynamic", "continuous")}
            progress(f"burst, {kind} outputs, batch {batch}: continuous/static {shown(ratios['continuous'])}")
            yield {"outputs": kind, "batch": batch, "limit": decode_limit(kind, batch), "over_static": ratios,
                   "tokens_per_s": {name: spread(values) for name, values in speeds.items()}}


def decode_limit(kind: str, batch: int) -> float:
    """The ratio if every step took the same time and prompts none: mean of the longest of a batch over the mean."""
    match kind:
        case "exponential":
            return sum(1 / i for i in range(1, batch + 1))
        case "uniform":
            return 2 * batch / (batch + 1)
    return 1.0


class Slots:
    """Counts, step by step, the requests that got a token."""

    def __init__(self) -> None:
        self.busy: list[int] = []

    def __call__(self, plan: Plan, start_s: float, end_s: float) -> None:
        self.busy.append(sum(item.samples for item in plan.items))


def tail_waste() -> dict[str, object]:
    """Batches of seven requests of 50 tokens and one of 200, eight of them one after the other."""
    lengths = [Lengths(512, 200 if i % 8 == 7 else 50) for i in range(64)]
    busy = {}
    for name in ("static", "continuous"):
        slots = Slots()
        SYSTEMS[f"{name} 8"].run(burst(lengths), slots)
        busy[name] = slots.busy
    first = busy["static"][:200]
    found = {"idle_after_50": idle(first[50:]), "idle_of_batch": idle(first),
             "idle_of_run": {name: idle(steps) for name, steps in busy.items()},
             "steps": {name: len(steps) for name, steps in busy.items()}, "busy_slots": busy}
    progress(f"tail waste: {found['idle_after_50']:.1%} of the slots idle after step 50, {found['idle_of_batch']:.1%} "
             f"in the batch; {found['idle_of_run']['continuous']:.1%} with continuous batching")
    return found


def idle(busy: Sequence[int], slots: int = 8) -> float:
    """Share of the slots that no request was in."""
    return 1 - sum(busy) / (slots * len(busy))


STREAMS = ("static 8", "static 32", "dynamic 32", "continuous 32")


def stream_lengths(seed: int, rate_per_s: float) -> list[Lengths]:
    rng = random.Random(seed)
    count = max(LEAST_REQUESTS, round(rate_per_s * STREAM_S))
    return [Lengths(rng.randint(32, 512), rng.randint(1, 128)) for _ in range(count)]


def median_latency_s(name: str, rate_per_s: float, seed: int) -> float:
    records = SYSTEMS[name].run(poisson(stream_lengths(seed, rate_per_s), rate_per_s, seed))
    return statistics.median(map(normalised_latency_s, after_warm_up(records)))


def rates_at_equal_latency() -> dict[str, object]:
    """The highest Poisson rate whose median normalised latency stays below a multiple of a lone request's."""
    lone_s = median_latency_s("continuous 32", 0.01, SEEDS[0])
    rows: list[dict[str, object]] = []
    guesses = dict.fromkeys(STREAMS, 3.0)
    for factor in LATENCY_FACTORS:
        rates = {}
        for name in STREAMS:
            rates[name] = [highest_rate(lambda rate, name=name, seed=seed, limit_s=factor * lone_s:
                                        median_latency_s(name, rate, seed) <= limit_s, guesses[name],
                                        1.4 * guesses[name]) for seed in SEEDS]
            guesses[name] = statistics.median(rates[name])
            progress(f"median normalised latency below {factor} x {lone_s * 1e3:.1f} ms: {name} "
                     f"{shown(spread(rates[name]))} req/s")
        rows.append({"factor": factor, "limit_s": factor * lone_s,
                     "rate_per_s": {name: spread(values) for name, values in rates.items()},
                     "continuous_32_over": {name: spread([a / b for a, b in zip(rates["continuous 32"], values,
                                                                                 strict=True)])
                                            for name, values in rates.items()}})
    return {"lone_s": lone_s, "limits": rows}


def latency_curves() -> dict[str, list[tuple[float, float]]]:
    """Median normalised latency by rate, one seed."""
    rates = [0.5 * 1.5 ** i for i in range(11)]
    curves = {}
    for name in STREAMS:
        points: list[tuple[float, float]] = []
        for rate in rates:
            points.append((rate, median_latency_s(name, rate, SEEDS[0])))
            if points[-1][1] > 0.6:
                break
        curves[name] = points
    progress("latency curves")
    return curves


def main() -> None:
    write_result(HERE, SYSTEMS, {"seeds": SEEDS, "burst": list(burst_ratios()), "tail_waste": tail_waste(),
                                 "equal_latency": rates_at_equal_latency(), "curves": latency_curves()})


if __name__ == "__main__":
    main()
