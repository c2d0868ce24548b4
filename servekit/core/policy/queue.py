"""Queues: waiting requests by rank. A policy says what the ranks are."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from servekit.core.request import Request, RequestId

Rank = tuple[float, ...]
"""Smaller is served sooner. Unequal for any two requests."""


class Queue(Protocol):
    """Waiting requests by rank."""

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...

    def push(self, request: Request, rank: Rank) -> None:
        """Add a request; its rank stays until it is removed."""

    def remove(self, request: Request) -> None:
        """Take a request out."""

    def in_order(self, now: float) -> Iterator[Request]:
        """The requests, next first, found as far as they are asked for.

        The one that was just yielded may be removed while the iteration goes on; nothing may be pushed.
        """

    def holds_back(self, request: Request, now: float) -> bool:
        """Whether this waiting request comes after others whatever its rank."""

    def check(self) -> None:
        """Raise AssertionError unless the queue agrees with itself."""


class Entry(NamedTuple):
    """A request in a heap."""

    rank: Rank
    number: int
    """Of the push that made the entry."""
    request: Request


class RequestHeap:
    """A heap of requests. Push, remove and the next request cost O(log n); removal is lazy."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._heap: list[Entry] = []
        self._number_of: dict[RequestId, int] = {}
        """The push that is valid for each member; other entries of the heap are left-overs."""

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._number_of

    def push(self, request: Request, rank: Rank) -> None:
        assert request not in self, f"{request} already waits"
        self._compact()
        entry = Entry(rank, next(self._numbers), request)
        self._number_of[request.request_id] = entry.number
        heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        del self._number_of[request.request_id]

    def first(self) -> Entry | None:
        """The entry with the smallest rank."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def entries(self) -> Iterator[Entry]:
        """The entries by rank, under the conditions of `Queue.in_order`."""
        heap, is_valid = self._heap, self._is_valid
        first = self.first()
        frontier = [(first, 0)] if first is not None else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            if is_valid(entry):
                yield entry
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def in_order(self, now: float) -> Iterator[Request]:
        return (entry.request for entry in self.entries())

    def holds_back(self, request: Request, now: float) -> bool:
        return False

    def check(self) -> None:
        valid = [entry.request.request_id for entry in self._heap if self._is_valid(entry)]
        assert sorted(valid) == sorted(self._number_of), "the heap does not hold each waiting request once"

    def _is_valid(self, entry: Entry) -> bool:
        return self._number_of.get(entry.request.request_id) == entry.number

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._number_of) + 64:
            self._heap = list(filter(self._is_valid, self._heap))
            heapq.heapify(self._heap)
