"""The prefill components: which steps compute prompts, and how much of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import Harness, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.errors import ConfigError
from servekit.config.prefill import (
    ChunkedPrefillConfig,
    InterleavedPrefillConfig,
    PrefillConfig,
    SeparatePrefillConfig,
    SplitFusePrefillConfig,
    WholePrefillConfig,
)
from servekit.core.plan import Plan
from servekit.core.prefill.base import Turn
from servekit.core.prefill.chunked import ChunkedPrefill
from servekit.core.prefill.whole import Patience, WholePrefill
from servekit.core.request import RequestSpec
from servekit.core.scheduler import Scheduler

MAX_MODEL_LEN = 64
NO_LIMITS = OnDemandAdmissionConfig(max_queue_requests=None, queue_timeout_s=None, request_timeout_s=None)


def shares(plan: Plan) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_tokens) for item in plan.items]


def scheduler(prefill: PrefillConfig, *, max_step_tokens: int = MAX_MODEL_LEN, max_num_seqs: int = 8,
              num_blocks: int = 200, admission: AdmissionConfig = NO_LIMITS) -> Scheduler:
    return make_scheduler(prefill=prefill, max_step_tokens=max_step_tokens, max_num_seqs=max_num_seqs,
                          num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, prefix_cache=False, admission=admission)


def random_run(data: st.DataObject, h: Harness) -> list[RequestSpec]:
    """Requests of any length at any time, all served."""
    specs: list[RequestSpec] = []
    for _ in range(data.draw(st.integers(1, 15))):
        for _ in range(data.draw(st.integers(0, 3))):
            prompt = data.draw(st.integers(1, MAX_MODEL_LEN - 1))
            specs.append(make_spec(f"r{len(specs)}", prompt, max_tokens=data.draw(st.integers(1, 30)), arrived_s=h.now))
            h.add(specs[-1])
        h.step()
    h.drain()
    for spec in specs:
        assert h.tokens(spec.request_id) == expected_tokens(spec, MAX_MODEL_LEN)
    return specs


def has_decodes(plan: Plan) -> bool:
    return any(item.is_decode for item in plan.items)


def has_prompts(plan: Plan) -> bool:
    return any(not item.is_decode for item in plan.items)


# Whole.

def test_whole_prompts_go_first_and_alone() -> None:
    h = Harness(scheduler(WholePrefillConfig()))
    h.add(make_spec("a", 10))
    assert shares(h.step()) == [("a", 10)]
    assert shares(h.step()) == [("a", 1)]
    h.add(make_spec("b", 20), make_spec("c", 44), make_spec("d", 1))
    assert shares(h.step()) == [("b", 20), ("c", 44)]
    assert shares(h.step()) == [("d", 1)], "the budget held no more, and the decodes wait again"
    assert shares(h.step()) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_a_prompt_is_never_cut_and_nobody_overtakes_it() -> None:
    h = Harness(scheduler(WholePrefillConfig()))
    h.add(make_spec("a", 40), make_spec("b", 30), make_spec("c", 5))
    assert shares(h.step()) == [("a", 40)]
    assert shares(h.step()) == [("b", 30), ("c", 5)]


def test_decodes_run_when_no_prompt_can_start() -> None:
    h = Harness(scheduler(WholePrefillConfig(), max_num_seqs=1))
    h.add(make_spec("a", 10, max_tokens=3), make_spec("b", 10))
    assert [shares(h.step()) for _ in range(4)] == [[("a", 10)], [("a", 1)], [("a", 1)], [("b", 10)]]


def test_mixed_whole_prompts_share_a_step_with_decodes() -> None:
    h = Harness(scheduler(WholePrefillConfig(mix_decodes=True)))
    h.add(make_spec("a", 10))
    h.step()
    h.add(make_spec("b", 20, max_tokens=3), make_spec("c", 63), make_spec("d", 1))
    assert shares(h.step()) == [("a", 1), ("b", 20)], "c does not fit beside the decode"
    assert [shares(h.step()) for _ in range(2)] == [[("a", 1), ("b", 1)]] * 2, "nobody overtakes it"
    assert shares(h.step()) == [("c", 63), ("d", 1)]
    assert h.finish("c") == "length"


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([None, 0.5, 1.2]))
def test_no_step_cuts_a_prompt_or_mixes_it_with_decodes_unless_asked(
        data: st.DataObject, mix_decodes: bool, ratio: float | None) -> None:
    config = WholePrefillConfig(mix_decodes=mix_decodes, waiting_served_ratio=ratio, max_decode_steps=3)
    h = Harness(scheduler(config, num_blocks=data.draw(st.sampled_from([20, 200]))))
    random_run(data, h)
    for plan in h.plans:
        assert all(item.samples for item in plan.items)
        assert mix_decodes or not (has_decodes(plan) and has_prompts(plan))


def test_new_prompts_wait_until_enough_of_them_do() -> None:
    prefill = WholePrefill(patience=Patience(waiting_served_ratio=0.5, max_decode_steps=100))
    turns = {(running, waiting): prefill.turn(running, 0, waiting) for running in range(6) for waiting in range(4)}
    prompts = {counts for counts, turn in turns.items() if turn is Turn.prompts}
    assert prompts == {(running, waiting) for running, waiting in turns if waiting >= max(1, running // 2)}


@pytest.mark.parametrize("mix_decodes", [False, True])
def test_but_no_longer_than_so_many_decode_steps(mix_decodes: bool) -> None:
    config = WholePrefillConfig(mix_decodes=mix_decodes, waiting_served_ratio=0.5, max_decode_steps=3)
    h = Harness(scheduler(config))
    h.add(*(make_spec(name, 4, max_tokens=30) for name in "abcd"))
    h.step()
    h.add(make_spec("e", 4, max_tokens=30))
    assert [has_prompts(h.step()) for _ in range(4)] == [False, False, False, True]
    h.add(make_spec("f", 4))
    assert [has_prompts(h.step()) for _ in range(2)] == [False, False], "the count has begun again"
    h.add(make_spec("g", 4))
    assert shares(h.step())[-2:] == [("f", 4), ("g", 4)], "two wait for five"


# Separate.

def test_a_step_of_prompts_takes_one_bucket() -> None:
    h = Harness(scheduler(SeparatePrefillConfig(buckets_tokens=(16, 8))))
    lengths = {"a": 5, "b": 12, "c": 8, "d": 30, "e": 16, "f": 17}
    h.add(*(make_spec(name, length, max_tokens=20) for name, length in lengths.items()))
    steps = [shares(h.step()) for _ in range(5)]
    assert steps[0::2] == [[("a", 5), ("c", 8)], [("b", 12), ("e", 16)], [("d", 30), ("f", 17)]]
    assert steps[1::2] == [[("a", 1), ("c", 1)], [("a", 1), ("c", 1), ("b", 1), ("e", 1)]]


@pytest.mark.parametrize("decode_steps", [0, 1, 3])
def test_at_least_so_many_decode_steps_lie_between_prompts(decode_steps: int) -> None:
    h = Harness(scheduler(SeparatePrefillConfig(buckets_tokens=(8,), decode_steps=decode_steps)))
    h.add(make_spec("a", 4, max_tokens=20), make_spec("b", 10, max_tokens=20), make_spec("c", 4, max_tokens=20))
    steps = [has_prompts(h.step()) for _ in range(decode_steps + 2)]
    assert steps == [True] + [False] * decode_steps + [True]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_buckets_and_gaps_hold_under_any_load(data: st.DataObject) -> None:
    decode_steps = data.draw(st.integers(0, 3))
    h = Harness(scheduler(SeparatePrefillConfig(buckets_tokens=(8, 24), decode_steps=decode_steps),
                          num_blocks=data.draw(st.sampled_from([20, 200]))))
    random_run(data, h)
    gap = decode_steps
    for before, plan in zip([Plan((), 0), *h.plans], h.plans, strict=False):
        assert not (has_decodes(plan) and has_prompts(plan))
        if has_prompts(plan):
            lengths = [item.start + item.num_tokens for item in plan.items]
            assert len({(length > 8) + (length > 24) for length in lengths}) == 1
            assert gap >= decode_steps or not _go_on(before, plan), "decodes were due"
        if plan.items:
            gap = 0 if has_prompts(plan) else gap + 1


def _go_on(before: Plan, after: Plan) -> bool:
    """Whether a request of the one step was there to decode in the other."""
    gone = {preempted.request for preempted in after.preempted}
    return any(item.samples and item.start + item.num_tokens < item.request.num_tokens - 1
               and item.request not in gone for item in before.items)


# Interleaved.

def test_a_chunk_then_decodes_then_the_next_chunk() -> None:
    h = Harness(scheduler(InterleavedPrefillConfig(chunk_tokens=8, decode_steps=2)))
    h.add(make_spec("a", 4, max_tokens=20))
    assert shares(h.step()) == [("a", 4)]
    h.add(make_spec("b", 20, max_tokens=20), make_spec("c", 3, max_tokens=20))
    decode = [("a", 1)]
    assert [shares(h.step()) for _ in range(9)] == [
        decode, decode, [("b", 8)], decode, decode, [("b", 8)], decode, decode, [("b", 4), ("c", 3)]]
    assert shares(h.step()) == [("a", 1), ("b", 1), ("c", 1)]


def test_the_last_token_of_a_prompt_is_a_chunk_too() -> None:
    h = Harness(scheduler(InterleavedPrefillConfig(chunk_tokens=8, decode_steps=1)))
    h.add(make_spec("a", 4, max_tokens=20))
    h.step()
    h.add(make_spec("b", 9))
    decode = [("a", 1)]
    assert [shares(h.step()) for _ in range(5)] == [decode, [("b", 8)], decode, [("b", 1)], [("a", 1), ("b", 1)]]


def test_chunks_follow_each_other_when_nobody_decodes() -> None:
    h = Harness(scheduler(InterleavedPrefillConfig(chunk_tokens=8, decode_steps=5)))
    h.add(make_spec("a", 20))
    assert [shares(h.step()) for _ in range(3)] == [[("a", 8)], [("a", 8)], [("a", 4)]]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 16))
def test_a_chunk_never_exceeds_its_size(data: st.DataObject, chunk_tokens: int) -> None:
    h = Harness(scheduler(InterleavedPrefillConfig(chunk_tokens=chunk_tokens),
                          num_blocks=data.draw(st.sampled_from([20, 200]))))
    random_run(data, h)
    for plan in h.plans:
        assert not (has_decodes(plan) and has_prompts(plan))
        assert plan.num_tokens <= chunk_tokens or not has_prompts(plan)


# SplitFuse.

@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(8, 40))
def test_every_pass_with_enough_prompt_tokens_equals_the_budget(data: st.DataObject, budget: int) -> None:
    h = Harness(scheduler(SplitFusePrefillConfig(), max_step_tokens=budget, num_blocks=16 * 60, max_num_seqs=8))
    todo: dict[str, int] = {}
    num_full = 0
    for number in range(data.draw(st.integers(1, 30))):
        if len(todo) < 7 and data.draw(st.booleans()):
            spec = make_spec(f"r{number}", data.draw(st.integers(1, 60)), max_tokens=4)
            h.add(spec)
            todo[spec.request_id] = len(spec.prompt_token_ids)
        at_hand = sum(todo.values())
        plan = h.step()
        assert plan.num_tokens == min(budget, at_hand)
        num_full += plan.num_tokens == budget
        for item in plan.items:
            name = item.request.request_id
            todo[name] = max(1, todo[name] - item.num_tokens)
        todo = {name: left for name, left in todo.items() if h.finish(name) is None}
    h.drain()


def test_short_prompts_are_joined_and_long_ones_cut() -> None:
    h = Harness(scheduler(SplitFusePrefillConfig(), max_step_tokens=16))
    h.add(make_spec("a", 6), make_spec("b", 24), make_spec("c", 3), make_spec("d", 9))
    assert [shares(h.step()) for _ in range(3)] == [
        [("a", 6), ("b", 10)], [("a", 1), ("b", 14), ("c", 1)], [("a", 1), ("b", 1), ("c", 2), ("d", 9)]]


# Chunks of a multiple.

@pytest.mark.parametrize(("remaining", "budget", "granted"), [
    (100, 64, 16), (100, 15, 12), (100, 4, 4), (100, 3, 0), (15, 64, 15), (15, 14, 12), (3, 3, 3), (16, 64, 16)])
def test_a_cut_chunk_is_rounded_down(remaining: int, budget: int, granted: int) -> None:
    assert ChunkedPrefill(18, 4).grant(remaining, budget) == granted
    assert ChunkedPrefill(None, 4).grant(remaining, budget) == (granted if budget < 18 else min(remaining, 64))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_prompt_gets_on_beside_as_many_decodes_as_there_can_be(data: st.DataObject) -> None:
    """The tightest settings: a full batch of decodes leaves one multiple."""
    multiple, max_num_seqs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    max_step_tokens = multiple + max_num_seqs - 1
    config = ChunkedPrefillConfig(chunk_tokens=None, chunk_multiple_tokens=multiple)
    h = Harness(scheduler(config, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens))
    random_run(data, h)
    for plan in h.plans:
        prompts = [item for item in plan.items if not item.is_decode]
        assert all(item.samples or item.num_tokens % multiple == 0 for item in prompts)
        running = [item for item in plan.items if item.start > 0]
        assert prompts or len(running) == len(plan.items)


def test_short_requests_cannot_keep_a_long_prompt_waiting() -> None:
    """Seven decodes leave one multiple of the budget, and new short prompts come without end."""
    config = ChunkedPrefillConfig(chunk_tokens=None, chunk_multiple_tokens=4)
    h = Harness(scheduler(config, max_step_tokens=11))
    h.add(make_spec("long", 40, max_tokens=1))
    for number in range(40):
        h.add(make_spec(f"short{number}", 1, max_tokens=8, arrived_s=h.now))
        h.step()
    assert h.finish("long") == "length"


# Settings that would keep a prompt waiting for ever.

@pytest.mark.parametrize("config", [WholePrefillConfig(), SeparatePrefillConfig()])
def test_a_step_must_hold_the_longest_whole_prompt(config: PrefillConfig) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_step_tokens=63: must be at least the model's length of 64 "
                                          rf"tokens.*scheduler/prefill={config.kind.value}.*max_step_tokens=64"):
        scheduler(config, max_step_tokens=63)
    h = Harness(scheduler(config))
    h.add(make_spec("a", 63))
    h.drain()
    assert h.finish("a") == "length"


def test_a_step_must_hold_one_multiple_beside_the_decodes() -> None:
    config = ChunkedPrefillConfig(chunk_tokens=16, chunk_multiple_tokens=16)
    with pytest.raises(ConfigError, match=r"chunk_multiple_tokens=16: must not exceed 13.*max_step_tokens=23 or"):
        scheduler(config, max_step_tokens=20)
    scheduler(config, max_step_tokens=23)


def test_a_step_must_hold_a_chunk() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.prefill\.chunk_tokens=65: must not exceed .*=64"):
        scheduler(InterleavedPrefillConfig(chunk_tokens=65))


@pytest.mark.parametrize("make", [
    lambda: ChunkedPrefillConfig(chunk_tokens=8, chunk_multiple_tokens=9),
    lambda: InterleavedPrefillConfig(decode_steps=0), lambda: WholePrefillConfig(waiting_served_ratio=-0.1),
    lambda: WholePrefillConfig(max_decode_steps=0), lambda: SeparatePrefillConfig(buckets_tokens=(0, 8)),
    lambda: SeparatePrefillConfig(decode_steps=-1)])
def test_values_without_a_meaning_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.prefill"):
        make()  # type: ignore[operator]
