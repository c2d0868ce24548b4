"""Preemption by recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.config.preemption import VictimRule
from servekit.core.kv import KVManager
from servekit.core.plan import PreemptionKind
from servekit.core.policy.base import Policy
from servekit.core.preemption.base import Eviction
from servekit.core.preemption.victims import choose_victim
from servekit.core.request import Request


class RecomputePreemption:
    """Forget the keys and values; the prompt and the output so far are computed again later (vLLM, SOSP'23).

    With `only_on_deadlock` a decode without a block misses the step, and somebody gives way only when no running
    request can go on (DeepSpeed-FastGen).
    """

    def __init__(self, victim: VictimRule, only_on_deadlock: bool) -> None:
        self._victim = victim
        self.waits_for_deadlock = only_on_deadlock

    def victim(self, running: Sequence[Request], policy: Policy) -> Request:
        return choose_victim(self._victim, running, policy)

    def evict(self, request: Request, kv: KVManager) -> Eviction:
        request.num_lost = request.num_computed
        kv.release(request)
        return Eviction(PreemptionKind.recompute)
