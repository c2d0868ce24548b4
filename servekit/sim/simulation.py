"""The engine's loop on a virtual clock: the same scheduler, with a model of step times in the executor's place."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from servekit.core.plan import Plan, Sampled, StepResult
from servekit.core.request import FinishReason, Request, RequestEvent, RequestId, RequestSpec, SamplingParams
from servekit.core.scheduler import Scheduler
from servekit.load.driver import Limits
from servekit.load.records import RequestRecord
from servekit.load.target import Failure, FailureKind
from servekit.load.workload import WorkloadRequest
from servekit.sim.step_time import StepTimeModel, step_shape

_ANSWER, _LAST = Sampled(0), Sampled(1)
"""What every simulated request samples, but for its last token. Only the number of tokens matters."""

StepObserver = Callable[[Plan, float, float], None]
"""Hears of every step: its plan, its start and its end, in seconds."""


class SimulatedExecutor:
    """Answers plans at once, and says how long a device would have taken."""

    def __init__(self, step_time: StepTimeModel, lengths: Mapping[RequestId, int]) -> None:
        """`lengths`: the tokens, prompt and output together, that each request is to end with."""
        self._step_time = step_time
        self._lengths = lengths

    def execute(self, plan: Plan) -> tuple[StepResult, float]:
        """The plan's result, and the seconds that the step takes."""
        sampled = {item.request.request_id: self._next(item.request) for item in plan.items if item.samples}
        return StepResult(sampled), self._step_time.step_s(step_shape(plan))

    def _next(self, request: Request) -> Sampled:
        return _LAST if len(request.token_ids) + 1 == self._lengths[request.request_id] else _ANSWER


class Simulation:
    """One run of a workload through a scheduler. Not to be run twice.

    Requests enter when they are due and every answer has the wanted length. Time passes only in steps and while
    nothing can be computed. The memory it takes does not grow with the workload: requests are made when they are
    due, and a record is given out when its request ends.
    """

    def __init__(self, requests: Iterable[WorkloadRequest], scheduler: Scheduler, step_time: StepTimeModel,
                 limits: Limits, observer: StepObserver | None = None, max_tokens: int | None = None) -> None:
        """`max_tokens`: the limit that every request states, whatever it wants; None: the length that it wants, which
        tells the scheduler how long the answer will be, as `servekit bench` does."""
        self.now_s = 0.0
        self.num_steps = 0
        self._scheduler = scheduler
        self._lengths: dict[RequestId, int] = {}
        self._executor = SimulatedExecutor(step_time, self._lengths)
        self._max_tokens = max_tokens
        self._limits = limits
        self._observer = observer
        self._requests: Iterator[WorkloadRequest] = islice(requests, limits.total_requests)
        self._next = next(self._requests, None)
        self._open: dict[RequestId, _OpenRecord] = {}
        self._num_sent = 0
        self._ended: list[RequestRecord] = []

    def run(self) -> Iterator[RequestRecord]:
        """Yield the record of each request when it ends."""
        while self._deliver() or self._scheduler.has_requests or self._next is not None:
            self._step()
            yield from self._ended
            self._ended.clear()
        yield from self._ended

    def _step(self) -> None:
        plan = self._scheduler.schedule(self.now_s)
        result, duration_s = self._executor.execute(plan) if plan.has_work else (StepResult({}), 0.0)
        started_s, self.now_s = self.now_s, self.now_s + duration_s
        self._hear(self._scheduler.update(plan, result, self.now_s))
        if plan.has_work:
            self.num_steps += 1
            if self._observer is not None:
                self._observer(plan, started_s, self.now_s)
        elif not plan.ended:
            self._sleep(plan.wake_s)

    def _sleep(self, wake_s: float | None) -> None:
        """Nothing can be computed: the clock moves on to the next arrival or to what the scheduler waits for."""
        arrival_s = None if self._next is None else self._next.arrival_s
        times_s = [at_s for at_s in (wake_s, arrival_s) if at_s is not None]
        assert times_s or self._open, "nothing is here, nothing comes, and the run goes on"
        assert times_s, "requests wait for nothing"
        self.now_s = max(self.now_s, min(times_s))

    def _deliver(self) -> bool:
        """Hand over what is due; whether anything was."""
        num_before = self._num_sent
        while self._next is not None and self._is_due(self._next):
            request, self._next = self._next, next(self._requests, None)
            self._send(request)
        return self._num_sent > num_before

    def _is_due(self, request: WorkloadRequest) -> bool:
        limits = self._limits
        at_s = self.now_s if request.arrival_s is None else request.arrival_s
        if limits.duration_s is not None and at_s >= limits.duration_s:
            self._next, self._requests = None, iter(())
            return False
        return len(self._open) < limits.concurrency if limits.concurrency is not None else at_s <= self.now_s

    def _send(self, request: WorkloadRequest) -> None:
        intended_s = self.now_s if request.arrival_s is None else request.arrival_s
        spec = request_spec(request, intended_s, self._limits.timeout_s, self._max_tokens)
        self._lengths[spec.request_id] = len(spec.prompt_token_ids) + request.output_tokens
        self._open[spec.request_id] = _OpenRecord(request, intended_s, self._num_sent < self._limits.warmup_requests)
        self._num_sent += 1
        self._hear(self._scheduler.add([spec], self.now_s))

    def _hear(self, events: Iterable[RequestEvent]) -> None:
        for event in events:
            record = self._open[event.request_id]
            record.hear(event)
            if event.finish is not None:
                del self._open[event.request_id], self._lengths[event.request_id]
                self._ended.append(record.closed(event, self.now_s))


def request_spec(request: WorkloadRequest, arrived_s: float, timeout_s: float | None = None,
                 max_tokens: int | None = None) -> RequestSpec:
    """What the server would make of a workload's request. With `max_tokens`, its answer is one that ends by itself."""
    sampling = (SamplingParams(max_tokens=request.output_tokens, temperature=0.0) if max_tokens is None else
                SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(_LAST.token_id,)))
    return RequestSpec(
        RequestId(str(request.index)), tuple(request.prompt_token_ids), sampling, arrived_s, tenant=request.tenant,
        priority=request.priority or 0, timeout_s=timeout_s, predicted_output_tokens=request.predicted_output_tokens)


class _OpenRecord:
    """A request that has been sent and has not ended."""

    __slots__ = ("_cached_tokens", "_intended_s", "_is_warmup", "_num_prompt_tokens", "_request", "_times_s")

    def __init__(self, request: WorkloadRequest, intended_s: float, is_warmup: bool) -> None:
        self._request = request
        self._intended_s = intended_s
        self._is_warmup = is_warmup
        self._times_s = array("d")
        self._cached_tokens: int | None = None

    def hear(self, event: RequestEvent) -> None:
        self._times_s.extend(event.at_s for _ in event.token_ids)
        if event.num_cached_tokens is not None:
            self._cached_tokens = event.num_cached_tokens

    def closed(self, event: RequestEvent, ended_s: float) -> RequestRecord:
        request, reason = self._request, event.finish
        assert reason is not None
        ended_well = reason in (FinishReason.stop, FinishReason.length)
        num_prompt = len(request.prompt_token_ids)
        return RequestRecord(
            index=request.index, tenant=request.tenant, is_warmup=self._is_warmup,
            wanted_prompt_tokens=num_prompt, wanted_output_tokens=request.output_tokens,
            intended_s=self._intended_s, sent_s=self._intended_s, ended_s=ended_s,
            chunk_times_s=self._times_s, chunk_tokens=array("q", [1]) * len(self._times_s),
            prompt_tokens=num_prompt, output_tokens=len(self._times_s), cached_tokens=self._cached_tokens,
            finish_reason=reason.value,
            failure=None if ended_well else Failure(FailureKind.incomplete, f"{reason.value}: {event.message}"),
            priority=request.priority, predicted_output_tokens=request.predicted_output_tokens)
