"""The scheduler's decisions, case by case."""

from __future__ import annotations

import pytest

from core.helpers import Harness, answer, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import OnDemandAdmissionConfig
from servekit.core.plan import Bound, Plan, StepResult
from servekit.core.request import FinishReason, RequestId


def shares(plan: Plan) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_tokens) for item in plan.items]


def test_decodes_come_first_and_the_prompt_gets_the_rest_of_the_budget() -> None:
    h = Harness(make_scheduler(max_step_tokens=8, chunk_tokens=None))
    h.add(make_spec("a", 3), make_spec("b", 2))
    assert shares(h.step()) == [("a", 3), ("b", 2)]
    h.add(make_spec("c", 20))
    assert shares(h.step()) == [("a", 1), ("b", 1), ("c", 6)]
    assert shares(h.step()) == [("a", 1), ("b", 1), ("c", 6)]


def test_a_long_prompt_leaves_budget_to_short_ones_behind_it() -> None:
    h = Harness(make_scheduler(max_step_tokens=16, chunk_tokens=8))
    h.add(make_spec("long", 40), make_spec("short", 5))
    assert shares(h.step()) == [("long", 8), ("short", 5)]
    assert shares(h.step()) == [("short", 1), ("long", 8)]


def test_only_the_last_chunk_samples() -> None:
    h = Harness(make_scheduler(chunk_tokens=4))
    h.add(make_spec("a", 10))
    assert [h.step().items[0].samples for _ in range(4)] == [False, False, True, True]
    assert len(h.tokens("a")) == 2


def test_fifo_order_and_slot_limit() -> None:
    h = Harness(make_scheduler(max_num_seqs=2))
    h.add(*(make_spec(name, 4, max_tokens=2) for name in "abcd"))
    plan = h.step()
    assert shares(plan) == [("a", 4), ("b", 4)] and plan.bound is Bound.sequences
    h.step()
    assert shares(h.step()) == [("c", 4), ("d", 4)]


def test_bound_says_what_ran_out() -> None:
    h = Harness(make_scheduler(num_blocks=16, max_step_tokens=8, chunk_tokens=None))
    assert h.step().bound is Bound.nothing_waiting
    h.add(make_spec("a", 30), make_spec("b", 30), make_spec("c", 30))
    assert h.step().bound is Bound.token_budget
    assert Bound.kv_blocks in {h.step().bound for _ in range(12)}
    assert h.scheduler.stats.bound["kv_blocks"] >= 1


def test_a_whole_prompt_is_allocated_at_its_start() -> None:
    h = Harness(make_scheduler(num_blocks=16, chunk_tokens=4))
    h.add(make_spec("a", 33))
    h.step()
    assert h.scheduler.kv.pool.num_used == 9


def test_the_newest_gives_way_and_keeps_its_place() -> None:
    h = Harness(make_scheduler(num_blocks=16, prefix_cache=False, max_model_len=60,
                               admission=OnDemandAdmissionConfig(watermark=0.0)))
    a, b = make_spec("a", 30, max_tokens=30), make_spec("b", 30, max_tokens=30)
    h.add(a, b)
    while not (plan := h.step()).preempted:
        assert h.scheduler.has_requests, "no preemption happened"
    assert [preempted.request.request_id for preempted in plan.preempted] == ["b"]
    assert shares(plan) == [("a", 1)]
    h.add(make_spec("later", 4))
    h.drain()
    starts = [item.request.request_id for plan in h.plans for item in plan.items]
    assert max(i for i, name in enumerate(starts) if name == "b") > starts.index("later") > starts.index("b")
    assert h.tokens("a") == expected_tokens(a, 60) and h.tokens("b") == expected_tokens(b, 60)
    assert h.heard["b"][-1].num_preemptions >= 1
    assert h.scheduler.stats.recomputed_tokens > 0


def test_the_request_that_needs_room_may_be_the_victim() -> None:
    h = Harness(make_scheduler(num_blocks=16, max_model_len=60, prefix_cache=False,
                               admission=OnDemandAdmissionConfig(watermark=0.0)))
    h.add(make_spec("a", 31, max_tokens=20), make_spec("b", 32, max_tokens=20))
    plans = [h.step() for _ in range(12)]
    preempted = [preempted.request.request_id for plan in plans for preempted in plan.preempted]
    assert preempted[:1] == ["b"]
    h.drain()


def test_an_empty_engine_ignores_the_watermark() -> None:
    h = Harness(make_scheduler(num_blocks=16, max_model_len=64, admission=OnDemandAdmissionConfig(watermark=0.5)))
    h.add(make_spec("a", 60, max_tokens=2))
    h.drain()
    assert h.finish("a") == "length"


@pytest.mark.parametrize("length", range(57, 67))
def test_every_length_up_to_the_pool_is_served_or_refused(length: int) -> None:
    h = Harness(make_scheduler(num_blocks=16, max_model_len=64))
    h.add(make_spec("a", length, max_tokens=100))
    h.drain()
    if length < 64:
        assert h.finish("a") == "length" and len(h.tokens("a")) == 64 - length
    else:
        assert h.finish("a") == "too_long" and h.tokens("a") == []
        assert "64" in h.heard["a"][-1].message and str(length) in h.heard["a"][-1].message


def test_the_queue_is_bounded_in_requests_and_a_group_counts_as_one_decision() -> None:
    h = Harness(make_scheduler(max_num_seqs=1, admission=OnDemandAdmissionConfig(max_queue_requests=2)))
    h.add(make_spec("a", 4), make_spec("b", 4))
    h.add(make_spec("c", 4), make_spec("d", 4))
    assert h.finish("c") == "queue_full" and h.finish("d") == "queue_full"
    h.add(make_spec("e", 4))
    assert h.finish("e") is None
    assert h.scheduler.stats.refused["queue_full"] == 2
    h.step()
    h.add(make_spec("f", 4))
    assert h.finish("f") == "queue_full", "the slot is taken and two wait"
    h.drain()
    assert [h.finish(name) for name in "abe"] == ["length"] * 3


def test_an_idle_engine_takes_as_many_as_it_can_run_and_queue() -> None:
    h = Harness(make_scheduler(max_num_seqs=4, admission=OnDemandAdmissionConfig(max_queue_requests=8)))
    h.add(*(make_spec(str(i), 4) for i in range(13)))
    assert h.finish("0") == "queue_full" and "this adds 13" in h.heard["0"][0].message
    h.add(*(make_spec(f"again{i}", 4) for i in range(12)))
    h.drain()
    assert all(h.finish(f"again{i}") == "length" for i in range(12))


def test_the_queue_is_bounded_in_tokens() -> None:
    h = Harness(make_scheduler(admission=OnDemandAdmissionConfig(max_queue_tokens=10)))
    h.add(make_spec("a", 6))
    h.add(make_spec("b", 5))
    assert h.finish("b") == "queue_full" and "max_queue_tokens=10" in h.heard["b"][-1].message


def test_waiting_too_long_ends_a_request_that_never_started() -> None:
    h = Harness(make_scheduler(max_num_seqs=1, admission=OnDemandAdmissionConfig(queue_timeout_s=5)))
    h.add(make_spec("a", 4, max_tokens=20), make_spec("b", 4))
    h.drain()
    assert h.finish("a") == "length", "a request that started has no queue timeout"
    assert h.finish("b") == "queue_timeout" and h.heard["b"][-1].scheduled_s is None
    assert h.heard["b"][-1].at_s == pytest.approx(6.0)


@pytest.mark.parametrize("own, expected_s", [(None, 8), (3, 3), (100, 8)])
def test_the_request_timeout_ends_a_running_request_and_its_own_limit_only_shortens_it(
        own: float | None, expected_s: float) -> None:
    h = Harness(make_scheduler(admission=OnDemandAdmissionConfig(request_timeout_s=8)))
    h.add(make_spec("a", 4, max_tokens=50, timeout_s=own))
    h.drain()
    assert h.finish("a") == "request_timeout"
    assert len(h.tokens("a")) == expected_s
    assert h.scheduler.kv.pool.num_used == 0


def test_both_timeouts_at_the_same_moment_end_a_request_once() -> None:
    limits = OnDemandAdmissionConfig(queue_timeout_s=5, request_timeout_s=5)
    h = Harness(make_scheduler(max_num_seqs=1, admission=limits))
    h.add(make_spec("a", 4, max_tokens=50), make_spec("b", 4), make_spec("c", 4))
    h.drain()
    assert h.finish("b") in ("queue_timeout", "request_timeout") and h.finish("a") == "request_timeout"


def test_abort_while_waiting_running_and_between_plan_and_result() -> None:
    h = Harness(make_scheduler(max_num_seqs=2))
    h.add(*(make_spec(name, 4, max_tokens=9) for name in "abc"))
    h.step()
    h.abort("c")
    h.abort("a")
    assert h.finish("a") == h.finish("c") == "abort"
    plan = h.scheduler.schedule(h.now)
    result = answer(plan)
    h.abort("b")
    heard = len(h.heard["b"])
    assert h.scheduler.update(plan, result, h.now) == []
    assert len(h.heard["b"]) == heard
    assert not h.scheduler.has_requests and h.scheduler.kv.pool.num_used == 0
    h.scheduler.check()


def test_aborting_an_unknown_id_is_nothing() -> None:
    h = Harness(make_scheduler())
    h.abort("nobody")
    assert h.heard == {}


def test_a_stop_token_ends_a_request_and_is_its_last_token() -> None:
    h = Harness(make_scheduler())
    free_run = expected_tokens(make_spec("a", 6, max_tokens=9), 64)
    spec = make_spec("a", 6, max_tokens=9, stop=(free_run[3],))
    h.add(spec)
    h.drain()
    assert h.finish("a") == "stop" and h.tokens("a") == free_run[:4]
    assert h.heard["a"][-1].stop_token_id == free_run[3]


def test_a_failed_request_ends_alone() -> None:
    h = Harness(make_scheduler())
    h.add(make_spec("a", 4), make_spec("b", 4))
    plan = h.scheduler.schedule(0.0)
    sampled = h.device.execute(plan).sampled
    del sampled[RequestId("a")]
    events = h.scheduler.update(plan, StepResult(sampled, failed={RequestId("a"): "NaN"}), 1.0)
    assert [(e.request_id, e.finish and e.finish.value, e.message) for e in events] == [
        ("a", "error", "NaN"), ("b", None, "")]
    h.scheduler.check()
    h.drain()


def test_equal_prompts_in_one_step_do_not_hit_each_other_but_later_ones_do() -> None:
    h = Harness(make_scheduler(max_step_tokens=64, chunk_tokens=None))
    prompt = list(range(100, 117))
    h.add(make_spec("a", prompt), make_spec("b", prompt))
    h.step()
    h.add(make_spec("c", prompt))
    h.drain()
    cached = {name: next(e.num_cached_tokens for e in h.heard[name] if e.num_cached_tokens is not None)
              for name in "abc"}
    assert cached == {"a": 0, "b": 0, "c": 16}
    assert h.tokens("a") == h.tokens("b") == h.tokens("c")
    assert h.scheduler.stats.cached_tokens == 16 and h.scheduler.stats.prefix_queries == 51


def test_the_output_of_one_turn_is_the_cached_prefix_of_the_next() -> None:
    h = Harness(make_scheduler())
    first = make_spec("a", 10, max_tokens=8)
    h.add(first)
    h.drain()
    conversation = [*first.prompt_token_ids, *h.tokens("a"), 5, 6]
    h.add(make_spec("b", conversation))
    h.drain()
    assert h.heard["b"][0].num_cached_tokens == 16


def test_reset_prefix_cache() -> None:
    h = Harness(make_scheduler())
    h.add(make_spec("a", list(range(9))))
    h.drain()
    assert h.scheduler.reset_prefix_cache() > 0
    h.add(make_spec("b", list(range(9))))
    h.drain()
    assert h.heard["b"][0].num_cached_tokens == 0


def test_abort_all_ends_everything_once() -> None:
    h = Harness(make_scheduler(max_num_seqs=2))
    h.add(*(make_spec(name, 4) for name in "abc"))
    h.step()
    events = h.scheduler.abort_all(h.now, FinishReason.shutdown, "the server stops")
    assert {(e.request_id, e.finish) for e in events} == {(name, FinishReason.shutdown) for name in "abc"}
    h.scheduler.check()
    assert not h.scheduler.has_requests
