"""Prompts first against chunked prefill at several budgets, simulated. Usage: python run.py [out=result.json]"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from simulated import (
    Lengths,
    System,
    after_warm_up,
    highest_rate,
    output_tokens_per_s,
    poisson,
    progress,
    shown,
    spread,
    write_result,
)

from servekit.core.plan import Plan
from servekit.core.request import RequestId
from servekit.load.records import RequestRecord

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
FIXED_RATE_REQUESTS, CAPACITY_REQUESTS = 400, 300
FIXED_RATE_PER_S = 1.0
LONGEST = 8192
LIMITS_S = {"strict": 0.1, "relaxed": 0.5}
"""On the p99 of the gaps between tokens."""
DELAY_LIMIT_S = 2.0
"""On the median time from arrival to the first step."""

ENGINE = ("step_time.model=llama-3-8b", "step_time.gpu=a100", f"memory.max_model_len={LONGEST}")


def chunked(budget_tokens: int) -> System:
    return System.of(*ENGINE, "+preset=sarathi", f"scheduler.max_step_tokens={budget_tokens}")


PROMPTS_FIRST = ("+preset=vllm-v0", "scheduler.max_num_seqs=128")
SYSTEMS = {"prompts first": System.of(*ENGINE, *PROMPTS_FIRST),
           "whole, mixed": System.of(*ENGINE, *PROMPTS_FIRST, "scheduler.prefill.mix_decodes=true"),
           **{f"chunked {budget}": chunked(budget) for budget in (256, 512, 1024, 2048)}}
COMPARED = {"strict": ("prompts first", "whole, mixed", "chunked 512"),
            "relaxed": ("prompts first", "whole, mixed", "chunked 2048")}


def lengths(seed: int, count: int) -> list[Lengths]:
    """Log-normal with the medians and 90th percentiles of openchat_sharegpt4 in the Sarathi-Serve paper; over-long
    pairs are drawn again."""
    rng = random.Random(seed)

    def draw(median: float, p90: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(median), math.log(p90 / median) / 1.2816)))

    def pairs() -> Iterator[Lengths]:
        while True:
            pair = Lengths(draw(1730, 5696), draw(415, 834))
            if sum(pair) < LONGEST:
                yield pair

    return [pair for pair, _ in zip(pairs(), range(count), strict=False)]


class Starts:
    """When each request was first part of a step."""

    def __init__(self) -> None:
        self.delays_s: dict[RequestId, float] = {}

    def __call__(self, plan: Plan, start_s: float, end_s: float) -> None:
        for item in plan.items:
            self.delays_s.setdefault(item.request.request_id, start_s - item.request.arrived_s)


def gaps_s(records: Sequence[RequestRecord]) -> np.ndarray:
    """Times between neighbouring tokens, of all requests together."""
    return np.concatenate([np.diff(np.frombuffer(record.chunk_times_s)) for record in records])


def percentile(values: Sequence[float] | np.ndarray, per_cent: float) -> float:
    return float(np.percentile(values, per_cent, method="inverted_cdf"))


def figures(name: str, seed: int) -> dict[str, float]:
    records = after_warm_up(SYSTEMS[name].run(poisson(lengths(seed, FIXED_RATE_REQUESTS), FIXED_RATE_PER_S, seed)))
    first_s = [record.chunk_times_s[0] - record.intended_s for record in records]
    gaps = gaps_s(records)
    return {"ttft_p50_s": percentile(first_s, 50), "ttft_p99_s": percentile(first_s, 99),
            "tbt_p50_s": percentile(gaps, 50), "tbt_p99_s": percentile(gaps, 99), "tbt_max_s": float(gaps.max()),
            "tokens_per_s": output_tokens_per_s(records)}


def at_a_fixed_rate() -> dict[str, dict[str, dict[str, float]]]:
    """TTFT, time between tokens and throughput of each system on the same requests."""
    rows = {}
    for name in SYSTEMS:
        runs = [figures(name, seed) for seed in SEEDS]
        rows[name] = {figure: spread([run[figure] for run in runs]) for figure in runs[0]}
        progress(f"{FIXED_RATE_PER_S} req/s: {name}: TTFT p50 {shown(rows[name]['ttft_p50_s'])} s, "
                 f"TBT p99 {shown(rows[name]['tbt_p99_s'], 3)} s, longest {shown(rows[name]['tbt_max_s'])} s, "
                 f"{shown(rows[name]['tokens_per_s'], 0)} tok/s")
    return rows


def keeps(name: str, rate_per_s: float, seed: int, limit_s: float) -> bool:
    starts = Starts()
    records = after_warm_up(SYSTEMS[name].run(poisson(lengths(seed, CAPACITY_REQUESTS), rate_per_s, seed), starts))
    return (percentile(gaps_s(records), 99) <= limit_s
            and statistics.median(starts.delays_s.values()) <= DELAY_LIMIT_S)


def capacities() -> dict[str, object]:
    """The highest Poisson rate that keeps the limit on the gaps, and the one on the delay."""
    rows = {}
    for objective, limit_s in LIMITS_S.items():
        rates = {name: [highest_rate(lambda rate, name=name, seed=seed, limit_s=limit_s:
                                     keeps(name, rate, seed, limit_s), 0.5, 1.0) for seed in SEEDS]
                 for name in COMPARED[objective]}
        best = rates[COMPARED[objective][-1]]
        rows[objective] = {"limit_s": limit_s, "rate_per_s": {name: spread(values) for name, values in rates.items()},
                           "chunked_over": {name: spread([a / b for a, b in zip(best, values, strict=True)])
                                            for name, values in rates.items()}}
        progress(f"TBT p99 within {limit_s} s: " + ", ".join(f"{name} {shown(spread(values))} req/s"
                                                            for name, values in rates.items()))
    return rows


def gap_curves() -> dict[str, list[tuple[float, float]]]:
    """Share of the gaps that are longer, by length, at the fixed rate, one seed."""
    curves = {}
    for name in SYSTEMS:
        records = SYSTEMS[name].run(poisson(lengths(SEEDS[0], FIXED_RATE_REQUESTS), FIXED_RATE_PER_S, SEEDS[0]))
        gaps = np.sort(gaps_s(after_warm_up(records)))
        shares = np.geomspace(1, 1 / len(gaps), 120)
        at = np.clip((len(gaps) * (1 - shares)).astype(int), 0, len(gaps) - 1)
        curves[name] = list(zip(gaps[at].round(6).tolist(), shares.round(9).tolist(), strict=True))
    progress("curves of the gaps")
    return curves


def main() -> None:
    write_result(HERE, SYSTEMS, {"seeds": SEEDS, "rate_per_s": FIXED_RATE_PER_S, "delay_limit_s": DELAY_LIMIT_S,
                                 "fixed_rate": at_a_fixed_rate(), "capacity": capacities(), "gaps": gap_curves()})


if __name__ == "__main__":
    main()
