"""The scheduler: decides what each step computes, and keeps the books of what came of it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from servekit.config.admission import TimeoutAction
from servekit.core.admission.base import Admission, QueueLimits
from servekit.core.batching.base import Batching
from servekit.core.kv import KVManager
from servekit.core.paused import Holders, PausedRequests
from servekit.core.plan import (
    BlockCopy,
    Bound,
    Ending,
    Plan,
    PlanItem,
    Preempted,
    PreemptionKind,
    Sampled,
    StepResult,
)
from servekit.core.policy.base import Policy
from servekit.core.preemption.base import Preemption
from servekit.core.prefill.base import Prefill, Turn
from servekit.core.quota import TenantQuotas
from servekit.core.request import (
    UNKNOWN_TOKEN,
    FinishReason,
    Request,
    RequestEvent,
    RequestId,
    RequestSpec,
    Status,
    TokenLogprobs,
)
from servekit.core.stats import SchedulerStats

_LOOKAHEAD = 64
"""Requests that one step passes over, at most, in search of one that may start."""


@dataclass(frozen=True)
class Components:
    """The named parts a scheduler is assembled from (core/build.py makes them from a configuration)."""

    batching: Batching
    policy: Policy
    prefill: Prefill
    preemption: Preemption
    admission: Admission
    limits: QueueLimits
    quotas: TenantQuotas
    share_in_batch_tokens: int | None = None
    """A request waits for a prefix of at least this length that a running one is computing; None: it never waits."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    """Tokens that the step has left."""
    items: list[PlanItem] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    wake_s: float | None = None
    memory_ran_out: bool = False
    """A running request had to give way to another: nothing is admitted on top."""
    blocks_are_coming: bool = False
    """A request gets its last token from the step that still runs: nobody gives way before its blocks are free."""
    by_place: list[Request] | None = None
    """Those that ran before this step, as the policy would serve them, once that has been asked for."""

    def add(self, item: PlanItem) -> None:
        self.items.append(item)
        self.budget -= item.num_tokens

    def drop(self, request: Request) -> None:
        """The request computes nothing in this step after all."""
        dropped = sum(item.num_tokens for item in self.items if item.request is request)
        if dropped:
            self.items = [item for item in self.items if item.request is not request]
            self.budget += dropped


@dataclass(slots=True)
class _Step:
    """A step that has been planned and not booked."""

    plan: Plan
    planned_s: float
    is_assumed: bool = False
    """Whether a later step has been planned as if this one were done."""


class Scheduler:
    """Requests in, plans out, results in, events out.

    There are no phases: each running request has tokens whose keys and values are not computed yet, one when it
    decodes and many when it is new, resumed or in the middle of its prompt, and a plan is an ordered list of
    (request, number of tokens). The components decide: prefill whether a step begins with decodes or prompts, batching
    how many requests may join, policy which ones, admission whether their KV blocks are free, preemption who gives
    way when blocks run out.

    The caller passes the time, in seconds on any clock that never goes back. Every accepted request ends with
    exactly one event that has a `finish`; so does every refused one.

    A step may be planned before the one before it is booked. Whatever that one computes is taken as done, and a token
    that it samples as a token whose value comes later, so no request is planned past what is certain of its length. A
    request that turns out to have ended has computed one token for nothing; its blocks are free at once, since a
    device computes steps in their order and whoever gets the blocks writes to them later.
    """

    def __init__(self, components: Components, kv: KVManager, max_step_tokens: int, max_model_len: int) -> None:
        self._parts = components
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._requests: dict[RequestId, Request] = {}
        self._waiting = components.policy
        self._running: list[Request] = []
        """In order of admission."""
        self._paused = PausedRequests(components.policy)
        self._num_waiting_tokens = 0
        self._num_waiting_of: Counter[int] = Counter()
        """Waiting requests by class."""
        self._held: dict[RequestId, list[RequestEvent]] = {}
        """Events that batching holds back until the batch is done."""
        self._steps: deque[_Step] = deque()
        """Planned and not booked: the one that runs and the one that is planned ahead of it, at most."""
        self._booked_s = 0.0
        """When the last step was booked."""
        self._deadlines: list[_Deadline] = []
        """Heap of times at which a request may have to end; ids of requests that are gone are skipped."""
        self._deadline_numbers = itertools.count()
        self._num_arrived = 0
        self.stats = SchedulerStats()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests have yet to compute, before prefix hits."""
        return self._num_waiting_tokens

    @property
    def has_requests(self) -> bool:
        return bool(self._requests or self._held)

    @property
    def kv(self) -> KVManager:
        return self._kv

    # Arrival and departure, between steps.

    def add(self, specs: Sequence[RequestSpec], now: float) -> list[RequestEvent]:
        """Queue requests, all or none. Returns one refusal for each of them, or nothing when they are accepted."""
        for spec in specs:
            assert spec.request_id not in self._requests, f"request id {spec.request_id} is in use"
        refusal = self._refusal(specs, now)
        if refusal is not None:
            self.stats.refused[refusal.reason.value] += len(specs)
            return [RequestEvent(spec.request_id, finish=refusal.reason, message=refusal.message,
                                 retry_after_s=refusal.retry_after_s, at_s=now) for spec in specs]
        for spec in specs:
            self._accept(Request(spec, self._max_model_len), now)
        return []

    def abort(self, request_ids: Iterable[RequestId], now: float, reason: FinishReason = FinishReason.abort,
              message: str = "") -> list[RequestEvent]:
        """End requests wherever they are and free what they hold; ids that are not here are ignored."""
        request_ids = list(request_ids)
        found = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        for request in found:
            self._retire([request], now)
        events = [_closing(request, reason, message, now) for request in found]
        if not self._held:
            return events
        return self._abort_held(request_ids, reason, message, now) + self._give_out(events, now)

    def abort_all(self, now: float, reason: FinishReason, message: str) -> list[RequestEvent]:
        """End every request that is here."""
        return self.abort(list(self._requests), now, reason, message)

    # A step.

    def schedule(self, now: float) -> Plan:
        """Decide the next step at time `now`: what is computed, who gives way, who is out of time.

        At most one step before it may still be without its `update`.
        """
        ended = self._expire(now)
        draft = _Draft(self._max_step_tokens)
        if self._steps:
            self._assume_done(self._steps[-1])
        decodes, prompts = self._split_running()
        if self._steps:
            decodes = self._without_last_tokens(decodes, draft)
        turn = self._parts.prefill.turn(len(decodes), len(prompts), len(self._waiting))
        bound = Bound.prefill if self._waiting else Bound.nothing_waiting
        if turn is not Turn.prompts:
            self._plan_decodes(decodes, draft, now)
        if turn is not Turn.decodes or not draft.items:
            bound = self._plan_prompts(prompts, draft, now)
        if turn is Turn.prompts and not draft.items:
            self._plan_decodes(decodes, draft, now)
        self._resolve_deadlock(decodes, draft, now)
        return self._plan(draft, ended, bound, now)

    def update(self, plan: Plan, result: StepResult, now: float) -> list[RequestEvent]:
        """Book what the executor computed for `plan` by time `now`; returns what the clients get to hear.

        Plans are booked in the order in which they were made.
        """
        step = self._steps.popleft()
        assert step.plan is plan, "a step is booked before the one that was planned before it"
        is_assumed = step.is_assumed
        events = [_closing(*ending, now) for ending in plan.ended]
        if not is_assumed:
            self._kv.copies_done()
        stats, register, sampled_by = self.stats, self._kv.register, result.sampled
        classes, tenants = stats.classes, stats.tenants
        num_sampled = num_prompt_tokens = 0
        finished: list[Request] = []
        for request, start, num_tokens, samples in plan.items:
            if request.status is Status.finished:
                continue  # It was aborted while the step ran, or had ended with the step before.
            if not is_assumed:
                request.num_computed = start + num_tokens
            if num_tokens > 1 or start < request.num_prompt:
                num_prompt_tokens += num_tokens
            if result.failed and request.request_id in result.failed:
                events.append(_closing(request, FinishReason.error, result.failed[request.request_id], now))
                finished.append(request)
                continue
            if request.status is Status.running:
                register(request)  # Else the step that was planned ahead has taken its blocks.
            if result.prompt_logprobs and request.request_id in result.prompt_logprobs:
                _keep_scores(request, start, result.prompt_logprobs[request.request_id])
            if samples:
                num_sampled += 1
                classes[request.priority].generation_tokens += 1
                tenants[request.tenant].generation_tokens += 1
                if is_assumed:
                    request.token_ids.pop()
                event = _append(request, sampled_by[request.request_id], now)
                events.append(event)
                if event.finish is not None:
                    finished.append(request)
        stats.generation_tokens += num_sampled
        stats.prompt_tokens += num_prompt_tokens
        self._parts.policy.stepped(plan.items, now - max(step.planned_s, self._booked_s), now)
        self._booked_s = now
        self._parts.quotas.stepped(plan.items, now)
        if finished:
            self._retire(finished, now)
        return self._give_out(events, now) if self._parts.batching.holds_answers else events

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no request holds; returns the number of blocks forgotten."""
        return self._kv.reset_prefix_cache()

    def check(self) -> None:
        """Raise AssertionError unless every request is in exactly one place and the KV accounting agrees."""
        assert len({id(request) for request in self._running}) == len(self._running), "a request runs twice"
        for request in self._running:
            assert request.status is Status.running, f"{request} is in the running list"
            assert request not in self._waiting, f"{request} runs and waits"
            assert request.num_computed < request.num_tokens, f"{request} has nothing left to compute"
        waiting = [request for request in self._requests.values() if request.status is Status.waiting]
        assert len(waiting) == len(self._waiting), "a waiting request is not in the queue"
        for request in waiting:
            assert request in self._waiting, f"{request} is not in the queue"
            assert bool(request.block_ids) == (request in self._paused), f"{request} waits and holds blocks"
        assert all(request in self._waiting for request in self._paused), "a paused request does not wait"
        assert len(waiting) + len(self._running) == len(self._requests), "a request is neither waiting nor running"
        assert self._num_waiting_tokens == sum(request.num_tokens for request in waiting), "waiting tokens drift"
        assert +self._num_waiting_of == Counter(request.priority for request in waiting), "waiting classes drift"
        self._waiting.check()
        self._kv.check(self._requests.values())

    # Arrival.

    def _refusal(self, specs: Sequence[RequestSpec], now: float) -> _Refusal | None:
        limits = self._parts.limits
        for spec in specs:
            if len(spec.prompt_token_ids) >= self._max_model_len:
                return _Refusal(FinishReason.too_long, (
                    f"the prompt has {len(spec.prompt_token_ids)} tokens and the model's length is "
                    f"{self._max_model_len}, prompt and output together; shorten the prompt"))
            retry_after_s = self._parts.quotas.refused_for_s(spec.tenant, now)
            if retry_after_s is not None:
                return _Refusal(FinishReason.over_quota, (
                    f"tenant {spec.tenant!r} has used more than its "
                    f"{self._parts.quotas.rate_of(spec.tenant):g} tokens per second; try again in "
                    f"{retry_after_s:.1f} s"), retry_after_s)
        slots = max(0, self._parts.batching.free_slots(len(self._running)))
        if limits.max_requests is not None and len(self._waiting) + len(specs) > limits.max_requests + slots:
            return _Refusal(FinishReason.queue_full, (
                f"{len(self._waiting)} requests wait, {slots} more could start, this adds {len(specs)}, and the limit "
                f"is scheduler.admission.max_queue_requests={limits.max_requests}; try again later"))
        num_tokens = sum(len(spec.prompt_token_ids) for spec in specs)
        if limits.max_tokens is not None and self._num_waiting_tokens + num_tokens > limits.max_tokens:
            return _Refusal(FinishReason.queue_full, (
                f"{self._num_waiting_tokens} tokens wait, this adds {num_tokens}, and the limit is "
                f"scheduler.admission.max_queue_tokens={limits.max_tokens}; try again later"))
        return self._class_refusal(specs, slots)

    def _class_refusal(self, specs: Sequence[RequestSpec], slots: int) -> _Refusal | None:
        for priority, adds in Counter(spec.priority for spec in specs).items():
            limits = self._parts.limits.classes.get(priority)
            if limits is None or limits.max_requests is None:
                continue
            waiting = self._num_waiting_of[priority]
            if waiting + adds > limits.max_requests + slots:
                return _Refusal(FinishReason.queue_full, (
                    f"{waiting} requests of class {priority} wait, {slots} more could start, this adds {adds}, and the "
                    f"limit is scheduler.admission.classes.{priority}.max_queue_requests={limits.max_requests}; "
                    "try again later"))
        return None

    def _accept(self, request: Request, now: float) -> None:
        request.sequence_number = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._enqueue(request, now)
        limits, spec = self._parts.limits, request.spec
        self._set_deadline(request, FinishReason.queue_timeout, limits.queue_timeout_of(request.priority),
                           spec.queue_timeout_s)
        self._set_deadline(request, FinishReason.request_timeout, limits.request_timeout_s, spec.timeout_s)

    def _enqueue(self, request: Request, now: float) -> None:
        request.status = Status.waiting
        self._waiting.push(request, now)
        self._num_waiting_tokens += request.num_tokens
        self._num_waiting_of[request.priority] += 1

    def _leave_queue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting_tokens -= request.num_tokens
        self._num_waiting_of[request.priority] -= 1

    # Time.

    def _set_deadline(self, request: Request, reason: FinishReason, *timeouts_s: float | None) -> None:
        """The shortest of the timeouts that are set holds."""
        after_s = min((timeout_s for timeout_s in timeouts_s if timeout_s is not None), default=None)
        if after_s is not None:
            deadline = _Deadline(request.arrived_s + after_s, next(self._deadline_numbers), reason, request.request_id)
            heapq.heappush(self._deadlines, deadline)

    def _next_deadline(self) -> float | None:
        return self._deadlines[0].at_s if self._deadlines else None

    def _expire(self, now: float) -> list[Ending]:
        """Take out the requests whose time is up; those that may be late wait on behind the others."""
        ended = []
        while self._deadlines and self._deadlines[0].at_s <= now:
            _, _, reason, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None or (reason is FinishReason.queue_timeout and request.has_begun):
                continue
            if reason is FinishReason.queue_timeout and (
                    self._parts.limits.on_timeout_of(request.priority) is TimeoutAction.delay):
                self._leave_queue(request)
                request.is_late = True
                self._enqueue(request, now)
                continue
            self._retire([request], now)
            ended.append(Ending(request, reason, _timeout_message(reason, now - request.arrived_s)))
        return ended

    # Planning.

    def _assume_done(self, step: _Step) -> None:
        """Go on from a step that may still run as if it were booked, with a stand-in for each token that it samples."""
        assert step is self._steps[0], "two steps are planned and neither is booked"
        step.is_assumed = True
        self._kv.copies_done()
        for request, start, num_tokens, samples in step.plan.items:
            if request.status is not Status.running:
                continue  # It was aborted, or had ended with the step before.
            request.num_computed = start + num_tokens
            if samples:
                request.token_ids.append(UNKNOWN_TOKEN)

    def _without_last_tokens(self, decodes: Sequence[Request], draft: _Draft) -> list[Request]:
        """All but those that end with the step that still runs, whatever their last token is."""
        going_on = [request for request in decodes if len(request.token_ids) < request.max_total_tokens]
        draft.blocks_are_coming = len(going_on) < len(decodes)
        return going_on

    def _split_running(self) -> tuple[list[Request], list[Request]]:
        """Running requests that decode, and those with a part of their prompt, or of what they lost, to compute."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self._running:
            computed = request.num_computed
            is_decode = len(request.token_ids) - computed == 1 and computed >= request.num_prompt
            (decodes if is_decode else prompts).append(request)
        return decodes, prompts

    def _plan_decodes(self, decodes: Sequence[Request], draft: _Draft, now: float) -> None:
        """One token for each, with room for it; others give way where blocks run out.

        The usual victim is the request that the policy would serve last, be it the one that needs the room; so the
        first in order always advances, and nothing waits for ever.
        """
        block_size, grow, add = self._kv.block_size_tokens, self._kv.grow, draft.items.append
        waits = self._parts.preemption.waits_for_deadlock or draft.blocks_are_coming
        num_added = 0
        for request in decodes:
            if request.status is not Status.running:
                continue  # It has given way in this step.
            num_tokens = len(request.token_ids)
            if num_tokens > len(request.block_ids) * block_size and not grow(request, num_tokens):
                if waits or not self._make_room(request, num_tokens, draft, now):
                    continue
                add = draft.items.append  # Dropped items made it a new list.
            add(PlanItem(request, request.num_computed, 1, True))
            num_added += 1
        draft.budget -= num_added

    def _make_room(self, request: Request, num_tokens: int, draft: _Draft, now: float) -> bool:
        """Preempt others until the running request has its block; False when it had to give way itself."""
        while not self._kv.grow(request, num_tokens):
            draft.memory_ran_out = True
            if self._reclaim_paused(draft):
                continue
            victim = self._parts.preemption.victim(self._running, self._parts.policy)
            self._preempt(victim, draft, now)
            if victim is request:
                return False
        return True

    def _resolve_deadlock(self, decodes: Sequence[Request], draft: _Draft, now: float) -> None:
        """Where nobody gives way for a mere block: somebody does when no running request can go on."""
        waits = self._parts.preemption.waits_for_deadlock and not draft.blocks_are_coming
        while waits and not draft.items and self._running:
            self._plan_decodes(decodes, draft, now)  # Room may have been made for one that could not start after all.
            if draft.items or len(self._running) == 1:
                break
            self._preempt(self._parts.preemption.victim(self._running, self._parts.policy), draft, now)

    def _plan_prompts(self, prompts: Sequence[Request], draft: _Draft, now: float) -> Bound:
        """Chunks for running prompts, then new requests; returns what kept more from starting."""
        for request in prompts:
            if request.status is Status.running:
                self._plan_chunk(request, draft)
        return Bound.kv_blocks if draft.memory_ran_out else self._admit(draft, now)

    def _plan_chunk(self, request: Request, draft: _Draft) -> None:
        remaining = request.num_tokens - request.num_computed
        granted = self._parts.prefill.grant(remaining, draft.budget)
        if granted:
            draft.add(PlanItem(request, request.num_computed, granted, granted == remaining))

    def _admit(self, draft: _Draft, now: float) -> Bound:
        """Start waiting requests in the policy's order until something runs out; returns what did."""
        parts, num_passed_over = self._parts, 0
        openings = parts.batching.openings(self._waiting, self._running, now)
        draft.wake_s, slots = openings.wake_s, openings.slots
        displaced: list[Request] = []
        bound = Bound.nothing_waiting
        for request in self._waiting.in_order(now):
            has_slot = slots > 0 and parts.policy.may_start(request, self._running, slots)
            victim = None if has_slot else self._displaced_by(request, draft, now)
            if draft.budget == 0:
                bound = Bound.token_budget
            elif slots == 0 and victim is None:
                bound = openings.bound
            elif not (has_slot or victim) or not (openings.admit(request) and self._suits(request, draft)):
                num_passed_over += 1
                if num_passed_over < _LOOKAHEAD:
                    continue
            elif parts.prefill.grant(request.num_tokens - request.num_computed, draft.budget) == 0:
                bound = Bound.token_budget
            else:
                if victim is not None:
                    displaced.append(self._pause(victim, draft))
                    slots += 1
                if self._find_blocks(request, displaced, draft, now):
                    self._start(request, draft, now)
                    slots -= 1
                    continue
                bound = Bound.kv_blocks
            break
        for request in displaced:
            self._enqueue(request, now)
        if draft.started:
            parts.batching.started(draft.started)
        return Bound.policy if bound is Bound.nothing_waiting and num_passed_over else bound

    def _suits(self, request: Request, draft: _Draft) -> bool:
        """Whether prefill lets it start now, and no running request is computing what it could share."""
        parts = self._parts
        if not parts.prefill.suits(request, draft.items):
            return False
        shared = parts.share_in_batch_tokens
        return shared is None or request.has_begun or self._kv.awaited_tokens(request) < shared

    def _find_blocks(self, request: Request, displaced: list[Request], draft: _Draft, now: float) -> bool:
        """Give the request its blocks; paused requests, and running ones that it displaces, make room."""
        while True:
            copies = self._parts.admission.try_start(request, self._kv, self._holders(but=request))
            if copies is not None:
                draft.swap_in += copies
                return True
            if self._reclaim_paused(draft, sparing=request):
                continue
            victim = self._displaced_by(request, draft, now)
            if victim is None or not self._could_fit(request, draft, now):
                return False
            self._stop(victim, draft)
            self._evict(victim, draft)
            displaced.append(victim)

    def _holders(self, but: Request) -> Holders:
        return Holders(self._running, self._paused, but)

    def _could_fit(self, request: Request, draft: _Draft, now: float) -> bool:
        """Whether there would be blocks enough if everybody gave way whose place it may take."""
        displaces, num_before = self._parts.policy.displaces, len(self._running) - len(draft.started)
        given_up = sum(len(victim.block_ids) for victim in self._running[:num_before]
                       if displaces(request, victim, now))
        return self._kv.missing_blocks(request) <= self._kv.pool.num_free + given_up

    def _pause(self, victim: Request, draft: _Draft) -> Request:
        """Take a running request's slot and leave it its blocks."""
        self._stop(victim, draft)
        self._kv.pause(victim)
        self._paused.add(victim)
        draft.preempted.append(Preempted(victim, PreemptionKind.pause))
        self.stats.preemptions_by_kind[PreemptionKind.pause.value] += 1
        return victim

    def _displaced_by(self, request: Request, draft: _Draft, now: float) -> Request | None:
        """Whose place the request may take; nobody's who starts in this very step, with copies still to be made."""
        if draft.by_place is None:
            running = self._running[:len(self._running) - len(draft.started)]
            draft.by_place = sorted(running, key=self._parts.policy.place)
        while draft.by_place and draft.by_place[-1].status is not Status.running:
            draft.by_place.pop()
        victim = draft.by_place[-1] if draft.by_place else None
        return victim if victim is not None and self._parts.policy.displaces(request, victim, now) else None

    def _start(self, request: Request, draft: _Draft, now: float) -> None:
        self._leave_queue(request)
        self._paused.discard(request)
        request.status = Status.running
        self._running.append(request)
        draft.started.append(request)
        self._count_start(request, now)
        if request.scheduled_s is None:
            request.scheduled_s = now
        self._parts.policy.started(request, now)
        self._plan_chunk(request, draft)

    def _count_start(self, request: Request, now: float) -> None:
        stats, num_cached = self.stats, request.num_computed
        if not request.has_begun:
            request.num_cached_tokens = num_cached
            stats.prefix_queries += request.num_prompt
            stats.cached_tokens += num_cached
            for service in (stats.classes[request.priority], stats.tenants[request.tenant]):
                service.num_started += 1
                service.queue_s += now - request.arrived_s
                service.prompt_tokens += request.num_prompt
        stats.recomputed_tokens += max(0, request.num_lost - num_cached)
        request.num_lost = 0

    def _plan(self, draft: _Draft, ended: list[Ending], bound: Bound, now: float) -> Plan:
        self._parts.prefill.stepped(draft.items)
        self._parts.admission.stepped(draft.items)
        self.stats.swapped_out_blocks += len(draft.swap_out)
        self.stats.swapped_in_blocks += len(draft.swap_in)
        if draft.items:
            self.stats.num_steps += 1
            self.stats.bound[bound.value] += 1
        wakes = [wake_s for wake_s in (self._next_deadline(), draft.wake_s) if wake_s is not None]
        plan = Plan(items=tuple(draft.items), num_tokens=sum(item.num_tokens for item in draft.items),
                    preempted=tuple(draft.preempted), swap_out=tuple(draft.swap_out), swap_in=tuple(draft.swap_in),
                    ended=tuple(ended), bound=bound, wake_s=min(wakes, default=None))
        self._steps.append(_Step(plan, now))
        return plan

    # Giving way.

    def _preempt(self, victim: Request, draft: _Draft, now: float) -> None:
        """A running request gives up its slot and its blocks, and waits again."""
        self._stop(victim, draft)
        self._evict(victim, draft)
        self._enqueue(victim, now)
        self._parts.admission.preempted(self._running)

    def _stop(self, victim: Request, draft: _Draft) -> None:
        self._running.remove(victim)
        victim.status = Status.waiting
        victim.num_preemptions += 1
        self.stats.preemptions += 1
        draft.drop(victim)

    def _reclaim_paused(self, draft: _Draft, sparing: Request | None = None) -> bool:
        """Take the blocks of a paused request; False when there is none."""
        victim = self._paused.last(sparing)
        if victim is None:
            return False
        self._paused.discard(victim)
        self._evict(victim, draft)
        return True

    def _evict(self, victim: Request, draft: _Draft) -> None:
        eviction = self._parts.preemption.evict(victim, self._kv)
        draft.swap_out += eviction.copies
        draft.preempted.append(Preempted(victim, eviction.kind))
        self.stats.preemptions_by_kind[eviction.kind.value] += 1

    # Departure.

    def _retire(self, requests: Sequence[Request], now: float) -> None:
        """Take requests out wherever they are."""
        for request in requests:
            if request.status is Status.waiting:
                self._leave_queue(request)
                self._paused.discard(request)
            self._kv.release(request)
            request.status = Status.finished
            del self._requests[request.request_id]
            self._parts.policy.finished(request, now)
            self._parts.batching.ended(request)
        self._running = [request for request in self._running if request.status is Status.running]

    def _abort_held(self, request_ids: Sequence[RequestId], reason: FinishReason, message: str,
                    now: float) -> list[RequestEvent]:
        """End requests that are done and whose answers are still held back: nobody gets them any more."""
        done = [request_id for request_id in request_ids if request_id in self._held
                and self._held[request_id][-1].finish is not None]
        for request_id in done:
            del self._held[request_id]
        return [RequestEvent(request_id, finish=reason, message=message, at_s=now) for request_id in done]

    def _give_out(self, events: list[RequestEvent], now: float) -> list[RequestEvent]:
        """Hold events back until no request of the batch is left; one that ends by itself takes its own along."""
        given: list[RequestEvent] = []
        for event in events:
            held = self._held.setdefault(event.request_id, [])
            held.append(event)
            if not event.token_ids:
                given += self._held.pop(event.request_id)
        if not any(request.has_begun for request in self._requests.values()):
            given += [event for held in self._held.values() for event in held]
            self._held = {}
        return [event._replace(at_s=now) for event in given]


class _Refusal(NamedTuple):
    reason: FinishReason
    message: str
    retry_after_s: float | None = None


class _Deadline(NamedTuple):
    at_s: float
    number: int
    reason: FinishReason
    request_id: RequestId


def _timeout_message(reason: FinishReason, waited_s: float) -> str:
    if reason is FinishReason.queue_timeout:
        return (f"waited {waited_s:.1f} s without being started (scheduler.admission.queue_timeout_s); "
                "the server is overloaded, try again later")
    return f"not finished after {waited_s:.1f} s (scheduler.admission.request_timeout_s or the request's own limit)"


def _closing(request: Request, reason: FinishReason, message: str, now: float) -> RequestEvent:
    """The last event of a request that ends without a token."""
    return RequestEvent(request.request_id, finish=reason, message=message, scheduled_s=request.scheduled_s,
                        num_preemptions=request.num_preemptions, at_s=now)


def _append(request: Request, sampled: Sampled, now: float) -> RequestEvent:
    """Add the sampled token to the request; the event says whether it is the last."""
    token_id, logprobs = sampled
    request.token_ids.append(token_id)
    finish = None
    if token_id in request.stop_token_ids:
        finish = FinishReason.stop
    elif len(request.token_ids) >= request.max_total_tokens:
        finish = FinishReason.length
    scored = () if logprobs is None else (logprobs,)
    is_first = len(request.token_ids) == request.num_prompt + 1
    if finish is None and not is_first:
        return RequestEvent(request.request_id, (token_id,), scored, at_s=now)
    return RequestEvent(
        request.request_id, (token_id,), scored,
        finish=finish,
        stop_token_id=token_id if finish is FinishReason.stop else None,
        num_cached_tokens=request.num_cached_tokens if is_first else None,
        prompt_logprobs=_scores(request) if is_first else None,
        scheduled_s=request.scheduled_s if is_first else None,
        num_preemptions=request.num_preemptions,
        at_s=now)


def _keep_scores(request: Request, start: int, scored: Sequence[TokenLogprobs]) -> None:
    """`scored` begins with the token at `start + 1`; recomputation after a preemption scores some tokens again."""
    request.prompt_logprobs.extend(scored[len(request.prompt_logprobs) - start - 1:])


def _scores(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    return None if request.sampling.prompt_logprobs is None else tuple(request.prompt_logprobs)
