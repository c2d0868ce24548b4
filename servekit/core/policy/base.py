"""Policies: which waiting request is served next, and which running one gives way.

A policy owns the waiting requests. Most are a key (`KeyedPolicy`): the smallest is served first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from servekit.core.plan import PlanItem
from servekit.core.policy.queue import Queue, Rank
from servekit.core.request import Request


class Policy(Protocol):
    """The waiting requests, the order in which they are served, and what running ones have to yield to."""

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...

    def push(self, request: Request, now: float) -> None:
        """The request begins to wait, or waits again after a preemption."""

    def remove(self, request: Request) -> None:
        """The request waits no longer: it starts, or it is gone."""

    def in_order(self, now: float) -> Iterator[Request]:
        """Waiting requests, next first, found as far as they are asked for.

        The one that was just yielded may be removed while the iteration goes on; nothing may be pushed. Requests
        that have begun come before those that have not, unless the policy ranks running requests too and lets those
        of a lower rank give way (priority, srtf, mlfq).
        """

    def place(self, request: Request) -> Rank:
        """Where a request that has begun is among its like: the larger, the later the policy would serve it."""

    def last(self, requests: Sequence[Request]) -> Request:
        """Whom of these the policy would serve last: the usual victim of a preemption."""

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        """Whether a waiting request may take the place of a running one. Never true both ways round."""

    def may_start(self, candidate: Request, running: Sequence[Request], free_slots: int) -> bool:
        """Whether it may start in one of these free slots; if not, it may take a place, and those behind may start."""

    def batch_of(self, request: Request) -> Hashable:
        """Batches that are formed as a whole (static, dynamic) hold requests of one value only."""

    def started(self, request: Request, now: float) -> None:
        """The request has left the queue and runs, for the first time or again."""

    def stepped(self, items: Sequence[PlanItem], duration_s: float, now: float) -> None:
        """A step has computed these items; requests that sampled have their new token."""

    def finished(self, request: Request, now: float) -> None:
        """The request has ended, for whatever reason; it may have waited or run."""

    def check(self) -> None:
        """Raise AssertionError unless the queue agrees with itself."""


class PolicyDefaults:
    """What most policies answer: the newest gives way to memory's needs but to no other request, any request may
    start, nothing is kept count of.
    """

    def place(self, request: Request) -> Rank:
        return (request.sequence_number,)

    def last(self, requests: Sequence[Request]) -> Request:
        return max(requests, key=self.place)

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        return False

    def may_start(self, candidate: Request, running: Sequence[Request], free_slots: int) -> bool:
        return True

    def batch_of(self, request: Request) -> Hashable:
        return None

    def started(self, request: Request, now: float) -> None:
        pass

    def stepped(self, items: Sequence[PlanItem], duration_s: float, now: float) -> None:
        pass

    def finished(self, request: Request, now: float) -> None:
        pass


class KeyedPolicy(PolicyDefaults, ABC):
    """A policy that is a key: smaller is served sooner. A request is ranked by the key it has when it begins to wait.

    Push, remove and the next request cost O(log n).
    """

    begun_first = True
    """Whether requests that have begun come before all others."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    @abstractmethod
    def key(self, request: Request) -> Rank:
        """Smaller is served sooner. Unequal for any two requests."""

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue

    def push(self, request: Request, now: float) -> None:
        key = self.key(request)
        self._queue.push(request, (not request.has_begun, *key) if self.begun_first else key)

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def in_order(self, now: float) -> Iterator[Request]:
        return self._queue.in_order(now)

    def place(self, request: Request) -> Rank:
        return self.key(request)

    def check(self) -> None:
        self._queue.check()
