"""Priority classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.queue import Queue, Rank
from servekit.core.request import Request, RequestId


class PriorityPolicy(KeyedPolicy):
    """Better classes first (lower numbers); within a class, in order of arrival, preempted requests before new ones.

    A waiting request displaces running ones of a strictly lower class, the newest of the lowest first, so equal
    classes never take each other's place.

    With ageing, a class is worth `ageing_s` seconds of waiting: a request is served before those of the next better
    class that arrive more than that after it. Ageing changes the order of the queue and displaces nobody.
    """

    begun_first = False

    def __init__(self, queue: Queue, preempt: bool, class_slots: Mapping[int, int], own_batches: bool,
                 ageing_s: float | None) -> None:
        super().__init__(queue)
        self._preempt = preempt
        self._class_slots = class_slots
        self._own_batches = own_batches
        self._ageing_s = ageing_s
        self._running: set[RequestId] = set()
        self._num_running_of: Counter[int] = Counter()
        """Running requests by class."""

    def key(self, request: Request) -> Rank:
        if self._ageing_s is not None:
            return (request.priority * self._ageing_s + request.arrived_s, request.sequence_number)
        return (request.priority, not request.has_begun, request.is_late, request.sequence_number)

    def place(self, request: Request) -> Rank:
        return (request.priority, request.sequence_number)

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        return (self._preempt and candidate.priority < victim.priority
                and not self._queue.holds_back(candidate, now))

    def may_start(self, candidate: Request, running: Sequence[Request], free_slots: int) -> bool:
        kept = sum(max(0, slots - self._num_running_of[priority])
                   for priority, slots in self._class_slots.items() if priority < candidate.priority)
        return free_slots > kept

    def batch_of(self, request: Request) -> Hashable:
        return request.priority if self._own_batches else None

    def push(self, request: Request, now: float) -> None:
        self._stopped(request)
        super().push(request, now)

    def started(self, request: Request, now: float) -> None:
        self._running.add(request.request_id)
        self._num_running_of[request.priority] += 1

    def finished(self, request: Request, now: float) -> None:
        self._stopped(request)

    def check(self) -> None:
        super().check()
        assert len(self._running) == self._num_running_of.total(), "running classes drift"

    def _stopped(self, request: Request) -> None:
        """The request runs no longer, if it did."""
        if request.request_id in self._running:
            self._running.remove(request.request_id)
            self._num_running_of[request.priority] -= 1
