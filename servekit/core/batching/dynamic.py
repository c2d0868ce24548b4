"""Dynamic batching: batches are formed of what waits and run to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servekit.core.batching.base import Openings
from servekit.core.plan import Bound
from servekit.core.policy.base import Policy
from servekit.core.request import Request, RequestId


class DynamicBatching:
    """The batching rules of the Triton inference server's dynamic batcher (schedule policy of its core).

    A batch is formed of the first requests in the policy's order that may share one (`Policy.batch_of`). It starts
    with the largest preferred number of them that is there; or, when that many are not there, with all of them as
    soon as nobody else can join or the one that waits longest has waited for `max_delay_s`. After that time it starts
    with all of them even where a preferred number would be smaller. Up to `batches_in_flight` batches run at once.

    A batch is what starts in one step: memory or the step's token budget can make it smaller. Nobody joins it later,
    and the places of its requests stay empty as they end. One that is preempted remains its member and has its place
    to come back to; until it is back, no other batch starts.
    """

    holds_answers: bool = False

    def __init__(self, batch_size: int, batches_in_flight: int, preferred_sizes: Sequence[int],
                 max_delay_s: float) -> None:
        self._batch_size = batch_size
        self._batches_in_flight = batches_in_flight
        self._preferred_sizes = tuple(preferred_sizes) or (batch_size,)
        self._max_delay_s = max_delay_s
        self._batches: list[set[RequestId]] = []
        """The requests of each batch that runs, but those that have ended."""

    def free_slots(self, num_running: int) -> int:
        free_batches = self._batches_in_flight - len(self._batches)
        return free_batches * self._batch_size + self._num_preempted(num_running)

    def openings(self, waiting: Policy, running: Sequence[Request], now: float) -> Openings:
        num_preempted = self._num_preempted(len(running))
        if num_preempted > 0:
            return Openings(num_preempted, Bound.batching, only=self._members())
        if len(self._batches) == self._batches_in_flight or len(waiting) == 0:
            return Openings(0, Bound.batching)
        return self._form(_next_batch(waiting, self._batch_size, now), now)

    def started(self, requests: Sequence[Request]) -> None:
        new = {request.request_id for request in requests} - self._members()
        if new:
            self._batches.append(new)

    def ended(self, request: Request) -> None:
        for batch in self._batches:
            batch.discard(request.request_id)
        self._batches = list(filter(None, self._batches))

    def _form(self, queued: _Queued, now: float) -> Openings:
        due_s = min(request.arrived_s for request in queued.requests) + self._max_delay_s
        is_overdue = self._max_delay_s > 0 and now >= due_s
        num_queued = len(queued.requests)
        preferred = max((size for size in self._preferred_sizes if size <= num_queued), default=None)
        if preferred is not None and not is_overdue:
            return self._start(queued.requests[:preferred])
        if queued.is_complete or is_overdue or self._max_delay_s == 0:
            return self._start(queued.requests)
        return Openings(0, Bound.batching, wake_s=due_s)

    def _start(self, batch: Sequence[Request]) -> Openings:
        bound = Bound.sequences if len(batch) == self._batch_size else Bound.batching
        return Openings(len(batch), bound, only=frozenset(request.request_id for request in batch))

    def _members(self) -> frozenset[RequestId]:
        return frozenset().union(*self._batches)

    def _num_preempted(self, num_running: int) -> int:
        """Members that do not run now; whatever runs is a member."""
        return sum(map(len, self._batches)) - num_running


@dataclass(frozen=True, slots=True)
class _Queued:
    """The requests that the next batch may hold."""

    requests: list[Request]
    is_complete: bool
    """Nobody else can join: the batch is full, or the next in order belongs to another one."""


def _next_batch(waiting: Policy, batch_size: int, now: float) -> _Queued:
    requests: list[Request] = []
    for request in waiting.in_order(now):
        if requests and waiting.batch_of(request) != waiting.batch_of(requests[0]):
            return _Queued(requests, is_complete=True)
        requests.append(request)
        if len(requests) == batch_size:
            return _Queued(requests, is_complete=True)
    return _Queued(requests, is_complete=False)
