"""The engine: a scheduler, an executor at the end of a pipeline, and the loop of three calls that is a step."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servekit.core.plan import Plan
from servekit.core.request import FinishReason, RequestEvent, RequestId, RequestSpec
from servekit.core.scheduler import Scheduler
from servekit.engine.messages import Breakdown, EngineStats, StepOutput, StepRecord
from servekit.engine.pipeline import Pipeline
from servekit.engine.step_log import NoStepLog, StepLog

_BREAKDOWN_INTERVAL_S = 1.0
"""Counters by name change with every step, and copying and sending them is not free."""


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

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline, clock: Callable[[], float] = time.monotonic,
                 log: StepLog | None = None) -> None:
        self._scheduler = scheduler
        self._log = log or NoStepLog()
        self._pipeline = pipeline
        self._clock = clock
        self._spent = _Spent()
        self._executions: Counter[str] = Counter()
        """Steps by how they were computed."""
        self._launched_s: deque[float] = deque()
        """When each step began that has not been booked."""
        self._last_plan: Plan | None = None
        """None when something has happened since it was made."""
        self._unsent: list[RequestEvent] = []
        """Refusals and aborts since the last step."""
        self._breakdown_due_s = -math.inf

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to say."""
        return self._scheduler.has_requests or bool(self._unsent) or self._pipeline.is_busy

    def idle_s(self) -> float | None:
        """For how long a step would find nothing to compute, if no request comes or goes: 0 right after one that did.

        None: until a request comes. Requests may be here and wait, for instance for their batch to fill.
        """
        plan = self._last_plan
        if self._unsent or self._pipeline.is_busy:
            return 0.0
        if not self._scheduler.has_requests:
            return None
        if plan is None or plan.has_work:
            return 0.0
        return None if plan.wake_s is None else max(0.0, plan.wake_s - self._clock())

    def add(self, specs: Sequence[RequestSpec]) -> None:
        """Accept requests, all or none; refusals are events of the next step."""
        now = self._clock()
        self._log.added(specs, now)
        self._unsent += self._scheduler.add(specs, now)
        self._last_plan = None

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests now; their last events are part of the next step."""
        now = self._clock()
        self._log.aborted(request_ids, now)
        self._unsent += self._scheduler.abort(request_ids, now)
        self._last_plan = None

    def abort_all(self, reason: FinishReason, message: str) -> None:
        """End every request now; their last events are part of the next step."""
        now = self._clock()
        self._log.all_aborted(now, reason, message)
        self._unsent += self._scheduler.abort_all(now, reason, message)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no request holds; returns the number of blocks forgotten."""
        self._log.cache_reset(self._clock())
        return self._scheduler.reset_prefix_cache()

    def step(self) -> StepOutput:
        """Plan, compute, book: advance every request that the plan has room for.

        What is booked is the step that was planned, or where steps overlap the one before it.
        """
        started = self._clock()
        plan = self._scheduler.schedule(started)
        planned = self._clock()
        self._log.planned(plan, started)
        self._launched_s.append(planned)
        done_steps = self._pipeline.execute(plan)
        executed = self._clock()
        self._last_plan = plan if len(done_steps) < 2 else None
        events, record_of = self._take_unsent(), None
        for done, result in done_steps:
            self._log.updated(result, self._launched_s.popleft(), executed)
            events += self._scheduler.update(done, result, executed)
            if done.items:
                self._executions["eager" if result.graph_size is None else f"graph_{result.graph_size}"] += 1
                record_of = done
        finished = self._clock()
        self._spent.schedule_s += planned - started
        self._spent.execute_s += executed - planned
        self._spent.update_s += finished - executed
        return StepOutput(tuple(events), self.stats(self._is_breakdown_due(finished)),
                          None if record_of is None else _record(record_of, finished - started))

    def stats(self, with_breakdown: bool = True) -> EngineStats:
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
            swapped_out_blocks_total=stats.swapped_out_blocks,
            swapped_in_blocks_total=stats.swapped_in_blocks,
            schedule_s_total=self._spent.schedule_s,
            execute_s_total=self._spent.execute_s,
            update_s_total=self._spent.update_s,
            breakdown=Breakdown.of(stats, self._executions) if with_breakdown else None)

    def _is_breakdown_due(self, now: float) -> bool:
        """Whether a second has passed since the last one, or nothing is left to do."""
        is_due = now >= self._breakdown_due_s or not self._scheduler.has_requests
        if is_due:
            self._breakdown_due_s = now + _BREAKDOWN_INTERVAL_S
        return is_due

    def check(self) -> None:
        """Raise AssertionError unless the scheduler's books agree."""
        self._scheduler.check()

    def _take_unsent(self) -> list[RequestEvent]:
        unsent, self._unsent = self._unsent, []
        return unsent


def _record(plan: Plan, duration_s: float) -> StepRecord:
    num_decodes = num_sampled = context_tokens = 0
    chunks = []
    for item in plan.items:
        num_sampled += item.samples
        if item.num_tokens > 1:
            chunks.append((item.num_tokens, item.start))
        else:
            num_decodes += item.samples
            context_tokens += item.start + 1
    return StepRecord(plan.num_tokens - num_decodes, num_decodes, len(plan.items), duration_s, context_tokens,
                      tuple(chunks), num_sampled, len(plan.swap_out) + len(plan.swap_in))
