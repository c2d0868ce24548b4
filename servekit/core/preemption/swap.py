"""Preemption by swapping."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.kv import KVManager
from servekit.core.plan import PreemptionKind
from servekit.core.policy.base import Policy
from servekit.core.preemption.base import Eviction
from servekit.core.preemption.recompute import RecomputePreemption
from servekit.core.request import Request


class SwapPreemption:
    """Copy the keys and values to the host's memory and back when the request continues (vLLM, SOSP'23).

    What does not fit there is recomputed, as `fallback` does; so is a request that has computed nothing yet. Whose
    place is taken is the fallback's rule, too.
    """

    def __init__(self, fallback: RecomputePreemption) -> None:
        self._fallback = fallback
        self.waits_for_deadlock = fallback.waits_for_deadlock

    def victim(self, running: Sequence[Request], policy: Policy) -> Request:
        return self._fallback.victim(running, policy)

    def evict(self, request: Request, kv: KVManager) -> Eviction:
        copies = kv.swap_out(request) if request.num_computed else None
        if copies is None:
            return self._fallback.evict(request, kv)
        return Eviction(PreemptionKind.swap, tuple(copies))
