"""Policies: in which order requests are served. A policy is a key; the smallest is served first.

To add one: a class with a `key`, its configuration in config/schema.py, and one line in core/build.py.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

from servekit.core.request import Request, RequestId

PolicyKey = tuple[float, ...]


class Policy(Protocol):
    """An order over requests."""

    def key(self, request: Request) -> PolicyKey:
        """Smaller is served sooner. Fixed while a request waits; unequal for any two requests."""


class FifoPolicy:
    """First come, first served. A preempted request keeps its place before all later arrivals."""

    def key(self, request: Request) -> PolicyKey:
        return (request.sequence_number,)


class WaitingQueue:
    """Waiting requests in a policy's order. Push, pop and remove cost O(log n); removal is lazy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pushes = itertools.count()
        self._heap: list[tuple[PolicyKey, int, Request]] = []
        self._push_of: dict[RequestId, int] = {}
        """Number of the push that is valid for each member; other heap entries are left-overs."""

    def __len__(self) -> int:
        return len(self._push_of)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._push_of

    def push(self, request: Request) -> None:
        assert request not in self, f"{request} already waits"
        push = next(self._pushes)
        self._push_of[request.request_id] = push
        heapq.heappush(self._heap, (self._policy.key(request), push, request))

    def peek(self) -> Request | None:
        """The next request, or None when none waits."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._push_of[request.request_id]
        if len(self._heap) > 2 * len(self._push_of) + 64:
            self._heap = list(filter(self._is_valid, self._heap))
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[PolicyKey, int, Request]) -> bool:
        return self._push_of.get(entry[2].request_id) == entry[1]


def last_in_order(policy: Policy, requests: Sequence[Request]) -> Request:
    """The request that the policy would serve last: the victim of a preemption."""
    return max(requests, key=policy.key)
