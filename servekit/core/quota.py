"""Tenants' quotas: how many tokens per second a tenant may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from servekit.core.plan import PlanItem


class QuotaKind(Enum):
    """What happens to the requests of a tenant that has used up its quota."""

    soft = "soft"
    """They wait behind everybody else's."""
    hard = "hard"
    """They are refused, with the time after which to try again."""


@dataclass(frozen=True)
class Quota:
    """A token bucket: `tokens_per_s` flow in, up to `burst_tokens`; what is computed flows out."""

    tokens_per_s: float
    burst_tokens: float
    kind: QuotaKind


class TenantQuotas:
    """The token buckets of the tenants that have a quota.

    Prompt and output tokens are charged when they are computed, so a bucket can go below zero: its tenant is over
    quota until it has filled up to zero again. Nothing is charged for what the prefix cache had.
    """

    def __init__(self, quotas: dict[str, Quota]) -> None:
        self._quotas = quotas
        self._level_tokens = {tenant: quota.burst_tokens for tenant, quota in quotas.items()}
        self._filled_s: dict[str, float] = {}
        """When each level was last brought up to date."""

    def rate_of(self, tenant: str) -> float:
        """Tokens per second of a tenant that has a quota."""
        return self._quotas[tenant].tokens_per_s

    def over_for_s(self, tenant: str, now: float) -> float:
        """Seconds until the tenant is within its quota; 0 when it is now, or has none."""
        quota = self._quotas.get(tenant)
        if quota is None:
            return 0.0
        return max(0.0, -self._fill(tenant, quota, now) / quota.tokens_per_s)

    def is_soft(self, tenant: str) -> bool:
        """Whether the tenant's requests wait behind the others' while it is over its quota."""
        quota = self._quotas.get(tenant)
        return quota is not None and quota.kind is QuotaKind.soft

    def refused_for_s(self, tenant: str, now: float) -> float | None:
        """After how many seconds a refused tenant may try again; None when it is not refused."""
        quota = self._quotas.get(tenant)
        if quota is None or quota.kind is QuotaKind.soft:
            return None
        return self.over_for_s(tenant, now) or None

    def stepped(self, items: Sequence[PlanItem], now: float) -> None:
        """Charge what a step has computed."""
        if not self._quotas:
            return
        for item in items:
            quota = self._quotas.get(item.request.tenant)
            if quota is not None:
                self._level_tokens[item.request.tenant] = (
                    self._fill(item.request.tenant, quota, now) - item.num_tokens)

    def _fill(self, tenant: str, quota: Quota, now: float) -> float:
        passed_s = now - self._filled_s.get(tenant, now)
        self._filled_s[tenant] = now
        level = min(quota.burst_tokens, self._level_tokens[tenant] + passed_s * quota.tokens_per_s)
        self._level_tokens[tenant] = level
        return level
