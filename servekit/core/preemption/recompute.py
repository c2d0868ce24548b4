"""Preemption by recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.kv import KVManager
from servekit.core.plan import PreemptionKind
from servekit.core.policy.base import Policy
from servekit.core.preemption.base import Eviction
from servekit.core.request import Request


class RecomputePreemption:
    """Forget the keys and values; the prompt and the output so far are computed again later (vLLM, SOSP'23)."""

    waits_for_deadlock = False

    def victim(self, running: Sequence[Request], policy: Policy) -> Request:
        return policy.last(running)

    def evict(self, request: Request, kv: KVManager) -> Eviction:
        request.num_lost = request.num_computed
        kv.release(request)
        return Eviction(PreemptionKind.recompute)
