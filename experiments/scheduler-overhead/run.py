"""How long schedule() + update() take, by running and waiting requests. Usage: python run.py [out=result.json]"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from pathlib import Path

from servekit.config.admission import OnDemandAdmissionConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, Sampled, StepResult
from servekit.core.request import RequestId, RequestSpec, SamplingParams
from servekit.core.scheduler import Scheduler

STEPS = 300
PROMPT_TOKENS = 32


def loaded_scheduler(num_running: int, num_waiting: int) -> Scheduler:
    """A scheduler with `num_running` decoding and `num_waiting` queued requests."""
    config = SchedulerConfig(max_num_seqs=num_running, max_step_tokens=max(8192, num_running),
                             admission=OnDemandAdmissionConfig(max_queue_requests=None))
    scheduler = build_scheduler(config, num_kv_blocks=num_running * 64, block_size_tokens=16, max_model_len=1024)
    sampling = SamplingParams(max_tokens=900)
    scheduler.add([RequestSpec(RequestId(f"r{i}"), tuple(range(i, i + PROMPT_TOKENS)), sampling, 0.0)
                   for i in range(num_running + num_waiting)], 0.0)
    while scheduler.num_running < num_running or any(
            item.num_tokens > 1 for item in step(scheduler).items):
        step(scheduler)
    return scheduler


def answer(plan: Plan) -> StepResult:
    return StepResult({item.request.request_id: Sampled(17) for item in plan.items if item.samples})


def step(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule(1.0)
    scheduler.update(plan, answer(plan), 1.0)
    return plan


def measure(num_running: int, num_waiting: int) -> dict[str, float]:
    scheduler = loaded_scheduler(num_running, num_waiting)
    schedule_ms, update_ms = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule(1.0)
        planned = time.perf_counter()
        result = answer(plan)
        answered = time.perf_counter()
        scheduler.update(plan, result, 1.0)
        booked = time.perf_counter()
        schedule_ms.append(1e3 * (planned - start))
        update_ms.append(1e3 * (booked - answered))
    total_ms = [a + b for a, b in zip(schedule_ms, update_ms, strict=True)]
    return {"running": num_running, "waiting": num_waiting, "schedule_ms": statistics.median(schedule_ms),
            "update_ms": statistics.median(update_ms), "total_ms": statistics.median(total_ms),
            "total_p99_ms": sorted(total_ms)[int(0.99 * STEPS)]}


def main() -> None:
    rows = [measure(running, waiting)
            for running, waiting in [(1, 0), (32, 0), (32, 1000), (128, 1000), (256, 0), (256, 1000), (256, 10000)]]
    print(f"{'running':>8} {'waiting':>8} {'schedule ms':>12} {'update ms':>10} {'both ms':>8} {'p99 ms':>7}")
    for row in rows:
        print(f"{row['running']:8} {row['waiting']:8} {row['schedule_ms']:12.3f} {row['update_ms']:10.3f} "
              f"{row['total_ms']:8.3f} {row['total_p99_ms']:7.3f}")
    out = dict(argument.split("=", 1) for argument in sys.argv[1:]).get("out")
    if out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
        Path(out).write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
