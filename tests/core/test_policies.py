"""Orders by length and by prefix, and the queue beneath them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.helpers import make_spec
from core.traces import harness_of, names, overtakings, play, random_specs
from servekit.config.errors import ConfigError
from servekit.config.policy import (
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    Prediction,
    PriorityPolicyConfig,
    SjfPolicyConfig,
    SrtfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.core.plan import PreemptionKind
from servekit.core.policy.prediction import LearnedPredictor, MaxTokensPredictor, OraclePredictor, Predictions
from servekit.core.policy.queue import RequestHeap
from servekit.core.request import Request, RequestSpec

SEEDS = range(8)


def request_of(spec: RequestSpec, output: int = 0) -> Request:
    request = Request(spec, 1000)
    request.token_ids += [0] * output
    return request


# The queue.

@given(st.lists(st.tuples(st.sampled_from(["push", "push", "remove", "read"]), st.integers(0, 50)), max_size=200))
def test_a_heap_gives_its_requests_in_order(calls: list[tuple[str, int]]) -> None:
    heap, members = RequestHeap(), dict[tuple[float, ...], Request]()
    for index, (call, number) in enumerate(calls):
        if call == "push":
            rank = (float(number), float(index))
            members[rank] = request_of(make_spec(f"r{index}", 1))
            heap.push(members[rank], rank)
        elif call == "remove" and members:
            heap.remove(members.pop(sorted(members)[number % len(members)]))
        else:
            expected = [members[rank] for rank in sorted(members)]
            assert list(islice(heap.in_order(0.0), number)) == expected[:number]
        heap.check()
        assert len(heap) == len(members)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sets(st.integers(0, 39)))
def test_the_request_that_was_just_given_may_be_removed(ranks: list[int], removed: set[int]) -> None:
    heap = RequestHeap()
    for index, rank in enumerate(ranks):
        heap.push(request_of(make_spec(f"r{index}", 1)), (rank, index))
    expected = list(heap.in_order(0.0))
    seen = []
    for place, request in enumerate(heap.in_order(0.0)):
        seen.append(request)
        if place in removed:
            heap.remove(request)
    assert seen == expected
    assert list(heap.in_order(0.0)) == [request for place, request in enumerate(expected) if place not in removed]


def test_what_is_left_over_of_removed_requests_is_cleared_away() -> None:
    heap = RequestHeap()
    stays = request_of(make_spec("stays", 1))
    heap.push(stays, (-1, 0))
    for index in range(1000):
        heap.push(request := request_of(make_spec(f"r{index}", 1)), (0, index))
        heap.remove(request)
    assert len(heap._heap) <= 2 + 64 + 1
    assert list(heap.in_order(0.0)) == [stays]


# Predictions.

def test_an_oracle_is_the_requests_own_word_and_its_limit_without_one() -> None:
    oracle = OraclePredictor()
    assert oracle.output_tokens(request_of(make_spec("a", 5, 100, predicted=7))) == 7
    assert oracle.output_tokens(request_of(make_spec("b", 5, 100, predicted=700))) == 100
    assert oracle.output_tokens(request_of(make_spec("c", 5, 100))) == 100
    assert MaxTokensPredictor().output_tokens(request_of(make_spec("d", 5, 100, predicted=7))) == 100


def test_learned_lengths_are_those_of_prompts_of_about_the_same_length() -> None:
    learned = LearnedPredictor()
    assert learned.output_tokens(request_of(make_spec("a", 20, 100))) == 100
    for name, output in (("b", 10), ("c", 20), ("d", 0)):
        learned.learn(request_of(make_spec(name, 20, 100), output))
    assert learned.output_tokens(request_of(make_spec("e", 31, 100))) == 15
    assert learned.output_tokens(request_of(make_spec("f", 31, 12))) == 12
    assert learned.output_tokens(request_of(make_spec("g", 32, 100))) == 100


def test_what_is_learned_later_does_not_change_a_prediction() -> None:
    predictions = Predictions(LearnedPredictor())
    waiting, done = request_of(make_spec("a", 20, 100)), request_of(make_spec("b", 20, 100), output=3)
    assert predictions.output_tokens(waiting) == 100
    predictions.finished(done)
    assert predictions.output_tokens(waiting) == 100
    assert predictions.output_tokens(request_of(make_spec("c", 20, 100))) == 3


# Shortest job first.

def sjf(ageing: float, prediction: Prediction = Prediction.oracle) -> SjfPolicyConfig:
    return SjfPolicyConfig(prediction=prediction, prefill_weight=0.5, ageing_tokens_per_s=ageing)


def work(spec: RequestSpec) -> float:
    assert spec.predicted_output_tokens is not None
    return 0.5 * len(spec.prompt_token_ids) + spec.predicted_output_tokens


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ageing", [0.5, 3.0, 20.0])
def test_sjf_lets_nobody_be_overtaken_for_longer_than_ageing_allows(seed: int, ageing: float) -> None:
    rng = random.Random(seed)
    specs = random_specs(rng, 60)
    overtaken = overtakings(play(harness_of(sjf(ageing), slots=rng.randint(1, 3)), specs), specs)
    assert overtaken
    for winner, loser in overtaken:
        assert winner.arrived_s <= loser.arrived_s + (work(loser) - work(winner)) / ageing + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_sjf_without_ageing_starts_the_least_work(seed: int) -> None:
    specs = random_specs(random.Random(seed), 40)
    starts = play(harness_of(sjf(0.0)), specs)
    for place, start in enumerate(starts):
        waiting = [later.spec for later in starts[place:] if later.spec.arrived_s <= start.at_s]
        assert work(start.spec) == min(map(work, waiting))


@pytest.mark.parametrize("seed", SEEDS)
def test_sjf_with_much_ageing_is_fifo(seed: int) -> None:
    specs = random_specs(random.Random(seed), 40)
    by_age, by_arrival = harness_of(sjf(1e6), slots=2), harness_of(FifoPolicyConfig(), slots=2)
    assert play(by_age, specs) == play(by_arrival, specs)
    assert shares(by_age.plans) == shares(by_arrival.plans)


def shares(plans: Sequence[object]) -> list[list[tuple[str, int]]]:
    return [[(item.request.request_id, item.num_tokens) for item in plan.items] for plan in plans]  # type: ignore[attr-defined]


def short_ones_forever() -> list[RequestSpec]:
    """One long request, and from then on as many short ones as one slot can serve."""
    stream = [make_spec(f"s{index}", 4, 4, arrived_s=4.0 * index, predicted=4) for index in range(100)]
    return [*stream, make_spec("long", 40, 60, arrived_s=1.0, predicted=60)]


def test_a_long_request_starves_without_ageing_and_not_with_it() -> None:
    without = play(harness_of(sjf(0.0)), short_ones_forever(), until_s=400.0)
    aged = play(harness_of(sjf(1.0)), short_ones_forever(), until_s=400.0)
    assert "long" not in names(without)
    assert len(without) == 100
    started_s = next(start.at_s for start in aged if start.spec.request_id == "long")
    assert started_s <= 1.0 + (80 - 6) / 1.0 + 8.0


def test_sjf_learns_which_prompts_get_short_answers() -> None:
    """Prompts of 8 tokens stop after 2 tokens, though they allow as many as those of 3."""
    harness = harness_of(sjf(0.0, Prediction.learned))
    lesson = make_spec("lesson", 8, 20)
    first = play(harness_of(FifoPolicyConfig()), [lesson])
    assert names(first) == ["lesson"]
    stops = tuple(range(50021))
    specs = [make_spec("lesson", 8, 60, stop=stops), make_spec("a", 3, 60, arrived_s=100.0),
             make_spec("busy", 3, 10, arrived_s=99.0), make_spec("b", 8, 60, arrived_s=101.0)]
    assert names(play(harness, specs)) == ["lesson", "busy", "b", "a"]


# Shortest remaining time first.

def srtf(margin: float = 0.0, min_run: int = 0) -> SrtfPolicyConfig:
    return SrtfPolicyConfig(prediction=Prediction.oracle, prefill_weight=0.5, margin_tokens=margin,
                            min_run_tokens=min_run)


def test_a_much_shorter_request_takes_a_running_ones_place_and_it_goes_on_later() -> None:
    harness = harness_of(srtf())
    specs = [make_spec("long", 8, 50, predicted=50), make_spec("short", 8, 5, arrived_s=10.0, predicted=5)]
    starts = play(harness, specs)
    assert [start.at_s for start in starts] == [0.0, 10.0]
    assert harness.scheduler.stats.preemptions_by_kind == {PreemptionKind.pause.value: 1}
    assert [harness.finish(name) for name in ("short", "long")] == ["length", "length"]


def test_a_request_that_is_nearly_done_stays() -> None:
    harness = harness_of(srtf())
    specs = [make_spec("long", 8, 50, predicted=50), make_spec("short", 8, 5, arrived_s=45.0, predicted=5)]
    assert [start.at_s for start in play(harness, specs)] == [0.0, 50.0]


def test_only_what_is_shorter_by_the_margin_takes_a_place() -> None:
    """At 10 s the long one has 40 tokens left and one without keys; a newcomer has 4 of prompt and its output."""
    for output, displaces in ((16, True), (17, False)):
        harness = harness_of(srtf(margin=21.0))
        play(harness, [make_spec("long", 8, 50, predicted=50),
                       make_spec("short", 5, output, arrived_s=10.0, predicted=output)])
        assert (harness.scheduler.stats.preemptions > 0) is displaces


def test_nobody_loses_its_place_right_after_a_start() -> None:
    starts = play(harness_of(srtf(min_run=7)), [make_spec("long", 8, 50, predicted=50),
                                                make_spec("short", 8, 5, arrived_s=2.0, predicted=5)])
    assert [start.at_s for start in starts] == [0.0, 7.0]


def test_nobody_loses_its_place_right_after_it_went_on() -> None:
    """The long one has run for 10 s, gives way for 5 s, goes on at 15 s, and cannot give way again before 22 s."""
    shorts = [make_spec(f"short{at_s:g}", 8, 5, arrived_s=at_s, predicted=5) for at_s in (10.0, 16.0)]
    starts = play(harness_of(srtf(min_run=7)), [make_spec("long", 8, 50, predicted=50), *shorts])
    assert [start.at_s for start in starts] == [0.0, 10.0, 22.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_places_do_not_change_to_and_fro(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_specs(rng, 60, mean_gap_s=4.0)
    harness = harness_of(srtf(min_run=rng.randint(0, 3)), slots=rng.randint(1, 3))
    play(harness, specs)
    assert 0 < harness.scheduler.stats.preemptions <= len(specs)


# Longest prefix match.

@pytest.mark.parametrize("seed", SEEDS)
def test_lpm_with_nothing_cached_is_fifo(seed: int) -> None:
    specs = random_specs(random.Random(seed), 40)
    by_prefix = harness_of(LpmPolicyConfig(), slots=2, prefix_cache=True)
    assert play(by_prefix, specs) == play(harness_of(FifoPolicyConfig(), slots=2, prefix_cache=True), specs)


def prefix_specs() -> list[RequestSpec]:
    """While `busy` runs, three wait whose prompts have 0, 2 and 4 blocks in common with what `first` left behind."""
    shared = list(range(100, 120))
    return [make_spec("first", shared, 2), make_spec("busy", 3, 20, arrived_s=3.0),
            make_spec("none", 12, 2, arrived_s=4.0), make_spec("half", [*shared[:8], 1, 2, 3], 2, arrived_s=5.0),
            make_spec("most", [*shared[:16], 4, 5], 2, arrived_s=6.0)]


def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    starts = play(harness_of(LpmPolicyConfig(), prefix_cache=True), prefix_specs())
    assert names(starts) == ["first", "busy", "most", "half", "none"]


def test_lpm_is_fifo_while_more_wait_than_it_ranks() -> None:
    starts = play(harness_of(LpmPolicyConfig(max_ranked=2), prefix_cache=True), prefix_specs())
    assert names(starts) == ["first", "busy", "none", "most", "half"]


# All of them.

@pytest.mark.parametrize("policy", [sjf(0.0), LpmPolicyConfig(), VtcPolicyConfig(),
                                    PriorityPolicyConfig(preempt=False)], ids=lambda policy: policy.kind.value)
def test_a_request_that_lost_its_memory_comes_before_later_ones(policy: PolicyConfig) -> None:
    """Two that fit one by one and not together: the second gives way, and no newcomer passes it, be it shorter or
    with a longer cached prefix."""
    harness = harness_of(policy, slots=2, num_blocks=17, prefix_cache=True)
    specs = [make_spec("a", range(28), 22, predicted=22), make_spec("b", 20, 30, predicted=30),
             *(make_spec(f"later{index}", range(28), 2, arrived_s=5.0 + index, predicted=2) for index in range(5))]
    play(harness, specs)
    assert harness.scheduler.stats.preemptions >= 1
    resumed = next(step for step, plan in enumerate(harness.plans) if plan.preempted)
    after = [item.request.request_id for plan in harness.plans[resumed + 1:] for item in plan.items]
    assert after.index("b") < min(after.index(name) for name in after if name.startswith("later"))


@pytest.mark.parametrize(("make", "key"), [
    (lambda: SjfPolicyConfig(ageing_tokens_per_s=-1.0), "ageing_tokens_per_s"),
    (lambda: SrtfPolicyConfig(margin_tokens=float("nan")), "margin_tokens"),
    (lambda: PriorityPolicyConfig(ageing_s=0.0), "ageing_s"),
    (lambda: PriorityPolicyConfig(class_slots={0: 0}), "class_slots.0"),
    (lambda: VtcPolicyConfig(prompt_weight=0.0, output_weight=0.0), "output_weight"),
    (lambda: MlfqPolicyConfig(quantum_growth=1.0), "quantum_growth"),
    (lambda: MlfqPolicyConfig(quantum_s=0.0), "quantum_s"),
    (lambda: LpmPolicyConfig(max_ranked=0), "max_ranked"),
])
def test_settings_without_sense_are_refused(make: object, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.policy\.{key}="):
        make()  # type: ignore[operator]
