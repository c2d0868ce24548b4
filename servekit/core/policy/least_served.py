"""Fairness among tenants: the one that has been served least comes next."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose

from servekit.core.policy.base import PolicyDefaults
from servekit.core.policy.queue import RequestHeap
from servekit.core.quota import TenantQuotas
from servekit.core.request import Request, RequestId

_MIN_TENANTS_TO_PRUNE = 1024


@dataclass(slots=True)
class Tenant:
    """What a tenant has got, and what it waits for."""

    name: str
    weight: float
    counter: float = 0.0
    """Service over weight, plus lifts: the smallest comes next."""
    service: float = 0.0
    """All that has been charged."""
    lifted: float = 0.0
    """All that was added to the counter without service."""
    turn: int = 0
    """When it last began to wait; among equal counters the longest ago comes next."""
    waiting: RequestHeap = field(default_factory=RequestHeap)
    """Its requests that have not begun."""
    present: set[RequestId] = field(default_factory=set)
    """All its requests that have not ended."""
    is_queued: bool = False
    """Whether the heap of tenants has an entry of it."""

    def charge(self, cost: float) -> None:
        self.service += cost
        self.counter += cost / self.weight

    def lift_to(self, counter: float) -> None:
        if counter > self.counter:
            self.lifted += counter - self.counter
            self.counter = counter


_Place = tuple[float, int, Tenant]
"""A tenant in the heap with the counter and turn that it had when it was put there; both only grow."""


class LeastServedPolicy(PolicyDefaults, ABC):
    """The next request is the earliest of the tenant with the smallest counter (VTC, OSDI'24, in general form).

    Each start and each token adds to its tenant's counter, divided by the tenant's weight. A tenant that had nothing
    waiting is lifted to the smallest counter of those that had, or to that of the one that was the last to have
    anything waiting: being idle earns no credit. Requests that have begun come first, in order of arrival. A victim
    of a preemption is the newest, whoever's it is, so that the oldest always advances.

    Push, remove and the next request cost O(log n). A tenant that has no request here, and a counter to which it
    would be lifted on its return, is forgotten.
    """

    def __init__(self, weights: Mapping[str, float], quotas: TenantQuotas) -> None:
        self._weights = weights
        self._quotas = quotas
        self._tenants: dict[str, Tenant] = {}
        self._places: list[_Place] = []
        """Heap of tenants with waiting requests. An entry may lag behind its tenant's counter, or be left over."""
        self._turns = itertools.count()
        self._last_left = Tenant("", 1.0)
        """The tenant that was the last to have a waiting request."""
        self._begun = RequestHeap()
        self._num_waiting = 0
        self._prune_at = _MIN_TENANTS_TO_PRUNE

    @abstractmethod
    def cost_of_start(self, request: Request) -> float:
        """What the tenant is charged when its request starts for the first time."""

    @property
    def service_by_tenant(self) -> dict[str, float]:
        """What each tenant has been charged, as far as it is remembered."""
        return {name: tenant.service for name, tenant in self._tenants.items()}

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, request: Request) -> bool:
        if request.has_begun:
            return request in self._begun
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and request in tenant.waiting

    def push(self, request: Request, now: float) -> None:
        self._num_waiting += 1
        tenant = self._tenant_of(request)
        tenant.present.add(request.request_id)
        if request.has_begun:
            self._begun.push(request, (request.sequence_number,))
            return
        if not tenant.waiting:
            tenant.lift_to(self._floor())
            tenant.turn = next(self._turns)
        tenant.waiting.push(request, (request.sequence_number,))
        if not tenant.is_queued:
            heapq.heappush(self._places, _place_of(tenant))
            tenant.is_queued = True

    def remove(self, request: Request) -> None:
        self._num_waiting -= 1
        if request.has_begun:
            self._begun.remove(request)
            return
        tenant = self._tenant_of(request)
        tenant.waiting.remove(request)
        if not tenant.waiting:
            self._last_left = tenant

    def in_order(self, now: float) -> Iterator[Request]:
        yield from self._begun.in_order(now)
        self._settle()
        within, over = self._by_quota(now)
        yield from _by_turns(within, now)
        yield from _by_turns(over, now)

    def started(self, request: Request, now: float) -> None:
        if request.num_preemptions == 0:
            self._tenants[request.tenant].charge(self.cost_of_start(request))

    def finished(self, request: Request, now: float) -> None:
        self._tenants[request.tenant].present.remove(request.request_id)
        if len(self._tenants) >= self._prune_at:
            self._prune()

    def check(self) -> None:
        self._begun.check()
        for name, tenant in self._tenants.items():
            tenant.waiting.check()
            assert tenant.is_queued or not tenant.waiting, f"tenant {name!r} waits and is not in the heap"
            assert isclose(tenant.counter, tenant.service / tenant.weight + tenant.lifted, abs_tol=1e-6), (
                f"the counter of tenant {name!r} drifts")
        waiting = len(self._begun) + sum(len(tenant.waiting) for tenant in self._tenants.values())
        assert self._num_waiting == waiting, "the number of waiting requests drifts"

    def _tenant_of(self, request: Request) -> Tenant:
        name = request.tenant
        if name not in self._tenants:
            self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        return self._tenants[name]

    def _floor(self) -> float:
        """The counter that a tenant is lifted to when it begins to wait. It never falls."""
        self._settle()
        return self._places[0][0] if self._places else self._last_left.counter

    def _settle(self) -> None:
        """Bring the head of the heap up to date."""
        while self._places:
            counter, turn, tenant = self._places[0]
            if not tenant.waiting:
                heapq.heappop(self._places)
                tenant.is_queued = False
            elif (counter, turn) != (tenant.counter, tenant.turn):
                heapq.heapreplace(self._places, _place_of(tenant))
            else:
                return

    def _by_quota(self, now: float) -> tuple[list[_Place], list[_Place]]:
        """Heaps of the tenants within their soft quotas, and of those over them."""
        if not self._quotas.has_soft:
            return list(self._places), []
        within: list[_Place] = []
        over: list[_Place] = []
        for place in self._places:
            (over if self._quotas.holds_back(place[2].name, now) else within).append(place)
        heapq.heapify(within)
        heapq.heapify(over)
        return within, over

    def _prune(self) -> None:
        """Forget who would come back to the same counter, once there are twice as many as were left the last time."""
        floor = self._floor()
        self._tenants = {name: tenant for name, tenant in self._tenants.items()
                         if tenant.present or tenant.counter > floor}
        self._prune_at = max(_MIN_TENANTS_TO_PRUNE, 2 * len(self._tenants))


def _place_of(tenant: Tenant) -> _Place:
    return (tenant.counter, tenant.turn, tenant)


def _by_turns(places: list[_Place], now: float) -> Iterator[Request]:
    """Requests of the tenants of this heap, which is used up. Charges that are made meanwhile count."""
    waiting: dict[str, Iterator[Request]] = {}
    while places:
        counter, turn, tenant = places[0]
        if (counter, turn) != (tenant.counter, tenant.turn):
            heapq.heapreplace(places, _place_of(tenant))
            continue
        if tenant.name not in waiting:
            waiting[tenant.name] = tenant.waiting.in_order(now)
        request = next(waiting[tenant.name], None)
        if request is None:
            heapq.heappop(places)
        else:
            yield request
