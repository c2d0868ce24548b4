"""The multi-level feedback queue: levels, quanta, displacement, and the end of starvation."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from itertools import groupby

import pytest

from core.helpers import Harness, make_spec
from core.traces import harness_of, names, play, random_specs
from servekit.config.policy import MlfqPolicyConfig
from servekit.core.policy.mlfq import MlfqPolicy
from servekit.core.request import RequestId, RequestSpec, Status

SEEDS = range(8)


def mlfq(starvation_s: float | None = None, quantum_s: float = 2.0, prefill_s_per_token: float = 0.0,
         ) -> MlfqPolicyConfig:
    """A step takes a second, so that a quantum of 2 s is two steps."""
    return MlfqPolicyConfig(quantum_s=quantum_s, prefill_s_per_token=prefill_s_per_token, starvation_s=starvation_s)


def level(harness: Harness, name: str) -> int:
    policy = harness.scheduler._parts.policy
    assert isinstance(policy, MlfqPolicy)
    return policy.level_of(harness.scheduler._requests[RequestId(name)])


def test_quanta_double_from_level_to_level() -> None:
    harness = harness_of(mlfq())
    harness.add(make_spec("a", 4, 60))
    levels = []
    for _ in range(40):
        levels.append(level(harness, "a"))
        harness.step()
    # A request goes down when it has used more than its quantum: 2 s, 4 s, 8 s, 16 s.
    assert Counter(levels) == {0: 3, 1: 5, 2: 9, 3: 17, 4: 6}
    assert levels == sorted(levels)


@pytest.mark.parametrize(("prompt", "joined"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (40, 4)])
def test_a_long_prompt_joins_where_its_quantum_is_long_enough(prompt: int, joined: int) -> None:
    harness = harness_of(mlfq(prefill_s_per_token=0.5))
    harness.add(make_spec("a", prompt, 2))
    assert level(harness, "a") == joined


def test_a_newcomer_takes_the_place_of_who_has_run_for_long() -> None:
    harness = harness_of(mlfq())
    starts = play(harness, [make_spec("long", 4, 30), make_spec("short", 4, 2, arrived_s=10.0)])
    assert [start.at_s for start in starts] == [0.0, 10.0]
    assert [harness.finish(name) for name in ("short", "long")] == ["length", "length"]


def test_equal_levels_do_not_displace_each_other() -> None:
    harness = harness_of(mlfq(quantum_s=100.0))
    play(harness, random_specs(random.Random(1), 20))
    assert harness.scheduler.stats.preemptions == 0


def test_who_lost_its_place_goes_on_before_those_that_waited_on_that_level() -> None:
    """`runs` comes down to level 1, where `waits` has been from the beginning, and gives way to `new` on level 0."""
    harness = harness_of(mlfq(prefill_s_per_token=0.5))
    play(harness, [make_spec("waits", 8, 2), make_spec("runs", 4, 8), make_spec("new", 4, 2, arrived_s=5.0)])
    assert served(harness) == ["runs"] * 5 + ["new"] * 2 + ["runs"] * 3 + ["waits"] * 2


def served(harness: Harness) -> list[str]:
    """Who ran in each step, in the only slot."""
    return [plan.items[0].request.request_id for plan in harness.plans]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_goes_down_a_level_for_each_doubling_of_its_time(seed: int) -> None:
    specs = random_specs(random.Random(seed), 30, mean_gap_s=5.0)
    harness = harness_of(mlfq(quantum_s=1.0), slots=2)
    lowest: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    arrivals = sorted(specs, key=lambda spec: -spec.arrived_s)
    while arrivals or harness.scheduler.has_requests:
        while arrivals and arrivals[-1].arrived_s <= harness.now:
            harness.add(arrivals.pop())
        steps.update(item.request.request_id for item in harness.step().items)
        for name in harness.scheduler._requests:
            assert level(harness, name) >= lowest[name]
            lowest[name] = level(harness, name)
    assert max(lowest.values()) > 2
    for name, deepest in lowest.items():
        assert deepest <= math.log2(steps[name]) + 1


def short_ones_forever() -> list[RequestSpec]:
    stream = [make_spec(f"s{index}", 4, 2, arrived_s=2.0 * index) for index in range(150)]
    return [make_spec("long", 4, 40), *stream]


@pytest.mark.parametrize("starvation_s", [10.0, 25.0])
def test_a_request_that_was_not_served_for_long_is_served(starvation_s: float) -> None:
    """Each time for the quantum that it had, and not for longer: 2 s, 4 s, 8 s, 16 s."""
    harness = harness_of(mlfq(starvation_s))
    play(harness, short_ones_forever())
    turns = [(is_long, len(list(steps))) for is_long, steps in groupby(served(harness), key="long".__eq__)]
    assert [length for is_long, length in turns if is_long] == [3, 5, 9, 17, 6]
    gaps = [length for is_long, length in turns[:-1] if not is_long]
    assert all(starvation_s <= gap <= starvation_s + 2 for gap in gaps)


def test_without_a_limit_it_starves() -> None:
    harness = harness_of(mlfq(None))
    play(harness, short_ones_forever(), until_s=300.0)
    assert harness.finish("long") is None


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_waits_on_a_low_level_for_longer_than_the_limit(seed: int) -> None:
    harness = harness_of(mlfq(starvation_s=15.0, prefill_s_per_token=0.1), slots=2)
    arrivals = sorted(random_specs(random.Random(seed), 60, mean_gap_s=4.0), key=lambda spec: -spec.arrived_s)
    served_s: dict[str, float] = defaultdict(float)
    num_promoted = 0
    while arrivals or harness.scheduler.has_requests:
        while arrivals and arrivals[-1].arrived_s <= harness.now:
            served_s[arrivals[-1].request_id] = harness.now
            harness.add(arrivals.pop())
        now = harness.now
        for item in harness.step().items:
            served_s[item.request.request_id] = harness.now
        for name, request in harness.scheduler._requests.items():
            if request.status is Status.waiting and now - served_s[name] >= 15.0:
                assert level(harness, name) == 0
                num_promoted += 1
    assert num_promoted


def test_of_those_that_starve_the_longest_waiting_is_served_first() -> None:
    harness = harness_of(mlfq(starvation_s=20.0, prefill_s_per_token=1.0))
    specs = [make_spec("busy", 2, 45), *(make_spec(f"w{index}", 30 - index, 2, arrived_s=1.0 + index)
                                         for index in range(4))]
    order = names(play(harness, specs))
    assert order == ["busy", "w0", "w1", "w2", "w3"]
