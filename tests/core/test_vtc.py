"""Fairness among tenants: the bounds of the virtual token counter, and round robin."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations

import pytest

from core.helpers import Harness, make_spec
from core.traces import MAX_MODEL_LEN, harness_of, names, play
from servekit.config.errors import ConfigError
from servekit.config.policy import FairPolicyConfig, FifoPolicyConfig, PolicyConfig, VtcPolicyConfig
from servekit.config.tenants import TenantsConfig
from servekit.core.plan import Sampled, StepResult
from servekit.core.policy.least_served import LeastServedPolicy, Tenant
from servekit.core.policy.vtc import VtcPolicy
from servekit.core.quota import TenantQuotas
from servekit.core.request import Request, RequestId, RequestSpec, Status

SEEDS = range(5)
SLOTS = 3
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
LONGEST_PROMPT, LONGEST_OUTPUT = 24, 16
BOUND = max(PROMPT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * SLOTS * (LONGEST_PROMPT + LONGEST_OUTPUT))
"""U of the paper, with the tokens that the running requests can hold for M."""


def flood(rng: random.Random, mean_gaps_s: Mapping[str, float], until_s: float) -> list[RequestSpec]:
    """Requests of each tenant, with this mean gap between them; a tenant takes a rest now and then."""
    specs = []
    for tenant, mean_gap_s in mean_gaps_s.items():
        now, index = rng.uniform(0, 5), 0
        while now < until_s:
            prompt = range(1000 * index, 1000 * index + rng.randint(1, LONGEST_PROMPT))
            specs.append(make_spec(f"{tenant}{index}", prompt, rng.randint(1, LONGEST_OUTPUT), tenant=tenant,
                                   arrived_s=now, salt=tenant))
            now += rng.expovariate(1 / mean_gap_s) + (rng.uniform(50, 150) if rng.random() < 0.01 else 0.0)
            index += 1
    return specs


@dataclass
class Moment:
    """What each tenant has been given, and whether it has requests waiting."""

    service: dict[str, float]
    waits: set[str]


@dataclass
class Observer:
    """Books the service of each tenant from the plans and events alone."""

    harness: Harness
    service: Counter[str] = field(default_factory=Counter)
    begun: set[str] = field(default_factory=set)
    moments: list[Moment] = field(default_factory=list)

    def step(self) -> None:
        self._look()
        heard = {name: len(events) for name, events in self.harness.heard.items()}
        plan = self.harness.step()
        for request in (item.request for item in plan.items):
            if request.request_id not in self.begun:
                self.begun.add(request.request_id)
                self.service[request.tenant] += PROMPT_WEIGHT * request.num_prompt
        for request in (item.request for item in plan.items):
            new = self.harness.heard.get(request.request_id, [])[heard.get(request.request_id, 0):]
            self.service[request.tenant] += OUTPUT_WEIGHT * sum(len(event.token_ids) for event in new)
        self._look()

    def _look(self) -> None:
        waits = {request.tenant for request in self.harness.scheduler._requests.values()
                 if request.status is Status.waiting and not request.has_begun}
        self.moments.append(Moment(dict(self.service), waits))

    def stretches(self, tenants: Iterable[str]) -> list[list[Moment]]:
        """Longest stretches over which all of these have requests waiting."""
        found: list[list[Moment]] = [[]]
        for moment in self.moments:
            if moment.waits.issuperset(tenants):
                found[-1].append(moment)
            elif found[-1]:
                found.append([])
        return [stretch for stretch in found if stretch]


def observe(policy: PolicyConfig, specs: Sequence[RequestSpec], until_s: float, **shape: object) -> Observer:
    harness = harness_of(policy, slots=SLOTS, **shape)  # type: ignore[arg-type]
    observer, arrivals = Observer(harness), sorted(specs, key=lambda spec: -spec.arrived_s)
    while harness.now < until_s:
        while arrivals and arrivals[-1].arrived_s <= harness.now:
            harness.add(arrivals.pop())
        observer.step()
        check_counters(harness)
    return observer


def policy_of(harness: Harness) -> LeastServedPolicy:
    policy = harness.scheduler._parts.policy
    assert isinstance(policy, LeastServedPolicy)
    return policy


def check_counters(harness: Harness) -> None:
    """The counters of tenants with requests waiting are at most U apart."""
    if isinstance(harness.scheduler._parts.policy, VtcPolicy):
        counters = [tenant.counter for tenant in policy_of(harness)._tenants.values() if tenant.waiting]
        assert max(counters, default=0) - min(counters, default=0) <= BOUND


def largest_gap(observer: Observer, one: str, other: str, weights: Mapping[str, float] | None = None) -> float:
    """Most that the services of the two differ by over a stretch in which both had requests waiting."""
    def ahead(moment: Moment) -> float:
        return (moment.service.get(one, 0) / (weights or {}).get(one, 1.0)
                - moment.service.get(other, 0) / (weights or {}).get(other, 1.0))
    return max((max(map(ahead, stretch)) - min(map(ahead, stretch)) for stretch in observer.stretches([one, other])),
               default=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_that_wait_get_equal_service_and_under_fifo_they_do_not(seed: int) -> None:
    gaps = {"heavy": 1.5, "middle": 5.0, "light": 12.0}
    specs = flood(random.Random(seed), gaps, 400.0)
    vtc, fifo = observe(VtcPolicyConfig(), specs, 400.0), observe(FifoPolicyConfig(), specs, 400.0)
    for one, other in combinations(gaps, 2):
        assert largest_gap(vtc, one, other) <= 2 * BOUND
    assert largest_gap(fifo, "heavy", "middle") > 2 * BOUND


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_that_waits_falls_behind_nobody(seed: int) -> None:
    gaps = {"heavy": 1.5, "middle": 5.0, "light": 12.0}
    vtc = observe(VtcPolicyConfig(), flood(random.Random(seed), gaps, 400.0), 400.0)
    for one, other in permutations(gaps, 2):
        for stretch in vtc.stretches([one]):
            peak = float("-inf")
            for moment in stretch:
                ahead = moment.service.get(one, 0) - moment.service.get(other, 0)
                peak = max(peak, ahead)
                assert ahead >= peak - 4 * BOUND


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_divide_the_service(seed: int) -> None:
    gaps, weights = {"gold": 2.0, "iron": 2.0}, {"gold": 3.0}
    vtc = observe(VtcPolicyConfig(), flood(random.Random(seed), gaps, 400.0), 400.0,
                  tenants=TenantsConfig(weights=weights))
    assert largest_gap(vtc, "gold", "iron", weights) <= 2 * BOUND
    longest = max(vtc.stretches(gaps), key=len)
    gold, iron = (longest[-1].service[name] - longest[0].service.get(name, 0) for name in gaps)
    assert gold > 2 * iron


@pytest.mark.parametrize("num_blocks", [None, 13])
@pytest.mark.parametrize("seed", SEEDS)
def test_charges_are_what_was_delivered_whatever_was_preempted(seed: int, num_blocks: int | None) -> None:
    specs = flood(random.Random(seed), {"a": 4.0, "b": 8.0}, 300.0)
    harness = harness_of(VtcPolicyConfig(), slots=SLOTS, num_blocks=num_blocks, prefix_cache=True, chunk_tokens=7)
    play(harness, specs)
    charged = policy_of(harness).service_by_tenant
    for tenant in ("a", "b"):
        own = [spec for spec in specs if spec.tenant == tenant]
        delivered = sum(len(harness.tokens(spec.request_id)) for spec in own)
        prompts = sum(len(spec.prompt_token_ids) for spec in own)
        assert charged[tenant] == PROMPT_WEIGHT * prompts + OUTPUT_WEIGHT * delivered
    assert (harness.scheduler.stats.preemptions > 0) is (num_blocks is not None)


def test_tokens_that_were_never_delivered_are_not_charged() -> None:
    """One request is aborted while its step runs, another one's computation fails."""
    harness = harness_of(VtcPolicyConfig(), slots=3)
    harness.add(*(make_spec(name, 4, 9, tenant="t") for name in ("aborted", "failed", "fine")))
    scheduler, plan = harness.scheduler, harness.scheduler.schedule(0.0)
    scheduler.abort([RequestId("aborted")], 0.5)
    events = scheduler.update(plan, StepResult({RequestId("fine"): Sampled(7)}, {RequestId("failed"): "NaN"}), 1.0)
    assert sum(len(event.token_ids) for event in events) == 1
    assert policy_of(harness).service_by_tenant == {"t": 3 * 4 * PROMPT_WEIGHT + OUTPUT_WEIGHT}


@pytest.mark.parametrize("seed", SEEDS)
def test_counters_never_fall(seed: int) -> None:
    specs = flood(random.Random(seed), {"a": 4.0, "b": 20.0, "c": 60.0}, 400.0)
    harness = harness_of(VtcPolicyConfig(), slots=SLOTS)
    history: dict[str, list[float]] = defaultdict(list)
    arrivals = sorted(specs, key=lambda spec: -spec.arrived_s)
    for _ in range(500):
        while arrivals and arrivals[-1].arrived_s <= harness.now:
            harness.add(arrivals.pop())
            for name, tenant in policy_of(harness)._tenants.items():
                history[name].append(tenant.counter)
        harness.step()
        for name, tenant in policy_of(harness)._tenants.items():
            history[name].append(tenant.counter)
    assert all(earlier <= later for counters in history.values() for earlier, later in pairwise(counters))


def tenants_of(harness: Harness) -> dict[str, Tenant]:
    return policy_of(harness)._tenants


def test_idling_earns_no_credit() -> None:
    harness = harness_of(VtcPolicyConfig(), slots=1)
    harness.add(*(make_spec(f"busy{index}", 10, 10, tenant="busy") for index in range(20)))
    for _ in range(100):
        harness.step()
    harness.add(make_spec("idle0", 10, 10, tenant="idle"))
    assert tenants_of(harness)["idle"].counter == tenants_of(harness)["busy"].counter > 200


def test_a_newcomer_to_an_empty_queue_is_lifted_to_who_left_it_last() -> None:
    harness = harness_of(VtcPolicyConfig(), slots=1)
    harness.add(make_spec("busy", 10, 10, tenant="busy"))
    for _ in range(5):
        harness.step()
    harness.add(make_spec("new", 10, 10, tenant="new"))
    assert tenants_of(harness)["new"].counter == tenants_of(harness)["busy"].counter == 10 + 2 * 5


@pytest.mark.parametrize("flooded", [False, True])
@pytest.mark.parametrize(("policy", "is_isolated"), [(VtcPolicyConfig(), True), (FifoPolicyConfig(), False)],
                         ids=["vtc", "fifo"])
def test_a_light_tenant_does_not_feel_a_flood(policy: PolicyConfig, is_isolated: bool, flooded: bool) -> None:
    """It may have to wait until one of the running requests ends, and no longer."""
    light = [make_spec(f"light{index}", 8, 4, tenant="light", arrived_s=40.0 * index) for index in range(10)]
    others = [make_spec(f"heavy{index}", 8, 12, tenant="heavy", arrived_s=1.0) for index in range(200)]
    starts = play(harness_of(policy, slots=SLOTS), [*light, *(others if flooded else ())])
    longest_wait = max(start.at_s - start.spec.arrived_s for start in starts if start.spec.tenant == "light")
    assert (longest_wait <= 12) is (is_isolated or not flooded)


def test_cached_prompt_tokens_are_free_if_wanted() -> None:
    for charge_cached, charged in ((True, 16 + 16 + 4), (False, 16 + 16 - 12 + 4)):
        harness = harness_of(VtcPolicyConfig(charge_cached=charge_cached), prefix_cache=True)
        specs = [make_spec(name, range(16), 1, tenant="t", arrived_s=arrived_s)
                 for name, arrived_s in (("a", 0.0), ("b", 5.0))]
        play(harness, specs)
        assert policy_of(harness).service_by_tenant == {"t": charged}


# Round robin.

def test_tenants_take_turns() -> None:
    harness = harness_of(FairPolicyConfig())
    specs = [make_spec(f"a{index}", 4, 9, tenant="a") for index in range(4)]
    specs += [make_spec(f"b{index}", 4, 1, tenant="b") for index in range(2)]
    specs += [make_spec("c0", 4, 1, tenant="c")]
    assert names(play(harness, specs)) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_weight_is_a_number_of_turns() -> None:
    harness = harness_of(FairPolicyConfig(), tenants=TenantsConfig(weights={"a": 2.0}))
    specs = [make_spec(f"{tenant}{index}", 4, 1, tenant=tenant) for tenant in "ab" for index in range(6)]
    first_nine = names(play(harness, specs))[:9]
    assert Counter(name[0] for name in first_nine) == {"a": 6, "b": 3}


def test_who_joins_late_gets_one_turn_a_round_like_all() -> None:
    harness = harness_of(FairPolicyConfig())
    specs = [make_spec(f"{tenant}{index}", 4, 2, tenant=tenant) for tenant in "ab" for index in range(6)]
    specs += [make_spec(f"c{index}", 4, 2, tenant="c", arrived_s=13.0) for index in range(3)]
    order = names(play(harness, specs))
    assert order[:7] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]
    assert sorted(name[0] for name in order[7:9]) == ["b", "c"]
    assert sorted(name[0] for name in order[9:12]) == ["a", "b", "c"]


# Bookkeeping.

def test_tenants_that_would_come_back_to_the_same_counter_are_forgotten() -> None:
    policy = VtcPolicy({}, TenantQuotas({}), 1.0, 2.0, True)
    for index in range(10_000):
        request = Request(make_spec(f"r{index}", 4, tenant=f"tenant{index}"), MAX_MODEL_LEN)
        request.sequence_number = index
        policy.push(request, 0.0)
        policy.remove(request)
        policy.started(request, 0.0)
        policy.finished(request, 0.0)
    assert len(policy.service_by_tenant) <= 1024
    policy.push(newcomer := Request(make_spec("new", 4, tenant="tenant0"), MAX_MODEL_LEN), 0.0)
    assert policy._tenants["tenant0"].counter == 10_000 * 4, "as if it had not been forgotten"
    policy.remove(newcomer)


def test_a_tenant_that_has_had_more_than_others_is_not_forgotten() -> None:
    policy = VtcPolicy({}, TenantQuotas({}), 1.0, 2.0, True)
    policy.push(Request(make_spec("waits", 4, tenant="waits"), MAX_MODEL_LEN), 0.0)
    for index in range(3000):
        request = Request(make_spec(f"r{index}", 4, tenant=f"tenant{index}"), MAX_MODEL_LEN)
        policy.push(request, 0.0)
        policy.remove(request)
        policy.started(request, 0.0)
        policy.finished(request, 0.0)
    assert {tenant.counter for name, tenant in policy._tenants.items() if name != "waits"} == {4.0}
    assert len(policy._tenants) == 3001


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_is_that_of_always_taking_the_smallest_counter(seed: int) -> None:
    """Against a plain search through all tenants, with aborts, charges and requests that are passed over."""
    rng = random.Random(seed)
    policy = VtcPolicy({"t1": 2.0}, TenantQuotas({}), 1.0, 2.0, True)
    waiting: list[Request] = []
    for round_number in range(200):
        for _ in range(rng.randint(0, 3)):
            spec = make_spec(f"{round_number}-{len(waiting)}", rng.randint(1, 9), 1, tenant=f"t{rng.randrange(5)}")
            waiting.append(request := Request(spec, MAX_MODEL_LEN))
            request.sequence_number = round_number * 10 + len(waiting)
            policy.push(request, 0.0)
        if waiting and rng.random() < 0.2:
            policy.remove(gone := waiting.pop(rng.randrange(len(waiting))))
            policy.finished(gone, 0.0)
        passed_over: list[Request] = []
        for request in policy.in_order(0.0):
            candidates = [other for other in waiting if other not in passed_over]
            smallest = min(policy._tenants[other.tenant].counter for other in candidates)
            tenants = {other.tenant for other in candidates if policy._tenants[other.tenant].counter == smallest}
            assert request.tenant in tenants
            assert request.sequence_number == min(
                other.sequence_number for other in candidates if other.tenant == request.tenant)
            if rng.random() < 0.3:
                passed_over.append(request)
            elif rng.random() < 0.2:
                break
            else:
                policy.remove(request)
                waiting.remove(request)
                policy.started(request, 0.0)
        policy.check()


def test_weights_are_positive() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler\.tenants\.weights\.x=0"):
        TenantsConfig(weights={"x": 0.0})
