"""Policies: which waiting request is served next, and which running one gives way.

A policy owns the waiting requests. Most are a key (`KeyedPolicy`): the smallest is served first.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from servekit.core.plan import PlanItem
from servekit.core.request import Request, RequestId

PolicyKey = tuple[float, ...]


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
        that have begun come before those that have not, unless the policy is preemptive.
        """

    def last(self, requests: Sequence[Request]) -> Request:
        """Whom of these the policy would serve last: the usual victim of a preemption."""

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        """Whether a waiting request may take the place of a running one. Never true both ways round."""

    def may_start(self, candidate: Request, running: Sequence[Request], free_slots: int) -> bool:
        """Whether it may start now, with one of these slots; if not, those behind it may."""

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


class KeyedPolicy(ABC):
    """A policy that is a key: smaller is served sooner. The key is fixed while a request waits.

    Push, remove and the next request cost O(log n); removal is lazy. The rest of `Policy` is that of a policy that
    never takes a running request's place.
    """

    def __init__(self, *, begun_first: bool = True) -> None:
        self._begun_first = begun_first
        self._pushes = itertools.count()
        self._heap: list[tuple[PolicyKey, int, Request]] = []
        self._push_of: dict[RequestId, int] = {}
        """Number of the push that is valid for each member; other heap entries are left-overs."""

    @abstractmethod
    def key(self, request: Request) -> PolicyKey:
        """Smaller is served sooner. Unequal for any two requests."""

    def __len__(self) -> int:
        return len(self._push_of)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._push_of

    def push(self, request: Request, now: float) -> None:
        assert request not in self, f"{request} already waits"
        self._compact()
        push = next(self._pushes)
        self._push_of[request.request_id] = push
        heapq.heappush(self._heap, (self._rank(request), push, request))

    def remove(self, request: Request) -> None:
        del self._push_of[request.request_id]

    def in_order(self, now: float) -> Iterator[Request]:
        heap, is_valid = self._heap, self._is_valid
        while heap and not is_valid(heap[0]):
            heapq.heappop(heap)
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            if is_valid(entry):
                yield entry[2]
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def last(self, requests: Sequence[Request]) -> Request:
        return max(requests, key=self.key)

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        return False

    def may_start(self, candidate: Request, running: Sequence[Request], free_slots: int) -> bool:
        return True

    def batch_of(self, request: Request) -> Hashable:
        return None

    def started(self, request: Request, now: float) -> None:  # noqa: B027 - most policies need no such hook
        pass

    def stepped(self, items: Sequence[PlanItem], duration_s: float, now: float) -> None:  # noqa: B027 - most policies need no such hook
        pass

    def finished(self, request: Request, now: float) -> None:  # noqa: B027 - most policies need no such hook
        pass

    def check(self) -> None:
        valid = [entry[2].request_id for entry in self._heap if self._is_valid(entry)]
        assert sorted(valid) == sorted(self._push_of), "the heap does not hold each waiting request once"

    def _rank(self, request: Request) -> PolicyKey:
        return (not request.has_begun, *self.key(request)) if self._begun_first else self.key(request)

    def _is_valid(self, entry: tuple[PolicyKey, int, Request]) -> bool:
        return self._push_of.get(entry[2].request_id) == entry[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._push_of) + 64:
            self._heap = list(filter(self._is_valid, self._heap))
            heapq.heapify(self._heap)
