"""Round robin among tenants."""

from __future__ import annotations

from servekit.core.policy.least_served import LeastServedPolicy
from servekit.core.request import Request


class FairPolicy(LeastServedPolicy):
    """Tenants with waiting requests take turns, one request each; one of weight 2 gets two turns in a round.

    What a request costs does not count: `vtc` shares tokens.
    """

    def cost_of_start(self, request: Request) -> float:
        return 1.0
