"""Tenants' quotas: how many tokens per second a tenant may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.config.tenants import QuotaConfig, QuotaKind
from servekit.core.plan import PlanItem

_NO_QUOTA = QuotaConfig()
_MIN_BUCKETS_TO_PRUNE = 1024


@dataclass(slots=True)
class _Bucket:
    """The tokens that a tenant had at some time; below zero it is over its quota."""

    rate_tokens_per_s: float
    burst_tokens: float
    level_tokens: float
    at_s: float

    def fill(self, now: float) -> float:
        """Bring the level up to date."""
        flown_in = (now - self.at_s) * self.rate_tokens_per_s
        self.level_tokens = min(self.burst_tokens, self.level_tokens + flown_in)
        self.at_s = now
        return self.level_tokens


class TenantQuotas:
    """The token buckets of the tenants that have a quota.

    Prompt and output tokens are charged when they are computed, so a bucket can go below zero: its tenant is over
    quota until it has filled up to zero again. Nothing is charged for what the prefix cache had.

    A full bucket is not kept, so that memory does not grow with the number of names that clients make up.
    """

    def __init__(self, quotas: Mapping[str, QuotaConfig], default: QuotaConfig = _NO_QUOTA) -> None:
        self._quotas = quotas
        self._default = default
        self._buckets: dict[str, _Bucket] = {}
        """Buckets that may not be full."""
        self._prune_at = _MIN_BUCKETS_TO_PRUNE

    @property
    def has_soft(self) -> bool:
        """Whether there can be requests that wait because of a quota."""
        return any(_is_quota(quota, QuotaKind.soft) for quota in (self._default, *self._quotas.values()))

    def rate_of(self, tenant: str) -> float:
        """Tokens per second of a tenant that has a quota."""
        rate = self._quota_of(tenant).tokens_per_s
        assert rate is not None, f"tenant {tenant!r} has no quota"
        return rate

    def over_for_s(self, tenant: str, now: float) -> float:
        """Seconds until the tenant is within its quota; 0 when it is now, or has none."""
        bucket = self._buckets.get(tenant)
        return 0.0 if bucket is None else max(0.0, -bucket.fill(now) / bucket.rate_tokens_per_s)

    def is_soft(self, tenant: str) -> bool:
        """Whether the tenant's requests wait behind the others' while it is over its quota."""
        return _is_quota(self._quota_of(tenant), QuotaKind.soft)

    def holds_back(self, tenant: str, now: float) -> bool:
        """Whether the tenant's requests wait behind the others' now."""
        return self.over_for_s(tenant, now) > 0 and self.is_soft(tenant)

    def refused_for_s(self, tenant: str, now: float) -> float | None:
        """After how many seconds a refused tenant may try again; None when it is not refused."""
        if not _is_quota(self._quota_of(tenant), QuotaKind.hard):
            return None
        return self.over_for_s(tenant, now) or None

    def stepped(self, items: Sequence[PlanItem], now: float) -> None:
        """Charge what a step has computed."""
        if not self._quotas and self._default.tokens_per_s is None:
            return
        for item in items:
            bucket = self._bucket_of(item.request.tenant, now)
            if bucket is not None:
                bucket.level_tokens = bucket.fill(now) - item.num_tokens
        self._prune(now)

    def check(self) -> None:
        """Raise AssertionError if a bucket holds more than it can."""
        for tenant, bucket in self._buckets.items():
            assert bucket.level_tokens <= bucket.burst_tokens, f"the bucket of {tenant!r} overflows"

    def _quota_of(self, tenant: str) -> QuotaConfig:
        return self._quotas.get(tenant, self._default)

    def _bucket_of(self, tenant: str, now: float) -> _Bucket | None:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            quota = self._quota_of(tenant)
            if quota.tokens_per_s is not None:
                bucket = _Bucket(quota.tokens_per_s, quota.burst_tokens, quota.burst_tokens, now)
                self._buckets[tenant] = bucket
        return bucket

    def _prune(self, now: float) -> None:
        """Forget buckets that are full again, once there are twice as many as were left the last time."""
        if len(self._buckets) >= self._prune_at:
            self._buckets = {tenant: bucket for tenant, bucket in self._buckets.items()
                             if bucket.fill(now) < bucket.burst_tokens}
            self._prune_at = max(_MIN_BUCKETS_TO_PRUNE, 2 * len(self._buckets))


def _is_quota(quota: QuotaConfig, kind: QuotaKind) -> bool:
    return quota.tokens_per_s is not None and quota.kind is kind
