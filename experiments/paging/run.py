"""Paged KV memory on demand against reservation, simulated. Usage: python run.py [out=result.json]"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator
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
SEEDS = (1, 2, 3)
REQUESTS = 500
KV_TOKENS, LONGEST = 15_696, 2048
MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 161, 338, 1.0
LIMIT_S = 0.05
"""On the mean normalised latency, for each output token: five times a lone request's. A looser one would need longer
runs, in which a queue that grows has the time to show."""

ENGINE = ("step_time.model=llama-2-7b", "step_time.gpu=a100", f"memory.num_kv_blocks={KV_TOKENS // 16}",
          f"memory.max_model_len={LONGEST}", "+preset=vllm-v0")


def reserving(reserve: str) -> System:
    """The same system but for its admission, which takes a request's blocks before it starts."""
    return System.of(*ENGINE, "scheduler/admission=worst_case", f"scheduler.admission.reserve={reserve}")


SYSTEMS = {"longest": reserving("max_model_len"), "power of two": reserving("power_of_two"),
           "exact": reserving("oracle"), "paged": System.of(*ENGINE)}


def chat_lengths(seed: int) -> list[Lengths]:
    """Log-normal with the means of the ShareGPT lengths in the PagedAttention paper; over-long pairs are drawn again.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - SIGMA ** 2 / 2, SIGMA)))

    def pairs() -> Iterator[Lengths]:
        while True:
            pair = Lengths(draw(MEAN_PROMPT), draw(MEAN_OUTPUT))
            if sum(pair) < LONGEST:
                yield pair

    return [pair for pair, _ in zip(pairs(), range(REQUESTS), strict=False)]


class Memory:
    """What the KV blocks of running requests hold, over the steps of decodes."""

    def __init__(self) -> None:
        self.num_steps = self.requests = self.held_tokens = self.filled_tokens = self.preemptions = 0

    def __call__(self, plan: Plan, start_s: float, end_s: float) -> None:
        self.preemptions += len(plan.preempted)
        running = [item.request for item in plan.items if item.request.block_ids]
        if not all(item.is_decode for item in plan.items):
            return
        self.num_steps += 1
        self.requests += len(plan.items)
        self.held_tokens += 16 * sum(len(request.block_ids) for request in running)
        self.filled_tokens += sum(request.num_computed for request in running)

    def summary(self) -> dict[str, float]:
        return {"mean_batch": self.requests / self.num_steps, "preemptions": self.preemptions,
                "filled_share": self.filled_tokens / self.held_tokens,
                "held_share": self.held_tokens / (self.num_steps * KV_TOKENS)}


def offline() -> dict[str, dict[str, object]]:
    """All requests at once: output tokens per second, and what the memory was used for."""
    rows: dict[str, dict[str, object]] = {}
    speeds: dict[str, list[float]] = {}
    for name, system in SYSTEMS.items():
        memories = [Memory() for _ in SEEDS]
        speeds[name] = [output_tokens_per_s(system.run(burst(chat_lengths(seed)), memory, max_tokens=LONGEST))
                        for seed, memory in zip(SEEDS, memories, strict=True)]
        rows[name] = {"tokens_per_s": spread(speeds[name]), **memories[0].summary()}
        progress(f"at once: {name} {shown(spread(speeds[name]), 0)} tok/s, {memories[0].summary()}")
    for name, row in rows.items():
        row["paged_over"] = spread([a / b for a, b in zip(speeds["paged"], speeds[name], strict=True)])
    return rows


def mean_latency_s(name: str, rate_per_s: float, seed: int) -> float:
    records = SYSTEMS[name].run(poisson(chat_lengths(seed), rate_per_s, seed), max_tokens=LONGEST)
    return statistics.mean(map(normalised_latency_s, after_warm_up(records)))


def online(mean_output_tokens: float, offline_rows: dict[str, dict[str, object]]) -> dict[str, object]:
    """The highest Poisson rate with a mean normalised latency of at most LIMIT_S, and the latency by rate."""
    rates, points = {}, {}
    for name in SYSTEMS:
        speed = offline_rows[name]["tokens_per_s"]["median"] / mean_output_tokens
        seen: list[tuple[float, float]] = []

        def keeps(rate: float, seed: int, name: str = name, seen: list[tuple[float, float]] = seen) -> bool:
            latency_s = mean_latency_s(name, rate, seed)
            if seed == SEEDS[0]:
                seen.append((rate, latency_s))
            return latency_s <= LIMIT_S

        rates[name] = [highest_rate(lambda rate, seed=seed: keeps(rate, seed), 0.75 * speed, 1.05 * speed)
                       for seed in SEEDS]
        seen += [(rate, mean_latency_s(name, rate, SEEDS[0])) for rate in (0.25 * speed, 0.5 * speed)]
        points[name] = sorted(seen)
        progress(f"mean normalised latency within {LIMIT_S} s: {name} {shown(spread(rates[name]))} req/s")
    return {"limit_s": LIMIT_S, "rate_per_s": {name: spread(values) for name, values in rates.items()},
            "paged_over": {name: spread([a / b for a, b in zip(rates["paged"], values, strict=True)])
                           for name, values in rates.items()}, "points": points}


def main() -> None:
    lengths = [pair for seed in SEEDS for pair in chat_lengths(seed)]
    means = {"prompt_tokens": statistics.mean(pair.prompt_tokens for pair in lengths),
             "output_tokens": statistics.mean(pair.output_tokens for pair in lengths)}
    progress(f"means {means}")
    at_once = offline()
    write_result(HERE, SYSTEMS, {"seeds": SEEDS, "requests": REQUESTS, "kv_tokens": KV_TOKENS, "means": means,
                                 "offline": at_once, "online": online(means["output_tokens"], at_once)})


if __name__ == "__main__":
    main()
