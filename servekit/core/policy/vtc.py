"""The virtual token counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.core.plan import PlanItem
from servekit.core.policy.least_served import LeastServedPolicy
from servekit.core.quota import TenantQuotas
from servekit.core.request import Request


class VtcPolicy(LeastServedPolicy):
    """Tenants that have requests waiting get equal service, counted in tokens (VTC, OSDI'24).

    A prompt is charged when its request starts for the first time, an output token when it has been sampled; what is
    computed again after a preemption is not charged again. With U = max(prompt_weight * longest prompt,
    output_weight * tokens that the running requests can hold), the services of two tenants of weight 1 that both
    have requests waiting all the time differ by at most 2 U over any stretch of time.
    """

    def __init__(self, weights: Mapping[str, float], quotas: TenantQuotas, prompt_weight: float,
                 output_weight: float, charge_cached: bool) -> None:
        super().__init__(weights, quotas)
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._charge_cached = charge_cached

    def cost_of_start(self, request: Request) -> float:
        num_free = 0 if self._charge_cached else request.num_cached_tokens or 0
        return self._prompt_weight * (request.num_prompt - num_free)

    def stepped(self, items: Sequence[PlanItem], duration_s: float, now: float) -> None:
        for request, start, num_tokens, samples in items:
            if samples and request.num_tokens > start + num_tokens:  # Else it was aborted meanwhile, or failed.
                self._tenants[request.tenant].charge(self._output_weight)
