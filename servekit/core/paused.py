"""Paused requests: they lost their slot to a better one and kept their blocks, for as long as nobody needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from servekit.core.policy.base import Policy
from servekit.core.policy.queue import Entry, Rank, RequestHeap
from servekit.core.request import Request


class PausedRequests:
    """Waiting requests with blocks on the device, by the policy's order: the last one's blocks are taken first.

    Adding, discarding and finding the last cost O(log n).
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap = RequestHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request in self._heap

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._heap.entries())

    def add(self, request: Request) -> None:
        self._heap.push(request, self._last_first(request))

    def discard(self, request: Request) -> None:
        if request in self._heap:
            self._heap.remove(request)

    def last(self, sparing: Request | None = None) -> Request | None:
        """Whom of them, but for the one spared, the policy would serve last."""
        while (entry := self._latest(sparing)) is not None:
            rank = self._last_first(entry.request)
            if rank == entry.rank:
                return entry.request
            self._heap.remove(entry.request)  # The policy has moved it since, for instance because it starved.
            self._heap.push(entry.request, rank)
        return None

    def _latest(self, sparing: Request | None) -> Entry | None:
        return next((entry for entry in self._heap.entries() if entry.request is not sparing), None)

    def _last_first(self, request: Request) -> Rank:
        return tuple(-number for number in self._policy.place(request))


@dataclass(frozen=True)
class Holders(Collection[Request]):
    """The requests with blocks on the device but for one, found as far as they are asked for."""

    running: Collection[Request]
    paused: PausedRequests
    but: Request
    """A waiting request."""

    def __len__(self) -> int:
        return len(self.running) + len(self.paused) - (self.but in self.paused)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in chain(self.running, self.paused) if request is not self.but)

    def __contains__(self, request: object) -> bool:
        return request in list(self)
