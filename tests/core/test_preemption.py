"""Who gives way when KV blocks run out, that everybody gets on all the same, and preemption that never happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import Harness, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import OnDemandAdmissionConfig, WorstCaseAdmissionConfig
from servekit.config.preemption import NoPreemptionConfig, PreemptionConfig, RecomputePreemptionConfig, VictimRule
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig, SplitFusePrefillConfig, WholePrefillConfig
from servekit.core.kv import KVManager
from servekit.core.plan import Plan
from servekit.core.policy.base import PolicyDefaults
from servekit.core.policy.queue import Rank
from servekit.core.preemption.none import NoPreemption
from servekit.core.preemption.victims import choose_victim
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.request import Request, RequestSpec
from servekit.core.scheduler import Scheduler

MAX_MODEL_LEN = 64
NO_LIMITS = OnDemandAdmissionConfig(watermark=0.0, max_queue_requests=None, queue_timeout_s=None,
                                    request_timeout_s=None)


def scheduler(preemption: PreemptionConfig, *, num_blocks: int = 16, max_num_seqs: int = 8,
              prefill: PrefillConfig | None = None) -> Scheduler:
    return make_scheduler(preemption=preemption, num_blocks=num_blocks, max_num_seqs=max_num_seqs, prefill=prefill,
                          max_step_tokens=64, max_model_len=MAX_MODEL_LEN, prefix_cache=False, admission=NO_LIMITS)


def victims(plan: Plan) -> list[str]:
    return [preempted.request.request_id for preempted in plan.preempted]


def running_request(name: str, *, arrived: int, prompt: int, output: int, blocks: int) -> Request:
    request = Request(make_spec(name, prompt, max_tokens=60), MAX_MODEL_LEN)
    request.sequence_number = arrived
    request.token_ids += [0] * output
    request.block_ids = list(range(blocks))
    return request


class LastByName(PolicyDefaults):
    """A policy that would serve last whose name comes last."""

    def place(self, request: Request) -> Rank:
        return tuple(map(ord, request.request_id))


# The rules.

@pytest.mark.parametrize(("rule", "victim"), [
    (VictimRule.policy, "z"), (VictimRule.newest, "m"), (VictimRule.fewest_output, "k"), (VictimRule.largest, "b")])
def test_each_rule_has_its_victim(rule: VictimRule, victim: str) -> None:
    running = [running_request("z", arrived=3, prompt=9, output=7, blocks=4),
               running_request("b", arrived=2, prompt=4, output=9, blocks=6),
               running_request("first", arrived=0, prompt=30, output=1, blocks=8),
               running_request("c", arrived=4, prompt=5, output=3, blocks=3),
               running_request("k", arrived=1, prompt=6, output=3, blocks=5),
               running_request("m", arrived=5, prompt=8, output=5, blocks=6 if rule is VictimRule.newest else 2)]
    assert choose_victim(rule, running, LastByName()).request_id == victim  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", VictimRule)
def test_who_is_alone_is_the_victim(rule: VictimRule) -> None:
    alone = running_request("a", arrived=3, prompt=9, output=7, blocks=4)
    assert choose_victim(rule, [alone], LastByName()) is alone  # type: ignore[arg-type]


def test_equals_give_way_in_reverse_order_of_arrival() -> None:
    running = [running_request(str(number), arrived=number, prompt=4, output=2, blocks=2) for number in (2, 0, 3, 1)]
    for rule in (VictimRule.fewest_output, VictimRule.largest):
        assert choose_victim(rule, running, LastByName()).request_id == "3"  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "victim"), [
    (VictimRule.policy, "c"), (VictimRule.newest, "c"), (VictimRule.fewest_output, "b"), (VictimRule.largest, "b")])
def test_the_scheduler_follows_the_rule(rule: VictimRule, victim: str) -> None:
    h = Harness(scheduler(RecomputePreemptionConfig(victim=rule), prefill=SplitFusePrefillConfig()))
    h.add(make_spec("a", 20, max_tokens=40), make_spec("b", 25, max_tokens=30), make_spec("c", 6, max_tokens=40))
    while not (plan := h.step()).preempted:
        assert h.scheduler.has_requests, "no preemption happened"
    assert victims(plan) == [victim]
    h.drain()


# Progress.

PREFILLS = [ChunkedPrefillConfig(chunk_tokens=6), WholePrefillConfig(), SplitFusePrefillConfig()]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(VictimRule), st.booleans(), st.sampled_from(PREFILLS))
def test_everybody_is_served_whoever_gives_way(data: st.DataObject, rule: VictimRule, only_on_deadlock: bool,
                                               prefill: PrefillConfig) -> None:
    config = RecomputePreemptionConfig(victim=rule, only_on_deadlock=only_on_deadlock)
    h = Harness(scheduler(config, num_blocks=data.draw(st.integers(16, 24)), prefill=prefill))
    specs: list[RequestSpec] = []
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            specs.append(make_spec(f"r{len(specs)}", data.draw(st.integers(1, 40)),
                                   max_tokens=data.draw(st.integers(1, 60)), arrived_s=h.now))
            h.add(specs[-1])
        h.step()
    h.drain(limit=3000)
    for spec in specs:
        assert h.tokens(spec.request_id) == expected_tokens(spec, MAX_MODEL_LEN)


@pytest.mark.parametrize("only_on_deadlock", [False, True])
@pytest.mark.parametrize("rule", VictimRule)
def test_a_stream_of_others_cannot_keep_one_from_its_end(rule: VictimRule, only_on_deadlock: bool) -> None:
    """The long prompt takes 20 steps and most of the memory; others come as fast as they can be served.

    Were the first to arrive not spared, largest and fewest_output would choose the long one again and again.
    """
    h = Harness(scheduler(RecomputePreemptionConfig(victim=rule, only_on_deadlock=only_on_deadlock),
                          prefill=ChunkedPrefillConfig(chunk_tokens=2)))
    h.add(*(make_spec(f"before{number}", 3, max_tokens=10) for number in range(3)))
    h.step()
    h.add(make_spec("long", 40, max_tokens=20, arrived_s=h.now))
    for number in range(300):
        if h.finish("long") is not None:
            break
        if h.scheduler.num_waiting < 4:
            h.add(make_spec(f"r{number}", 3, max_tokens=10, arrived_s=h.now))
        h.step()
    assert h.finish("long") == "length"
    assert h.scheduler.stats.preemptions > 0 or only_on_deadlock, "memory was not short"


# Only on deadlock.

def test_a_decode_without_a_block_waits_for_one() -> None:
    """The prompts take 15 of 16 blocks, and a takes the last one: b waits until c has ended."""
    h = Harness(scheduler(RecomputePreemptionConfig(only_on_deadlock=True), prefill=SplitFusePrefillConfig()))
    h.add(make_spec("a", 28, max_tokens=8), make_spec("b", 20, max_tokens=8), make_spec("c", 10, max_tokens=3))
    steps = ["".join(item.request.request_id for item in h.step().items) for _ in range(5)]
    assert steps == ["abc", "ac", "ac", "ab", "ab"]
    h.drain()
    assert h.scheduler.stats.preemptions == 0
    assert all(h.finish(name) == "length" for name in "abc")


@pytest.mark.parametrize(("rule", "victim"), [(VictimRule.newest, "c"), (VictimRule.largest, "b")])
def test_when_nobody_can_go_on_the_victim_gives_way(rule: VictimRule, victim: str) -> None:
    h = Harness(scheduler(RecomputePreemptionConfig(victim=rule, only_on_deadlock=True)))
    h.add(make_spec("a", 20, max_tokens=30), make_spec("b", 24, max_tokens=30), make_spec("c", 16, max_tokens=30))
    while not (plan := h.step()).preempted:
        assert len(plan.items) > 0
    assert victims(plan) == [victim]
    assert {item.request.request_id for item in plan.items} == set("abc") - {victim}
    h.drain()


# None.

def test_without_preemption_a_victim_is_an_error() -> None:
    request = running_request("a", arrived=0, prompt=4, output=1, blocks=2)
    with pytest.raises(AssertionError, match="admission has reserved"):
        NoPreemption().victim([request], LastByName())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="nothing may take its place"):
        NoPreemption().evict(request, KVManager(4, 4, NoPrefixIndex()))


def test_the_worst_case_reserved_nobody_gives_way() -> None:
    h = Harness(make_scheduler(preemption=NoPreemptionConfig(), num_blocks=20, max_step_tokens=64, prefix_cache=False,
                               admission=WorstCaseAdmissionConfig(queue_timeout_s=None)))
    h.add(*(make_spec(f"r{number}", 10, max_tokens=5 * number + 1) for number in range(8)))
    h.drain()
    assert h.scheduler.stats.preemptions == 0
    assert all(h.finish(f"r{number}") == "length" for number in range(8))
