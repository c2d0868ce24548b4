"""Who a request belongs to, and what its tenant is entitled to: scheduler.tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from servekit.config.bounds import above_zero, at_least
from servekit.config.errors import require


class TenantKey(Enum):
    """Where the name of a request's tenant comes from."""

    user = "user"
    header = "header"


class QuotaKind(Enum):
    """What happens to the requests of a tenant that has used up its quota."""

    soft = "soft"
    """They wait behind everybody else's."""
    hard = "hard"
    """They are refused, with the time after which to try again."""


@dataclass(frozen=True)
class QuotaConfig:
    """A token bucket: tokens flow in at a steady rate, and what is computed flows out."""

    tokens_per_s: float | None = None
    """Prompt and output tokens that flow in per second. null: no quota."""
    burst_tokens: float = 4096.0
    """Tokens that the bucket holds at most: what may be used at once after a pause."""
    kind: QuotaKind = QuotaKind.soft
    """What happens to new requests while the bucket is empty: they wait behind the others, or are refused with 429."""


@dataclass(frozen=True)
class TenantsConfig:
    """Who a request belongs to, and what its tenant is entitled to."""

    key: TenantKey = TenantKey.user
    """Where a request says who its tenant is: in its `user` field, or in an HTTP header."""
    header: str = "x-tenant"
    """Name of the header for key=header."""
    weights: dict[str, float] = field(default_factory=dict)
    """Shares of single tenants in the policies fair and vtc: one of weight 2 gets twice what one of 1 gets. All
    others have 1."""
    quotas: dict[str, QuotaConfig] = field(default_factory=dict)
    """Tokens per second of single tenants; they take the place of the default quota."""
    default_quota: QuotaConfig = field(default_factory=QuotaConfig)
    """Tokens per second that every other tenant may use, each for itself."""

    def __post_init__(self) -> None:
        section = "scheduler.tenants"
        require(self.header != "", f"{section}.header", self.header, "must be the name of a header",
                f"for example {section}.header=x-tenant")
        for tenant, weight in self.weights.items():
            above_zero(f"{section}.weights.{tenant}", weight, 2.0)
        for tenant, quota in self.quotas.items():
            _check_quota(f"{section}.quotas.{tenant}", quota)
        _check_quota(f"{section}.default_quota", self.default_quota)


def _check_quota(key: str, quota: QuotaConfig) -> None:
    rate = quota.tokens_per_s
    require(rate is None or 0 < rate < inf, f"{key}.tokens_per_s", rate, "must be greater than 0 and finite",
            f"set {key}.tokens_per_s=null for no quota")
    at_least(f"{key}.burst_tokens", quota.burst_tokens, 1, 4096)
