"""The engine: a scheduler, an executor, and the loop of three calls that is a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from servekit.core.plan import Plan, StepResult
from servekit.core.request import FinishReason, RequestEvent, RequestId, RequestSpec
from servekit.core.scheduler import Scheduler
from servekit.engine.messages import EngineStats, StepOutput, StepRecord


class Executor(Protocol):
    """Computes plans: the runner on a device, or a model of its step times."""

    def execute(self, plan: Plan) -> StepResult: ...


@dataclass(slots=True)
class _Spent:
    """Seconds spent in each part of the steps so far."""

    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0


class Engine:
    """Requests go in with `add`, leave early with `abort`, and each `step` says what became of them.

    `clock` gives seconds and never goes back; arrival times of requests are on the same clock.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._spent = _Spent()
        self._unsent: list[RequestEvent] = []
        """Refusals and aborts since the last step."""

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to say."""
        return self._scheduler.has_requests or bool(self._unsent)

    def add(self, specs: Sequence[RequestSpec]) -> None:
        """Accept requests, all or none; refusals are events of the next step."""
        self._unsent += self._scheduler.add(specs, self._clock())

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests now; their last events are part of the next step."""
        self._unsent += self._scheduler.abort(request_ids, self._clock())

    def abort_all(self, reason: FinishReason, message: str) -> None:
        """End every request now; their last events are part of the next step."""
        self._unsent += self._scheduler.abort_all(self._clock(), reason, message)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no request holds; returns the number of blocks forgotten."""
        return self._scheduler.reset_prefix_cache()

    def step(self) -> StepOutput:
        """Plan, compute, book: advance every request that the plan has room for."""
        started = self._clock()
        plan = self._scheduler.schedule(started)
        planned = self._clock()
        result = self._executor.execute(plan) if plan.has_work else StepResult({})
        executed = self._clock()
        events = self._take_unsent() + self._scheduler.update(plan, result, executed)
        finished = self._clock()
        self._spent.schedule_s += planned - started
        self._spent.execute_s += executed - planned
        self._spent.update_s += finished - executed
        return StepOutput(tuple(events), self.stats(), _record(plan, finished - started) if plan.items else None)

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        scheduler, stats, pool = self._scheduler, self._scheduler.stats, self._scheduler.kv.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            num_steps_total=stats.num_steps,
            prompt_tokens_total=stats.prompt_tokens,
            cached_tokens_total=stats.cached_tokens,
            prefix_queries_total=stats.prefix_queries,
            recomputed_tokens_total=stats.recomputed_tokens,
            generation_tokens_total=stats.generation_tokens,
            preemptions_total=stats.preemptions,
            preemptions_by_kind_total=dict(stats.preemptions_by_kind),
            swapped_out_blocks_total=stats.swapped_out_blocks,
            swapped_in_blocks_total=stats.swapped_in_blocks,
            refused_total=dict(stats.refused),
            bound_total=dict(stats.bound),
            schedule_s_total=self._spent.schedule_s,
            execute_s_total=self._spent.execute_s,
            update_s_total=self._spent.update_s)

    def check(self) -> None:
        """Raise AssertionError unless the scheduler's books agree."""
        self._scheduler.check()

    def _take_unsent(self) -> list[RequestEvent]:
        unsent, self._unsent = self._unsent, []
        return unsent


def _record(plan: Plan, duration_s: float) -> StepRecord:
    num_decodes = sum(1 for item in plan.items if item.samples and item.num_tokens == 1)
    return StepRecord(plan.num_tokens - num_decodes, num_decodes, len(plan.items), duration_s)
