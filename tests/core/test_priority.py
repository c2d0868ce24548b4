"""Priority classes: no inversion, and nobody displaced without need."""

from __future__ import annotations

import random

import pytest

from core.helpers import Harness, make_spec
from core.traces import harness_of, names, overtakings, play, random_specs
from servekit.config.batching import StaticBatchingConfig
from servekit.config.policy import PriorityPolicyConfig
from servekit.core.plan import PreemptionKind
from servekit.core.policy.priority import PriorityPolicy
from servekit.core.policy.queue import RequestHeap
from servekit.core.request import Request, RequestSpec

SEEDS = range(8)


def running(harness: Harness) -> list[str]:
    return sorted(item.request.request_id for item in harness.plans[-1].items)


def low(number: int, output: int = 40) -> list[RequestSpec]:
    return [make_spec(f"low{index:02}", 4, output, priority=1) for index in range(number)]


def test_a_better_class_runs_in_the_next_step_though_all_slots_are_taken() -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=32)
    harness.add(*low(32))
    harness.step()
    harness.add(make_spec("high", 10, 3, priority=0))
    plan = harness.step()
    assert plan.items[-1][0].request_id == "high"
    assert [(out.request.request_id, out.kind) for out in plan.preempted] == [("low31", PreemptionKind.pause)]
    for _ in range(2):
        harness.step()
    assert harness.finish("high") == "length"
    assert "low31" in [item.request.request_id for item in harness.step().items]


def test_without_preemption_it_waits_for_a_slot_and_is_the_next() -> None:
    harness = harness_of(PriorityPolicyConfig(preempt=False), slots=2)
    specs = [*low(4, output=10), make_spec("high", 4, 3, arrived_s=2.0)]
    assert names(play(harness, specs)) == ["low00", "low01", "high", "low02", "low03"]
    assert harness.scheduler.stats.preemptions == 0


def test_the_newest_of_the_lowest_class_gives_way() -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=4)
    harness.add(*(make_spec(name, 4, 30, priority=priority)
                  for name, priority in (("lowest-old", 3), ("lowest-new", 3), ("middle", 2), ("low", 2))))
    harness.step()
    harness.add(make_spec("high", 4, 30, priority=1))
    assert [out.request.request_id for out in harness.step().preempted] == ["lowest-new"]
    harness.add(make_spec("higher", 4, 30, priority=0))
    assert [out.request.request_id for out in harness.step().preempted] == ["lowest-old"]


def test_a_better_class_takes_the_blocks_of_a_lower_one() -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=4, num_blocks=20)
    harness.add(make_spec("low-old", 30, 20, priority=1), make_spec("low-new", 30, 20, priority=1))
    harness.step()
    harness.add(make_spec("high", 30, 4, priority=0))
    plan = harness.step()
    assert running(harness) == ["high", "low-old"]
    assert [(out.request.request_id, out.kind) for out in plan.preempted] == [("low-new", PreemptionKind.recompute)]
    harness.drain()
    assert harness.finish("low-new") == "length"


def test_nobody_gives_way_to_one_that_would_not_fit_all_the_same() -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=4, num_blocks=20)
    harness.add(make_spec("high-old", 40, 20, priority=0), make_spec("low", 8, 20, priority=1))
    harness.step()
    harness.add(make_spec("high-new", 50, 4, priority=0))
    for _ in range(3):
        assert harness.step().preempted == ()
        assert running(harness) == ["high-old", "low"]
    harness.drain()
    assert harness.finish("high-new") == "length"


def test_who_lost_its_place_goes_on_before_later_ones_of_its_class() -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=1)
    harness.add(make_spec("low", 4, 30, priority=1))
    harness.step()
    harness.add(make_spec("high", 4, 3, priority=0), make_spec("later", 4, 3, priority=1))
    order = [harness.step().items[0].request.request_id for _ in range(34)]
    assert order == ["high"] * 3 + ["low"] * 29 + ["later"] * 2


def test_within_a_class_those_that_have_begun_come_first() -> None:
    """Also before those that arrived earlier and were passed over."""
    policy = PriorityPolicy(RequestHeap(), True, {}, False, None)
    names_and_states = [("earlier", 1, None), ("begun", 1, 0.0), ("better", 0, None)]
    for number, (name, priority, scheduled_s) in enumerate(names_and_states):
        request = Request(make_spec(name, 4, priority=priority), 64)
        request.sequence_number, request.scheduled_s = number, scheduled_s
        policy.push(request, 1.0)
    assert [request.request_id for request in policy.in_order(1.0)] == ["better", "begun", "earlier"]


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_classes_never_displace_each_other(seed: int) -> None:
    harness = harness_of(PriorityPolicyConfig(), slots=2)
    play(harness, random_specs(random.Random(seed), 40))
    assert harness.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("slots_for_best", [0, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_runs_while_a_better_class_waits(seed: int, slots_for_best: int) -> None:
    """Whatever the reason: a slot that is kept for the best class makes the middle one displace the lowest."""
    rng = random.Random(seed)
    slots = rng.randint(3, 5)
    harness = harness_of(PriorityPolicyConfig(class_slots={0: slots_for_best} if slots_for_best else {}), slots=slots)
    specs = random_specs(rng, 60, mean_gap_s=2.0, classes=4)
    for spec in specs:
        while harness.now < spec.arrived_s:
            step_without_inversion(harness, slots, slots_for_best)
        harness.add(spec)
    while harness.scheduler.has_requests:
        step_without_inversion(harness, slots, slots_for_best)
    assert harness.scheduler.stats.preemptions > 0


def step_without_inversion(harness: Harness, slots: int, slots_for_best: int) -> None:
    requests = list(harness.scheduler._requests.values())
    plan = harness.step()
    served = [item.request for item in plan.items]
    waiting = [request for request in requests if request not in served]
    worst = max((request.priority for request in served), default=-1)
    best = min((request.priority for request in waiting), default=9)
    assert worst <= best, f"class {worst} runs and class {best} waits"
    assert sum(request.priority > 0 for request in served) <= slots - slots_for_best
    if waiting and best > 0 and len(served) < slots:
        assert len(served) - sum(request.priority == 0 for request in served) == slots - slots_for_best


def test_slots_are_kept_for_a_class() -> None:
    harness = harness_of(PriorityPolicyConfig(preempt=False, class_slots={0: 2}), slots=4)
    harness.add(*low(4))
    harness.step()
    assert running(harness) == ["low00", "low01"]
    harness.add(*(make_spec(f"vip{index}", 4, 40, priority=0) for index in range(3)))
    harness.step()
    assert running(harness) == ["low00", "low01", "vip0", "vip1"]
    harness.abort("vip0")
    harness.step()
    assert running(harness) == ["low00", "low01", "vip1", "vip2"]
    harness.abort("vip1")
    harness.step()
    assert running(harness) == ["low00", "low01", "vip2"]


def test_the_slots_that_a_class_holds_are_not_kept_twice() -> None:
    harness = harness_of(PriorityPolicyConfig(preempt=False, class_slots={0: 2}), slots=4)
    harness.add(*(make_spec(f"vip{index}", 4, 40, priority=0) for index in range(2)), *low(2))
    harness.step()
    assert running(harness) == ["low00", "low01", "vip0", "vip1"]


def test_a_batch_of_its_own_for_each_class() -> None:
    batching = StaticBatchingConfig(max_batch_delay_ms=1000.0)
    policy = PriorityPolicyConfig(preempt=False, own_batches=True)
    harness = harness_of(policy, slots=4, batching=batching)
    harness.add(*low(2, output=3), *(make_spec(f"high{index}", 4, 3, priority=0) for index in range(2)))
    harness.drain()
    batches = {tuple(sorted(item.request.priority for item in plan.items)) for plan in harness.plans if plan.items}
    assert batches == {(0, 0), (1, 1)}


# Ageing.

@pytest.mark.parametrize("seed", SEEDS)
def test_a_class_is_worth_a_certain_wait(seed: int) -> None:
    specs = random_specs(random.Random(seed), 60, classes=3)
    policy = PriorityPolicyConfig(preempt=False, ageing_s=25.0)
    overtaken = overtakings(play(harness_of(policy), specs), specs)
    assert overtaken
    for winner, loser in overtaken:
        assert winner.arrived_s <= loser.arrived_s + 25.0 * (loser.priority - winner.priority) + 1e-9


def test_a_low_class_starves_without_ageing_and_not_with_it() -> None:
    specs = [make_spec(f"high{index}", 4, 4, arrived_s=4.0 * index) for index in range(100)]
    specs.append(make_spec("low", 4, 4, arrived_s=1.0, priority=1))
    assert "low" not in names(play(harness_of(PriorityPolicyConfig()), specs, until_s=400.0))
    aged = play(harness_of(PriorityPolicyConfig(ageing_s=20.0)), specs, until_s=400.0)
    assert next(start.at_s for start in aged if start.spec.request_id == "low") <= 1.0 + 20.0 + 2 * 4.0
