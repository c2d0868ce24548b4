"""Quotas of tokens per second: buckets, tenants that wait behind others, and tenants that are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.helpers import Harness, make_spec
from core.traces import harness_of, names, play, random_specs
from servekit.config.errors import ConfigError
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    PriorityPolicyConfig,
    SjfPolicyConfig,
    SrtfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.config.tenants import QuotaConfig, QuotaKind, TenantsConfig
from servekit.core.plan import PlanItem
from servekit.core.policy.quota import QuotaQueue
from servekit.core.quota import TenantQuotas
from servekit.core.request import FinishReason, Request, RequestSpec

SOFT, HARD = QuotaKind.soft, QuotaKind.hard
POLICIES = [FifoPolicyConfig(), SjfPolicyConfig(ageing_tokens_per_s=0.0), PriorityPolicyConfig(), FairPolicyConfig(),
            VtcPolicyConfig(), LpmPolicyConfig(), SrtfPolicyConfig(margin_tokens=0.0, min_run_tokens=0),
            MlfqPolicyConfig(quantum_s=1.0)]


def use(quotas: TenantQuotas, tenant: str, num_tokens: int, now: float) -> None:
    request = Request(make_spec("x", 1, 1, tenant=tenant), 64)
    quotas.stepped([PlanItem(request, 0, num_tokens, False)], now)


# Buckets.

def test_a_bucket_fills_at_its_rate_up_to_its_size() -> None:
    quotas = TenantQuotas({"a": QuotaConfig(10.0, 100.0)})
    use(quotas, "a", 100, 0.0)
    assert quotas.over_for_s("a", 0.0) == 0
    use(quotas, "a", 50, 0.0)
    assert [quotas.over_for_s("a", now) for now in (0.0, 2.0, 5.0, 6.0)] == [5.0, 3.0, 0.0, 0.0]
    use(quotas, "a", 150, 1000.0)
    assert quotas.over_for_s("a", 1000.0) == 5.0


def test_every_other_tenant_has_the_default_quota_for_itself() -> None:
    quotas = TenantQuotas({"vip": QuotaConfig(), "big": QuotaConfig(100.0, 10.0)}, QuotaConfig(1.0, 10.0))
    for tenant in ("vip", "big", "a", "b"):
        use(quotas, tenant, 20 if tenant != "b" else 5, 0.0)
    assert [quotas.over_for_s(tenant, 0.0) for tenant in ("vip", "big", "a", "b")] == [0.0, 0.1, 10.0, 0.0]


def test_the_kind_decides_between_waiting_and_refusal() -> None:
    quotas = TenantQuotas({"soft": QuotaConfig(1.0, 10.0, SOFT), "hard": QuotaConfig(1.0, 10.0, HARD)})
    for tenant in ("soft", "hard", "free"):
        use(quotas, tenant, 14, 0.0)
    assert [quotas.holds_back(tenant, 0.0) for tenant in ("soft", "hard", "free")] == [True, False, False]
    assert [quotas.refused_for_s(tenant, 1.0) for tenant in ("soft", "hard", "free")] == [None, 3.0, None]
    assert quotas.refused_for_s("hard", 4.0) is None
    assert quotas.has_soft and not TenantQuotas({"hard": QuotaConfig(1.0, 10.0, HARD)}).has_soft


def test_full_buckets_are_forgotten() -> None:
    quotas = TenantQuotas({}, QuotaConfig(10.0, 100.0))
    for index in range(20_000):
        use(quotas, f"tenant{index}", 20, now=float(index))
        quotas.check() if index % 1000 == 0 else None
    assert len(quotas._buckets) <= 1024
    use(quotas, "last", 150, 20_000.0)
    assert quotas.over_for_s("last", 20_000.0) == 5.0


@pytest.mark.parametrize(("make", "key"), [
    (lambda: TenantsConfig(quotas={"a": QuotaConfig(0.0)}), r"quotas\.a\.tokens_per_s"),
    (lambda: TenantsConfig(quotas={"a": QuotaConfig(1.0, 0.5)}), r"quotas\.a\.burst_tokens"),
    (lambda: TenantsConfig(default_quota=QuotaConfig(-1.0)), r"default_quota\.tokens_per_s"),
    (lambda: TenantsConfig(header=""), "header"),
])
def test_settings_without_sense_are_refused(make: object, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.tenants\.{key}="):
        make()  # type: ignore[operator]


# The queue.

@given(st.lists(st.tuples(st.sampled_from(["push", "push", "push", "remove", "use", "read"]), st.integers(0, 4),
                          st.integers(0, 50)), max_size=120))
def test_tenants_over_their_quota_come_last_each_part_by_rank(calls: list[tuple[str, int, int]]) -> None:
    quotas = TenantQuotas({"t0": QuotaConfig(1.0, 10.0, SOFT), "t1": QuotaConfig(5.0, 10.0, SOFT),
                           "t2": QuotaConfig(1.0, 10.0, HARD)})
    queue, members = QuotaQueue(quotas), list[tuple[tuple[int, int], Request]]()
    for now, (call, tenant, number) in enumerate(calls):
        if call == "push":
            request = Request(make_spec(f"r{now}", 1, tenant=f"t{tenant}"), 64)
            request.scheduled_s = 0.0 if number % 5 == 0 else None
            members.append(((number, now), request))
            queue.push(request, (number, now))
        elif call == "remove" and members:
            queue.remove(members.pop(number % len(members))[1])
        elif call == "use":
            use(quotas, f"t{tenant}", number, float(now))
        over = {name for name in ("t0", "t1") if quotas.over_for_s(name, float(now)) > 0}
        expected = sorted(members, key=lambda member: (
            not member[1].has_begun and member[1].tenant in over, member[0]))
        assert list(queue.in_order(float(now))) == [request for _, request in expected]
        assert len(queue) == len(members)
        assert all(request in queue for _, request in members)
        queue.check()


# With every policy.

def greedy_and_modest(number: int = 6) -> list[RequestSpec]:
    """`greedy` comes first, is the shortest and of the best class, and has used up its tokens with its first request.
    """
    first = make_spec("greedy-first", 20, 10, tenant="greedy", priority=0, predicted=10)
    return [first, *(make_spec(f"greedy{index}", 4, 2, tenant="greedy", arrived_s=1.0, priority=0, predicted=2)
                     for index in range(number)),
            *(make_spec(f"modest{index}", 8, 5, tenant="modest", arrived_s=2.0, priority=1, predicted=5)
              for index in range(number))]


def soft(rate: float) -> TenantsConfig:
    return TenantsConfig(quotas={"greedy": QuotaConfig(rate, 1.0, SOFT)})


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind.value)
def test_who_is_over_its_quota_waits_behind_all_others(policy: PolicyConfig) -> None:
    order = names(play(harness_of(policy, tenants=soft(0.01), prefix_cache=True), greedy_and_modest()))
    assert order[0] == "greedy-first"
    assert all(name.startswith("modest") for name in order[1:7])
    assert all(name.startswith("greedy") for name in order[7:])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind.value)
def test_a_quota_that_is_not_used_up_changes_nothing(policy: PolicyConfig) -> None:
    specs = random_specs(random.Random(3), 30, tenants=3, classes=2)
    tenants = TenantsConfig(default_quota=QuotaConfig(1e6, 1e6, SOFT))
    limited, free = (harness_of(policy, slots=2, tenants=chosen, prefix_cache=True)
                     for chosen in (tenants, TenantsConfig()))
    assert play(limited, specs) == play(free, specs)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind.value)
def test_it_runs_at_once_when_nobody_else_waits(policy: PolicyConfig) -> None:
    """Quotas leave no slot empty: without the modest ones, the greedy tenant's requests run back to back."""
    specs = [spec for spec in greedy_and_modest() if spec.tenant == "greedy"]
    harness = harness_of(policy, tenants=soft(0.01), prefix_cache=True)
    play(harness, specs)
    assert all(plan.items for plan in harness.plans)
    assert len(harness.plans) == sum(spec.sampling.max_tokens for spec in specs)


def test_it_has_its_place_again_when_its_bucket_has_filled() -> None:
    """30 tokens used at 2 tokens/s from 10 s on: within the quota again while the fourth modest one runs."""
    order = names(play(harness_of(FifoPolicyConfig(), tenants=soft(1.0)), greedy_and_modest()))
    back = order.index("greedy0")
    assert 1 < back < 7
    assert order[back + 1].startswith("modest"), "its next request puts it over its quota again"


def test_a_cached_prefix_makes_up_for_no_quota() -> None:
    shared = range(100, 120)
    harness = harness_of(LpmPolicyConfig(), tenants=soft(0.01), prefix_cache=True)
    specs = [make_spec("first", shared, 5, tenant="greedy"),
             make_spec("again", shared, 5, tenant="greedy", arrived_s=1.0),
             make_spec("other", 20, 5, tenant="modest", arrived_s=2.0)]
    assert names(play(harness, specs)) == ["first", "other", "again"]
    assert harness.scheduler.stats.cached_tokens == 16


@pytest.mark.parametrize("policy", [PriorityPolicyConfig(), SrtfPolicyConfig(margin_tokens=0.0, min_run_tokens=0),
                                    MlfqPolicyConfig(quantum_s=1.0)], ids=lambda policy: policy.kind.value)
def test_who_is_over_its_quota_takes_nobodys_place(policy: PolicyConfig) -> None:
    specs = [make_spec("greedy-first", 20, 10, tenant="greedy"),
             make_spec("modest", 8, 30, tenant="modest", arrived_s=12.0, priority=1),
             make_spec("greedy-again", 4, 2, tenant="greedy", arrived_s=25.0)]
    limited, free = harness_of(policy, tenants=soft(0.01)), harness_of(policy)
    for harness in (limited, free):
        play(harness, specs)
    assert [harness.scheduler.stats.preemptions for harness in (limited, free)] == [0, 1]


@pytest.mark.parametrize("policy", [FifoPolicyConfig(), VtcPolicyConfig()], ids=lambda policy: policy.kind.value)
def test_a_hard_quota_refuses_and_says_when_to_try_again(policy: PolicyConfig) -> None:
    tenants = TenantsConfig(quotas={"greedy": QuotaConfig(2.0, 1.0, HARD)})
    harness = harness_of(policy, tenants=tenants)
    harness.add(make_spec("a", 20, 3, tenant="greedy"))
    harness.step()
    harness.add(make_spec("b", 4, 1, tenant="greedy"), make_spec("c", 4, 1, tenant="greedy"))
    refusals = refusals_of(harness, "b", "c")
    assert [refusal.finish for refusal in refusals] == [FinishReason.over_quota] * 2
    assert refusals[0].retry_after_s == pytest.approx(19 / 2)
    assert "2 tokens per second; try again in 9.5 s" in refusals[0].message
    harness.add(make_spec("d", 4, 1, tenant="modest"))
    harness.drain()
    assert [harness.finish(name) for name in "ad"] == ["length", "length"]
    harness.now += 10.0
    harness.add(make_spec("e", 4, 1, tenant="greedy"))
    harness.drain()
    assert harness.finish("e") == "length"


def refusals_of(harness: Harness, *refused: str) -> Sequence:
    return [harness.heard[name][0] for name in refused]
