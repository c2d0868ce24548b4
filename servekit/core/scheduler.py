"""The scheduler: decides what each step computes, and keeps the books of what came of it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servekit.core.admission import Admission, QueueLimits
from servekit.core.batching import Batching
from servekit.core.kv import KVManager
from servekit.core.plan import Bound, Ending, Plan, PlanItem, Sampled, StepResult
from servekit.core.policy import Policy, WaitingQueue, last_in_order
from servekit.core.preemption import Preemption
from servekit.core.prefill import Prefill
from servekit.core.request import (
    FinishReason,
    Request,
    RequestEvent,
    RequestId,
    RequestSpec,
    Status,
    TokenLogprobs,
)
from servekit.core.stats import SchedulerStats


@dataclass(frozen=True)
class Components:
    """The named parts a scheduler is assembled from (core/build.py makes them from a configuration)."""

    batching: Batching
    policy: Policy
    prefill: Prefill
    preemption: Preemption
    admission: Admission
    limits: QueueLimits


class Scheduler:
    """Requests in, plans out, results in, events out.

    There are no phases: each running request has tokens whose keys and values are not computed yet, one when it
    decodes and many when it is new, resumed or in the middle of its prompt, and a plan is an ordered list of
    (request, number of tokens). Decodes are charged first, then running prompts, then new requests.

    The caller passes the time, in seconds on any clock that never goes back. Every accepted request ends with
    exactly one event that has a `finish`; so does every refused one.
    """

    def __init__(self, components: Components, kv: KVManager, max_step_tokens: int, max_model_len: int) -> None:
        self._parts = components
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue(components.policy)
        self._running: list[Request] = []
        """In order of admission."""
        self._num_waiting_tokens = 0
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
        return bool(self._requests)

    @property
    def kv(self) -> KVManager:
        return self._kv

    # Arrival and departure, between steps.

    def add(self, specs: Sequence[RequestSpec], now: float) -> list[RequestEvent]:
        """Queue requests, all or none. Returns one refusal for each of them, or nothing when they are accepted."""
        for spec in specs:
            assert spec.request_id not in self._requests, f"request id {spec.request_id} is in use"
        refusal = self._refusal(specs)
        if refusal is not None:
            reason, message = refusal
            self.stats.refused[reason.value] += len(specs)
            return [RequestEvent(spec.request_id, finish=reason, message=message, at_s=now) for spec in specs]
        for spec in specs:
            self._accept(Request(spec, self._max_model_len))
        return []

    def abort(self, request_ids: Iterable[RequestId], now: float, reason: FinishReason = FinishReason.abort,
              message: str = "") -> list[RequestEvent]:
        """End requests wherever they are and free what they hold; ids that are not here are ignored."""
        found = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        for request in found:
            self._remove(request)
        return [_closing(request, reason, message, now) for request in found]

    def abort_all(self, now: float, reason: FinishReason, message: str) -> list[RequestEvent]:
        """End every request that is here."""
        return self.abort(list(self._requests), now, reason, message)

    # A step.

    def schedule(self, now: float) -> Plan:
        """Decide the next step at time `now`: what is computed, who gives way, who is out of time."""
        ended = self._expire(now)
        decodes, prompts, preempted = self._secure_running()
        budget = self._max_step_tokens - len(decodes)
        items = [PlanItem(request, request.num_computed, 1, True) for request in decodes]
        budget -= self._plan_prompts(prompts, budget, items)
        bound = Bound.kv_blocks if preempted else self._admit(budget, items, now)
        if items:
            self.stats.num_steps += 1
            self.stats.bound[bound.value] += 1
        return Plan(items=tuple(items), num_tokens=sum(item.num_tokens for item in items),
                    preempted=tuple(preempted), ended=tuple(ended), bound=bound, wake_s=self._next_deadline())

    def update(self, plan: Plan, result: StepResult, now: float) -> list[RequestEvent]:
        """Book what the executor computed for `plan` by time `now`; returns what the clients get to hear."""
        events = [_closing(*ending, now) for ending in plan.ended]
        stats, register, sampled_by = self.stats, self._kv.register, result.sampled
        num_sampled = num_prompt_tokens = 0
        finished: list[Request] = []
        for request, start, num_tokens, samples in plan.items:
            if request.status is not Status.running:
                continue  # It was aborted while the step ran.
            request.num_computed = start + num_tokens
            if num_tokens > 1 or start < request.num_prompt:
                num_prompt_tokens += num_tokens
            if result.failed and request.request_id in result.failed:
                events.append(_closing(request, FinishReason.error, result.failed[request.request_id], now))
                finished.append(request)
                continue
            register(request)
            if result.prompt_logprobs and request.request_id in result.prompt_logprobs:
                _keep_scores(request, start, result.prompt_logprobs[request.request_id])
            if samples:
                num_sampled += 1
                event = _append(request, sampled_by[request.request_id], now)
                events.append(event)
                if event.finish is not None:
                    finished.append(request)
        stats.generation_tokens += num_sampled
        stats.prompt_tokens += num_prompt_tokens
        if finished:
            self._retire(finished)
        return events

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
            assert not request.block_ids, f"{request} waits and holds blocks"
        assert len(waiting) + len(self._running) == len(self._requests), "a request is neither waiting nor running"
        assert self._num_waiting_tokens == sum(request.num_tokens for request in waiting), "waiting tokens drift"
        self._kv.check(self._running)

    # Arrival.

    def _refusal(self, specs: Sequence[RequestSpec]) -> tuple[FinishReason, str] | None:
        limits = self._parts.limits
        for spec in specs:
            if len(spec.prompt_token_ids) >= self._max_model_len:
                return FinishReason.too_long, (
                    f"the prompt has {len(spec.prompt_token_ids)} tokens and the model's length is "
                    f"{self._max_model_len}, prompt and output together; shorten the prompt")
        slots = max(0, self._parts.batching.free_slots(len(self._running)))
        if limits.max_requests is not None and len(self._waiting) + len(specs) > limits.max_requests + slots:
            return FinishReason.queue_full, (
                f"{len(self._waiting)} requests wait, {slots} more could start, this adds {len(specs)}, and the limit "
                f"is scheduler.admission.max_queue_requests={limits.max_requests}; try again later")
        num_tokens = sum(len(spec.prompt_token_ids) for spec in specs)
        if limits.max_tokens is not None and self._num_waiting_tokens + num_tokens > limits.max_tokens:
            return FinishReason.queue_full, (
                f"{self._num_waiting_tokens} tokens wait, this adds {num_tokens}, and the limit is "
                f"scheduler.admission.max_queue_tokens={limits.max_tokens}; try again later")
        return None

    def _accept(self, request: Request) -> None:
        request.sequence_number = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._enqueue(request)
        limits = self._parts.limits
        if limits.queue_timeout_s is not None:
            self._set_deadline(request, limits.queue_timeout_s, FinishReason.queue_timeout)
        timeouts = [t for t in (limits.request_timeout_s, request.spec.timeout_s) if t is not None]
        if timeouts:
            self._set_deadline(request, min(timeouts), FinishReason.request_timeout)

    def _enqueue(self, request: Request) -> None:
        request.status = Status.waiting
        self._waiting.push(request)
        self._num_waiting_tokens += request.num_tokens

    def _dequeue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting_tokens -= request.num_tokens

    # Time.

    def _set_deadline(self, request: Request, after_s: float, reason: FinishReason) -> None:
        deadline = _Deadline(request.arrived_s + after_s, next(self._deadline_numbers), reason, request.request_id)
        heapq.heappush(self._deadlines, deadline)

    def _next_deadline(self) -> float | None:
        return self._deadlines[0].at_s if self._deadlines else None

    def _expire(self, now: float) -> list[Ending]:
        """Take out the requests whose time is up."""
        ended = []
        while self._deadlines and self._deadlines[0].at_s <= now:
            _, _, reason, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None or (reason is FinishReason.queue_timeout and request.scheduled_s is not None):
                continue
            self._remove(request)
            ended.append(Ending(request, reason, _timeout_message(reason, now - request.arrived_s)))
        return ended

    # Planning.

    def _secure_running(self) -> tuple[list[Request], list[Request], list[Request]]:
        """Split the running requests into decodes, each with room for its token, and prompts; preempt for room.

        Returns decodes, prompts, preempted. The victim is the request that the policy would serve last, be it the
        one that needs the room; so the first in order always advances, and nothing waits for ever.
        """
        block_size, grow = self._kv.block_size_tokens, self._kv.grow
        decodes: list[Request] = []
        prompts: list[Request] = []
        preempted: list[Request] = []
        for request in list(self._running):
            if preempted and request.status is not Status.running:
                continue
            num_tokens = len(request.token_ids)
            if num_tokens - request.num_computed > 1:
                prompts.append(request)
                continue
            while num_tokens > len(request.block_ids) * block_size and not grow(request, num_tokens):
                victim = last_in_order(self._parts.policy, self._running)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                decodes.append(request)
        if preempted:
            decodes = [request for request in decodes if request.status is Status.running]
            prompts = [request for request in prompts if request.status is Status.running]
        return decodes, prompts, preempted

    def _preempt(self, victim: Request) -> None:
        self._running.remove(victim)
        self._parts.preemption.preempt(victim, self._kv)
        victim.num_preemptions += 1
        self.stats.preemptions += 1
        self._enqueue(victim)

    def _plan_prompts(self, prompts: list[Request], budget: int, items: list[PlanItem]) -> int:
        """Give running prompts their chunks; returns the tokens used."""
        used = 0
        for request in prompts:
            used += self._plan_chunk(request, budget - used, items)
        return used

    def _plan_chunk(self, request: Request, budget: int, items: list[PlanItem]) -> int:
        remaining = request.num_tokens - request.num_computed
        granted = self._parts.prefill.grant(remaining, budget)
        if granted:
            items.append(PlanItem(request, request.num_computed, granted, granted == remaining))
        return granted

    def _admit(self, budget: int, items: list[PlanItem], now: float) -> Bound:
        """Start waiting requests in the policy's order until something runs out; returns what did."""
        slots = self._parts.batching.free_slots(len(self._running))
        while (request := self._waiting.peek()) is not None:
            if slots == 0:
                return Bound.sequences
            if budget == 0 or self._parts.prefill.grant(request.num_tokens, budget) == 0:
                return Bound.token_budget
            if not self._parts.admission.try_start(request, self._kv, len(self._running)):
                return Bound.kv_blocks
            self._start(request, now)
            slots -= 1
            budget -= self._plan_chunk(request, budget, items)
        return Bound.token_budget if budget == 0 else Bound.nothing_waiting

    def _start(self, request: Request, now: float) -> None:
        self._dequeue(request)
        request.status = Status.running
        self._running.append(request)
        stats, num_cached = self.stats, request.num_computed
        if request.scheduled_s is None:
            request.scheduled_s = now
            request.num_cached_tokens = num_cached
            stats.prefix_queries += request.num_prompt
            stats.cached_tokens += num_cached
        stats.recomputed_tokens += max(0, request.num_lost - num_cached)
        request.num_lost = 0

    # Departure.

    def _remove(self, request: Request) -> None:
        """Take a request out wherever it is."""
        if request.status is Status.waiting:
            self._dequeue(request)
        self._retire([request])

    def _retire(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._kv.release(request)
            request.status = Status.finished
            del self._requests[request.request_id]
        self._running = [request for request in self._running if request.status is Status.running]


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
