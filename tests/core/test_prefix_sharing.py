"""Sharing within a batch: a prefix that one request is computing is waited for and not computed again."""

from __future__ import annotations

import pytest

from core.helpers import BLOCK, Harness, expected_tokens, make_spec
from servekit.config.admission import OnDemandAdmissionConfig
from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, PrefixCacheConfig, RadixPrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.request import RequestSpec

MAX_MODEL_LEN = 64
SHARED = list(range(1000, 1040))
CACHES = [HashPrefixCacheConfig(), RadixPrefixCacheConfig()]


def make_harness(cache: PrefixCacheConfig, num_blocks: int = 200, chunk_tokens: int | None = None,
                 max_num_seqs: int = 8) -> Harness:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_step_tokens=512, prefix_cache=cache,
                             admission=OnDemandAdmissionConfig(queue_timeout_s=None),
                             prefill=ChunkedPrefillConfig(chunk_tokens=chunk_tokens))
    return Harness(build_scheduler(config, num_blocks, BLOCK, MAX_MODEL_LEN))


def eight(shared: list[int] = SHARED, salts: bool = False) -> list[RequestSpec]:
    return [make_spec(f"r{number}", [*shared, number, 1, 2], 4, salt=f"s{number}" if salts else "")
            for number in range(8)]


def check_outputs(harness: Harness, specs: list[RequestSpec]) -> None:
    for one in specs:
        assert harness.tokens(one.request_id) == expected_tokens(one, MAX_MODEL_LEN)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.kind.value)
@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_a_prefix_that_arrives_eight_times_at_once_is_computed_once(cache: PrefixCacheConfig,
                                                                    chunk_tokens: int | None) -> None:
    harness, specs = make_harness(cache, chunk_tokens=chunk_tokens), eight()
    harness.add(*specs)
    harness.drain()
    check_outputs(harness, specs)
    assert harness.scheduler.stats.prompt_tokens == 43 + 7 * 3
    assert harness.scheduler.stats.cached_tokens == 7 * 40


@pytest.mark.parametrize("cache", [HashPrefixCacheConfig(share_in_batch_tokens=None),
                                   RadixPrefixCacheConfig(share_in_batch_tokens=None)],
                         ids=lambda cache: cache.kind.value)
def test_without_sharing_it_is_computed_eight_times_at_once(cache: PrefixCacheConfig) -> None:
    harness, specs = make_harness(cache), eight()
    harness.add(*specs)
    assert len(harness.step().items) == 8
    harness.drain()
    check_outputs(harness, specs)
    assert harness.scheduler.stats.prompt_tokens == 8 * 43


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.kind.value)
def test_other_salts_and_shorter_prefixes_are_not_waited_for(cache: PrefixCacheConfig) -> None:
    for specs in (eight(salts=True), eight(shared=SHARED[:28])):
        harness = make_harness(cache)
        harness.add(*specs)
        assert len(harness.step().items) == 8
        harness.drain()
        check_outputs(harness, specs)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.kind.value)
def test_when_the_one_who_computes_it_is_aborted_the_next_takes_over(cache: PrefixCacheConfig) -> None:
    harness, specs = make_harness(cache, chunk_tokens=8), eight()
    harness.add(*specs)
    assert [item.request.request_id for item in harness.step().items] == ["r0"]
    harness.abort("r0")
    assert [item.request.request_id for item in harness.step().items] == ["r1"]
    harness.drain()
    check_outputs(harness, specs[1:])
    assert harness.scheduler.stats.prompt_tokens == 8 + (43 - 8) + 6 * 3, "what r0 had done is still there"


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.kind.value)
def test_when_the_one_who_computes_it_is_preempted_nobody_waits_for_ever(cache: PrefixCacheConfig) -> None:
    harness = make_harness(cache, num_blocks=17, chunk_tokens=2)
    specs = [make_spec("older", 20, 30), *eight()]
    harness.add(specs[0])
    for _ in range(11):
        harness.step()  # It decodes from here on, and needs the blocks that the next one takes.
    harness.add(*specs[1:])
    preempted: list[str] = []
    while harness.scheduler.has_requests:
        plan = harness.step()
        preempted += [one.request.request_id for one in plan.preempted if one.request.num_output == 0]
    assert "r0" in preempted, "the first of the eight was meant to be preempted in its prompt"
    check_outputs(harness, specs)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.kind.value)
def test_a_request_that_shares_nothing_passes_those_who_wait_for_a_prefix(cache: PrefixCacheConfig) -> None:
    harness, specs = make_harness(cache), [*eight(), make_spec("other", 9)]
    harness.add(*specs)
    assert [item.request.request_id for item in harness.step().items] == ["r0", "other"]
    harness.drain()
    check_outputs(harness, specs)
