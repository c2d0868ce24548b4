"""Swapping: requests that give way wait in the host's memory and continue where they were."""

from __future__ import annotations

import dataclasses

import pytest

from core.helpers import BLOCK, Harness, expected_tokens, make_spec
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    PolicyConfig,
    SjfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.config.preemption import SwapPreemptionConfig, VictimRule
from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.kv import KVManager
from servekit.core.plan import PreemptionKind
from servekit.core.policy.fifo import FifoPolicy
from servekit.core.policy.queue import RequestHeap
from servekit.core.preemption.recompute import RecomputePreemption
from servekit.core.preemption.swap import SwapPreemption
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.request import Request, RequestSpec
from servekit.core.scheduler import Scheduler

MAX_MODEL_LEN = 64


def make_scheduler(num_blocks: int, num_host_blocks: int, policy: PolicyConfig | None = None,
                   max_num_seqs: int = 8) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_step_tokens=64, policy=policy or FifoPolicyConfig(),
        prefill=ChunkedPrefillConfig(chunk_tokens=None), preemption=SwapPreemptionConfig(),
        prefix_cache=HashPrefixCacheConfig() if isinstance(policy, LpmPolicyConfig) else NoPrefixCacheConfig())
    return build_scheduler(config, num_blocks, BLOCK, MAX_MODEL_LEN, num_host_blocks)


def crowd() -> list[RequestSpec]:
    return [make_spec(f"r{number}", 9 + number, 20) for number in range(5)]


def drained(harness: Harness, specs: list[RequestSpec]) -> Harness:
    harness.add(*specs)
    harness.drain()
    for one in specs:
        assert harness.tokens(one.request_id) == expected_tokens(one, MAX_MODEL_LEN)
    assert harness.scheduler.kv.host_pool.num_used == harness.scheduler.kv.pool.num_used == 0
    return harness


def test_with_room_on_the_host_nothing_is_computed_twice() -> None:
    stats = drained(Harness(make_scheduler(20, 100)), crowd()).scheduler.stats
    assert stats.preemptions_by_kind.keys() == {PreemptionKind.swap.value}
    assert stats.recomputed_tokens == 0 and stats.prompt_tokens == sum(len(one.prompt_token_ids) for one in crowd())
    assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0


def test_what_does_not_fit_on_the_host_is_recomputed_and_counted_so() -> None:
    stats = drained(Harness(make_scheduler(20, 8)), crowd()).scheduler.stats
    assert stats.preemptions_by_kind[PreemptionKind.swap.value] > 0
    assert stats.preemptions_by_kind[PreemptionKind.recompute.value] > 0
    assert stats.recomputed_tokens > 0


def test_without_host_blocks_everything_is_recomputed() -> None:
    stats = drained(Harness(make_scheduler(20, 0)), crowd()).scheduler.stats
    assert stats.preemptions_by_kind.keys() == {PreemptionKind.recompute.value}
    assert stats.swapped_out_blocks == 0


def test_a_request_that_has_computed_nothing_is_not_swapped() -> None:
    kv = KVManager(8, BLOCK, NoPrefixIndex(), num_host_blocks=8)
    request = Request(make_spec("a", 9), MAX_MODEL_LEN)
    kv.start(request, 9, 0)
    preemption = SwapPreemption(RecomputePreemption(VictimRule.policy, only_on_deadlock=False))
    eviction = preemption.evict(request, kv)
    assert eviction.kind is PreemptionKind.recompute and eviction.copies == ()
    assert kv.pool.num_used == kv.host_pool.num_used == 0


@pytest.mark.parametrize("policy", [FifoPolicyConfig(), SjfPolicyConfig(), FairPolicyConfig(), VtcPolicyConfig(),
                                    LpmPolicyConfig()], ids=lambda config: config.kind.value)
def test_swapped_requests_come_back_before_anything_new_starts(policy: PolicyConfig) -> None:
    harness = Harness(make_scheduler(8, 20, policy))
    harness.add(make_spec("a", 12, 16), make_spec("b", 12, 12))
    while not harness.plans or not harness.plans[-1].preempted:
        harness.step()
    swapped = harness.plans[-1].preempted[0].request
    harness.add(make_spec("small", 2, 1))  # There is a block for it all the time.
    waited = 0
    while not (plan := harness.step()).swap_in:
        assert all(item.request.request_id != "small" for item in plan.items)
        waited += 1
    assert waited > 1 and plan.items[-2].request is swapped and plan.items[-1].request.request_id == "small"
    harness.drain()


@pytest.mark.parametrize("leave", ["abort", "timeout"])
def test_a_swapped_request_that_leaves_frees_its_host_blocks_once(leave: str) -> None:
    harness = Harness(make_scheduler(8, 20))
    first = make_spec("a", 12, 16)
    harness.add(first, make_spec("b", 12, 16, timeout_s=8.0 if leave == "timeout" else None))
    while not harness.plans or not harness.plans[-1].preempted:
        harness.step()
    assert harness.scheduler.kv.host_pool.num_used > 0
    if leave == "abort":
        harness.abort("b")
    else:
        while harness.finish("b") is None:
            harness.step()
    assert harness.scheduler.kv.host_pool.num_used == 0
    harness.drain()
    assert harness.finish("b") == {"abort": "abort", "timeout": "request_timeout"}[leave]
    assert harness.tokens("a") == expected_tokens(first, MAX_MODEL_LEN)


class Displacing(FifoPolicy):
    """In order of arrival, and a lower class gives way: so one that has just started can be in the way of the next."""

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        return candidate.priority < victim.priority


def test_nobody_gives_way_in_the_step_that_brings_it_back() -> None:
    built = make_scheduler(8, 20)
    parts = dataclasses.replace(built._parts, policy=Displacing(RequestHeap()))
    harness = Harness(Scheduler(parts, built.kv, 64, MAX_MODEL_LEN))
    specs = [make_spec("a", 12, 12, priority=1), make_spec("b", 12, 16, priority=1)]
    harness.add(*specs)
    while not harness.plans or not harness.plans[-1].preempted:
        harness.step()
    while harness.finish("a") is None:
        harness.step()
    specs.append(make_spec("urgent", 28, 3))
    harness.add(specs[-1])
    plan = harness.step()
    assert plan.swap_in and not plan.swap_out
    plan = harness.step()
    assert plan.swap_out and [item.request.request_id for item in plan.items] == ["urgent"]
    harness.drain()
    for one in specs:
        assert harness.tokens(one.request_id) == expected_tokens(one, MAX_MODEL_LEN)
