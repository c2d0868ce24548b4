"""Soft quotas: a queue in which tenants that have used up their tokens come last, whatever the policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from servekit.core.policy.queue import Rank, RequestHeap
from servekit.core.quota import TenantQuotas
from servekit.core.request import Request


class QuotaQueue:
    """The requests of tenants that are over their soft quota come after all others, each part by rank.

    A tenant with a soft quota has a heap of its own, so that being over it or within it moves no request: the heaps
    are merged when the queue is read, those of tenants over quota after the rest. Nothing is held back while nothing
    else waits. Requests that have begun are never held back: a started answer goes on.

    Reading costs O(log n) a request, and O(tenants that have soft quotas and waiting requests) in the beginning.
    """

    def __init__(self, quotas: TenantQuotas) -> None:
        self._quotas = quotas
        self._common = RequestHeap()
        """Requests that no quota holds back."""
        self._lanes: dict[str, RequestHeap] = {}
        """By tenant, those that one might; no lane is empty."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Request) -> bool:
        return request in self._lanes.get(request.tenant, ()) or request in self._common

    def push(self, request: Request, rank: Rank) -> None:
        self._length += 1
        if self._has_lane(request):
            self._lanes.setdefault(request.tenant, RequestHeap()).push(request, rank)
        else:
            self._common.push(request, rank)

    def remove(self, request: Request) -> None:
        self._length -= 1
        if not self._has_lane(request):
            self._common.remove(request)
            return
        lane = self._lanes[request.tenant]
        lane.remove(request)
        if not lane:
            del self._lanes[request.tenant]

    def in_order(self, now: float) -> Iterator[Request]:
        within, over = [self._common], list[RequestHeap]()
        for tenant, lane in self._lanes.items():
            (over if self._quotas.holds_back(tenant, now) else within).append(lane)
        yield from _merged(within)
        yield from _merged(over)

    def holds_back(self, request: Request, now: float) -> bool:
        return self._has_lane(request) and self._quotas.holds_back(request.tenant, now)

    def check(self) -> None:
        for heap in (self._common, *self._lanes.values()):
            heap.check()
        assert all(self._lanes.values()), "a lane without requests is kept"
        assert self._length == len(self._common) + sum(map(len, self._lanes.values())), "the length drifts"

    def _has_lane(self, request: Request) -> bool:
        return not request.has_begun and self._quotas.is_soft(request.tenant)


def _merged(heaps: Iterable[RequestHeap]) -> Iterator[Request]:
    """The requests of all these heaps by rank. Unlike heapq.merge, this opens a heap only when its turn comes."""
    heads = [(first.rank, heap.entries()) for heap in heaps if (first := heap.first()) is not None]
    heapq.heapify(heads)
    while heads:
        _, entries = heapq.heappop(heads)
        for entry in entries:
            if heads and heads[0][0] < entry.rank:
                heapq.heappush(heads, (entry.rank, chain([entry], entries)))
                break
            yield entry.request
