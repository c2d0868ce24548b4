"""How long schedule() and update() take, by policy and by requests. Usage: python run.py [out=result.json]"""

from __future__ import annotations

import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from servekit.config.admission import OnDemandAdmissionConfig
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    PriorityPolicyConfig,
    SjfPolicyConfig,
    SrtfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, Sampled, StepResult
from servekit.core.request import RequestId, RequestSpec, SamplingParams

STEPS, WARM_UP_STEPS = 300, 50
STEP_S = 0.02
PROMPT_TOKENS = 32
TENANTS = 100
LIMIT_MS = 1.0
POLICIES: tuple[PolicyConfig, ...] = (
    FifoPolicyConfig(), SjfPolicyConfig(), SrtfPolicyConfig(), PriorityPolicyConfig(), FairPolicyConfig(),
    VtcPolicyConfig(), MlfqPolicyConfig(), LpmPolicyConfig())
GROWTH_WAITING = (100, 1_000, 10_000, 100_000)


class Load:
    """A scheduler that a fixed number of requests run in and a fixed number wait for.

    Before each step, one of the running requests ends and a new one arrives, so that the queue is at work. Lengths,
    tenants and classes are drawn at random.
    """

    def __init__(self, policy: PolicyConfig, num_running: int, num_waiting: int, turnover: bool = True) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_running, max_step_tokens=max(8192, num_running * PROMPT_TOKENS), policy=policy,
            admission=OnDemandAdmissionConfig(max_queue_requests=None, queue_timeout_s=None, request_timeout_s=None))
        self.scheduler = build_scheduler(config, num_kv_blocks=num_running * 64, block_size_tokens=16,
                                         max_model_len=1024)
        self._turnover = turnover
        self._rng = random.Random(1)
        self._numbers = itertools.count()
        self._now_s = 0.0
        self.scheduler.add([self._request() for _ in range(num_running + num_waiting)], self._now_s)
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> tuple[float, float, Plan]:
        """Milliseconds that schedule() and update() took, and the plan."""
        self._now_s += STEP_S
        start = time.perf_counter()
        plan = self.scheduler.schedule(self._now_s)
        planned = time.perf_counter()
        result = StepResult({item.request.request_id: Sampled(17) for item in plan.items if item.samples})
        answered = time.perf_counter()
        self.scheduler.update(plan, result, self._now_s + STEP_S)
        booked = time.perf_counter()
        if self._turnover:
            self._turn_over(plan)
        return 1e3 * (planned - start), 1e3 * (booked - answered), plan

    def _turn_over(self, plan: Plan) -> None:
        leaver = self._rng.choice(plan.items).request.request_id
        self.scheduler.abort([leaver], self._now_s)
        self.scheduler.add([self._request()], self._now_s)

    def _request(self) -> RequestSpec:
        number, rng = next(self._numbers), self._rng
        # Longer than the measurement, so that nobody but the leavers ends.
        sampling = SamplingParams(max_tokens=rng.randint(STEPS + WARM_UP_STEPS + 50, 900))
        return RequestSpec(RequestId(f"r{number}"), tuple(range(number, number + PROMPT_TOKENS)), sampling, self._now_s,
                           tenant=f"t{rng.randrange(TENANTS)}", priority=rng.randrange(3))


def measure(policy: PolicyConfig, num_running: int, num_waiting: int, turnover: bool = True) -> dict[str, object]:
    load = Load(policy, num_running, num_waiting, turnover)
    steps = [load.step() for _ in range(STEPS)]
    started = [sum(item.num_tokens > 1 for item in plan.items) for _, _, plan in steps]
    row = {"policy": policy.kind.value, "running": num_running, "waiting": num_waiting,
           "started_a_step": statistics.mean(started),
           "schedule_ms": _summary([schedule for schedule, _, _ in steps]),
           "update_ms": _summary([update for _, update, _ in steps]),
           "both_ms": _summary([schedule + update for schedule, update, _ in steps])}
    print(_line(row), flush=True)
    return row


def _summary(values_ms: Sequence[float]) -> dict[str, float]:
    """The least is what the code costs; the rest is also what else the machine did."""
    ordered = sorted(values_ms)
    return {"min": ordered[0], "median": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))]}


def _line(row: dict[str, object]) -> str:
    schedule, both = row["schedule_ms"], row["both_ms"]
    return (f"{row['policy']:9} {row['running']:7} {row['waiting']:8} {row['started_a_step']:8.1f} "
            f"{schedule['min']:8.3f} {schedule['median']:8.3f} {schedule['p99']:8.3f} {both['median']:8.3f}")


def undisturbed() -> Iterator[dict[str, object]]:
    """First come, first served, when nobody comes or goes."""
    for running, waiting in [(1, 0), (32, 0), (32, 1000), (128, 1000), (256, 0), (256, 1000), (256, 10_000)]:
        yield measure(FifoPolicyConfig(), running, waiting, turnover=False)


def main() -> None:
    print(f"{'':9} {'':7} {'':8} {'started':>8} {'schedule() ms':>26} {'both ms':>8}")
    print(f"{'policy':9} {'running':>7} {'waiting':>8} {'a step':>8} {'min':>8} {'median':>8} {'p99':>8} {'median':>8}")
    rows = list(undisturbed())
    by_waiting = [measure(policy, 256, waiting) for policy in POLICIES for waiting in GROWTH_WAITING]
    out = dict(argument.split("=", 1) for argument in sys.argv[1:]).get("out")
    if out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
        Path(out).write_text(json.dumps({"facts": facts, "limit_ms": LIMIT_MS, "undisturbed": rows,
                                         "by_waiting": by_waiting}, indent=1) + "\n")


if __name__ == "__main__":
    main()
