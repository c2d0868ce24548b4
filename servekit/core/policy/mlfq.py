"""The skip-join multi-level feedback queue."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from servekit.core.plan import PlanItem
from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.queue import Queue, Rank, RequestHeap
from servekit.core.request import Request, RequestId


@dataclass(slots=True)
class _Progress:
    """How far down a request is."""

    level: int
    """Of its quantum."""
    place: int
    """Smaller is nearer to the front of its level."""
    served_s: float
    """When it was last served, or arrived."""
    used_s: float = 0.0
    """Step time that it has used of its quantum."""
    is_promoted: bool = False
    """It has waited too long, and is on the top level until its quantum is used up."""


class MlfqPolicy(KeyedPolicy):
    """Requests go down a level each time they have used up its quantum of step time (FastServe, NSDI'26).

    Level p has a quantum of `quantum_s * quantum_growth ** p`; there are as many levels as it takes. A request joins
    at the back of the first level whose quantum its prompt fits in (skip-join). One on a better level takes the place
    of a running one on a lower level, which then waits at the front of its own.

    Who has not been served for `starvation_s` comes first on the top level, the one that waited longest before others.
    It keeps the quantum of the level that it was on, and goes down from there: quanta grow until they last for what
    has to be computed again after a preemption, however short `starvation_s` is.
    """

    begun_first = False

    def __init__(self, queue: Queue, quantum_s: float, quantum_growth: float, prefill_s_per_token: float,
                 starvation_s: float | None) -> None:
        super().__init__(queue)
        self._quantum_s = quantum_s
        self._quantum_growth = quantum_growth
        self._prefill_s_per_token = prefill_s_per_token
        self._starvation_s = starvation_s
        self._progress: dict[RequestId, _Progress] = {}
        self._starving = RequestHeap()
        """Waiting requests on lower levels, by when they were last served."""
        self._backs = itertools.count(1)
        self._fronts = itertools.count(-1, -1)

    def level_of(self, request: Request) -> int:
        """The level that a request is on; 0 is the top."""
        progress = self._progress[request.request_id]
        return 0 if progress.is_promoted else progress.level

    def key(self, request: Request) -> Rank:
        progress = self._progress[request.request_id]
        return (self.level_of(request), not progress.is_promoted, progress.place)

    def push(self, request: Request, now: float) -> None:
        progress = self._progress.get(request.request_id)
        if progress is None:
            progress = _Progress(self._first_level(request), next(self._backs), now)
            self._progress[request.request_id] = progress
        elif request.has_begun:
            progress.place = next(self._fronts)
        super().push(request, now)
        if self.level_of(request) > 0:
            self._starving.push(request, (progress.served_s, request.sequence_number))

    def remove(self, request: Request) -> None:
        super().remove(request)
        if request in self._starving:
            self._starving.remove(request)

    def in_order(self, now: float) -> Iterator[Request]:
        self._promote_starving(now)
        return super().in_order(now)

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        return (self.level_of(candidate) < self.level_of(victim) and not self._queue.holds_back(candidate, now))

    def stepped(self, items: Sequence[PlanItem], duration_s: float, now: float) -> None:
        for item in items:
            progress = self._progress.get(item.request.request_id)
            if progress is None:
                continue  # It was aborted while the step ran.
            progress.served_s = now
            progress.used_s += duration_s
            if progress.used_s > self._quantum(progress.level):
                progress.level += 1
                progress.used_s = 0.0
                progress.is_promoted = False

    def finished(self, request: Request, now: float) -> None:
        del self._progress[request.request_id]

    def check(self) -> None:
        super().check()
        self._starving.check()

    def _quantum(self, level: int) -> float:
        return self._quantum_s * self._quantum_growth ** level

    def _first_level(self, request: Request) -> int:
        prefill_s = request.num_prompt * self._prefill_s_per_token
        return next(level for level in itertools.count() if self._quantum(level) >= prefill_s)

    def _promote_starving(self, now: float) -> None:
        """Move those that have waited too long to the top level."""
        if self._starvation_s is None:
            return
        while (first := self._starving.first()) is not None and first.rank[0] + self._starvation_s <= now:
            request, progress = first.request, self._progress[first.request.request_id]
            self.remove(request)
            progress.is_promoted, progress.used_s, progress.place = True, 0.0, next(self._backs)
            super().push(request, now)
