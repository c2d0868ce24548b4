"""Greedy output does not depend on company, chunks, preemption or cached prefixes: exact in float64 on a CPU.

The reference is each request alone, on an engine without prefix cache that computes whole prompts.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from engine.helpers import Heard, dummy_model, make_engine, run, spec
from servekit.config.admission import WorstCaseAdmissionConfig
from servekit.config.preemption import (
    NoPreemptionConfig,
    PreemptionConfig,
    RecomputePreemptionConfig,
    SwapPreemptionConfig,
)
from servekit.config.prefix_cache import (
    HashPrefixCacheConfig,
    NoPrefixCacheConfig,
    PrefixCacheConfig,
    RadixPrefixCacheConfig,
)
from servekit.core.plan import PreemptionKind
from servekit.core.request import RequestSpec
from servekit.engine.engine import Engine
from servekit.model.loader import load_spec

VOCAB = 512


def random_prompts(seed: int, count: int, low: int, high: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def alone(prompts: list[list[int]], max_tokens: int = 24) -> list[list[int]]:
    heard = run(make_engine(), [spec(prompt, max_tokens) for prompt in prompts], together=False)
    return [one.tokens for one in heard]


def outputs(heard: list[Heard]) -> list[list[int]]:
    return [one.tokens for one in heard]


def test_a_batch_of_sixteen_equals_each_alone() -> None:
    prompts = random_prompts(1, 16, 1, 120)
    heard = run(make_engine(), [spec(prompt, 24) for prompt in prompts])
    assert outputs(heard) == alone(prompts)
    assert len({tuple(tokens) for tokens in outputs(heard)}) > 1, "the model says the same to everybody"


@pytest.mark.parametrize("chunk_tokens", [1, 15, 16, 17, None])
def test_chunked_prompts_equal_whole_ones_beside_running_decodes(chunk_tokens: int | None) -> None:
    prompts = random_prompts(2, 6, 30, 150)
    engine = make_engine(chunk_tokens=chunk_tokens, max_step_tokens=96)
    assert outputs(run(engine, [spec(prompt, 24) for prompt in prompts])) == alone(prompts)


def test_preempted_requests_continue_as_if_nothing_had_happened() -> None:
    prompts = random_prompts(3, 8, 20, 60)
    engine = make_engine(num_kv_blocks=11, block_size=8, max_model_len=88, chunk_tokens=16)
    heard = run(engine, [spec(prompt, 24) for prompt in prompts])
    assert engine.stats().preemptions_total > 0, "the pool was meant to be too small"
    assert outputs(heard) == alone(prompts)


def test_preemption_with_cached_prefixes() -> None:
    shared = random_prompts(4, 1, 32, 33)[0]
    prompts = [shared + tail for tail in random_prompts(5, 10, 1, 30)]
    engine = make_engine(num_kv_blocks=13, block_size=8, max_model_len=96, chunk_tokens=16, prefix_cache=True)
    heard = run(engine, [spec(prompt, 24) for prompt in prompts])
    assert engine.stats().preemptions_total > 0 and engine.stats().cached_tokens_total > 0
    assert outputs(heard) == alone(prompts)


@pytest.mark.parametrize("shared", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_a_prefix_hit_at_a_block_border_and_one_beside_it(shared: int) -> None:
    first, second = random_prompts(6, 2, 60, 61)
    warm, reader = spec(first, 24), spec(first[:shared] + second[shared:], 24)
    engine = make_engine(prefix_cache=True)
    heard = run(engine, [warm, reader], together=False)
    assert heard[1].events[0].num_cached_tokens == shared // 16 * 16
    assert [heard[1].tokens] == alone([list(reader.prompt_token_ids)])


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_token(length: int) -> None:
    prompt = random_prompts(7, 1, length, length + 1)[0]
    engine = make_engine(prefix_cache=True)
    cold, hot = run(engine, [spec(prompt, 24), spec(prompt, 24)], together=False)
    assert hot.events[0].num_cached_tokens == length - 16
    assert cold.tokens == hot.tokens == alone([prompt])[0]


def test_equal_prompts_at_once_on_a_cold_cache() -> None:
    prompt = random_prompts(8, 1, 300, 301)[0]
    engine = make_engine(prefix_cache=True, chunk_tokens=64)
    heard = run(engine, [spec(prompt, 24) for _ in range(8)])
    assert outputs(heard) == alone([prompt]) * 8


def test_a_prefix_stays_right_after_its_first_reader_was_stopped_or_aborted() -> None:
    prompt = random_prompts(9, 1, 40, 41)[0]
    reference = alone([prompt])[0]
    engine = make_engine(prefix_cache=True)
    stopped = run(engine, [spec(prompt, 24, stop_token_ids=(reference[5],))])[0]
    assert stopped.tokens == reference[:reference.index(reference[5]) + 1]
    left = spec(prompt, 24)
    engine.add([left])
    engine.step()
    engine.abort([left.request_id])
    engine.step()
    assert run(engine, [spec(prompt, 24)])[0].tokens == reference


def test_many_prefixes_under_eviction_and_aborts() -> None:
    rng = random.Random(10)
    shared = random_prompts(11, 3, 24, 40)
    prompts = [rng.choice(shared) + tail for tail in random_prompts(12, 40, 1, 20)]
    engine = make_engine(num_kv_blocks=24, block_size=8, max_model_len=96, prefix_cache=True, chunk_tokens=16)
    specs = [spec(prompt, 8) for prompt in prompts]
    heard: dict[str, Heard] = {one.request_id: Heard() for one in specs}
    aborted = set()
    waiting: list[RequestSpec] = list(specs)
    while waiting or engine.has_work:
        for one in waiting[:2]:
            engine.add([one])
        waiting = waiting[2:]
        if rng.random() < 0.2:
            victim = rng.choice(specs)
            if not heard[victim.request_id].events or heard[victim.request_id].last.finish is None:
                aborted.add(victim.request_id)
            engine.abort([victim.request_id])
        for event in engine.step().events:
            heard[event.request_id].events.append(event)
        engine.check()
    for one, reference in zip(specs, alone(prompts, 8), strict=True):
        tokens = heard[one.request_id].tokens
        assert tokens == (reference[:len(tokens)] if one.request_id in aborted else reference)


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
], ids=str)
def test_sampled_output_does_not_depend_on_the_batch_either(sampling: dict[str, float]) -> None:
    prompts = random_prompts(13, 6, 5, 50)
    alone_ = run(make_engine(), [spec(p, 20, seed=i, **sampling) for i, p in enumerate(prompts)], together=False)
    engine = make_engine(num_kv_blocks=9, block_size=8, max_model_len=72, chunk_tokens=8, prefix_cache=True)
    crowd = run(engine, [spec(p, 20, seed=i, **sampling) for i, p in enumerate(prompts)])
    assert outputs(crowd) == outputs(alone_)
    assert engine.stats().preemptions_total > 0


def test_seeds_differ_and_repeat() -> None:
    prompt = random_prompts(14, 1, 10, 11)[0]
    engine = make_engine()
    drawn = [run(engine, [spec(prompt, 20, temperature=1.0, seed=seed)])[0].tokens for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_prompt_logprobs_are_the_same_whole_chunked_preempted_and_beside_a_cache() -> None:
    prompts = random_prompts(15, 5, 30, 60)
    reference = run(make_engine(), [spec(p, 20, prompt_logprobs=2) for p in prompts], together=False)
    engine = make_engine(num_kv_blocks=12, block_size=8, max_model_len=96, chunk_tokens=9, prefix_cache=True)
    run(engine, [spec(p, 4) for p in prompts])
    heard = run(engine, [spec(p, 20, prompt_logprobs=2) for p in prompts])
    assert engine.stats().preemptions_total > 0
    for prompt, expected, got in zip(prompts, reference, heard, strict=True):
        scores, expected_scores = got.events[0].prompt_logprobs, expected.events[0].prompt_logprobs
        assert scores is not None and expected_scores is not None and len(scores) == len(prompt)
        assert scores[0] is None and [s.token_id for s in scores[1:] if s] == prompt[1:]
        for score, wanted in zip(scores[1:], expected_scores[1:], strict=True):
            assert score is not None and wanted is not None
            assert score.rank == wanted.rank and [t for t, _ in score.top] == [t for t, _ in wanted.top]
            assert score.logprob == pytest.approx(wanted.logprob, abs=1e-9)


# Every way to give way, with every prefix cache, in a pool that is much too small.

SMALL_BLOCK = 8
SMALL_BLOCK_BYTES = SMALL_BLOCK * load_spec(dummy_model()).kv_bytes_per_token(8)

RECOMPUTE = RecomputePreemptionConfig()
SWAP = SwapPreemptionConfig(swap_space_bytes=64 * SMALL_BLOCK_BYTES)
SWAP_LITTLE = SwapPreemptionConfig(swap_space_bytes=5 * SMALL_BLOCK_BYTES)
NO_PREEMPTION = NoPreemptionConfig()
KINDS: dict[PreemptionConfig, set[PreemptionKind]] = {
    RECOMPUTE: {PreemptionKind.recompute}, SWAP: {PreemptionKind.swap},
    SWAP_LITTLE: {PreemptionKind.swap, PreemptionKind.recompute}, NO_PREEMPTION: set()}
"""What must become of requests that give way; with `SWAP_LITTLE` some fit on the host and the others fall back."""

GIVING_WAY = pytest.mark.parametrize("preemption", [
    pytest.param(RECOMPUTE, id="recompute"), pytest.param(SWAP, id="swap"),
    pytest.param(SWAP_LITTLE, id="swap-little"), pytest.param(NO_PREEMPTION, id="none")])
PREFIX_CACHES = pytest.mark.parametrize(
    "prefix_cache", [NoPrefixCacheConfig(), HashPrefixCacheConfig(), RadixPrefixCacheConfig()],
    ids=lambda config: config.kind.value)


def crowded_engine(preemption: PreemptionConfig, prefix_cache: PrefixCacheConfig) -> Engine:
    admission = WorstCaseAdmissionConfig() if preemption is NO_PREEMPTION else None
    return make_engine(num_kv_blocks=13, block_size=SMALL_BLOCK, max_model_len=96, chunk_tokens=16,
                       preemption=preemption, prefix_cache=prefix_cache, admission=admission)


def crowd(**sampling: Any) -> list[RequestSpec]:
    """Ten prompts, five of which begin with the same 19 tokens."""
    shared = random_prompts(16, 1, 19, 20)[0]
    prompts = random_prompts(17, 10, 10, 40)
    return [spec(shared + prompt if number % 2 else prompt, 20, **(sampling | {"seed": number}))
            for number, prompt in enumerate(prompts)]


@cache
def crowd_alone(temperature: float = 0.0) -> list[list[int]]:
    return outputs(run(make_engine(), crowd(temperature=temperature), together=False))


def check_kinds(engine: Engine, preemption: PreemptionConfig) -> None:
    stats = engine._scheduler.stats
    assert stats.preemptions_by_kind.keys() == {kind.value for kind in KINDS[preemption]}
    swaps = PreemptionKind.swap in KINDS[preemption]
    assert (stats.swapped_out_blocks > 0) == (stats.swapped_in_blocks > 0) == swaps
    assert (stats.recomputed_tokens > 0) == (PreemptionKind.recompute in KINDS[preemption])


@GIVING_WAY
@PREFIX_CACHES
def test_giving_way_changes_no_token(preemption: PreemptionConfig, prefix_cache: PrefixCacheConfig) -> None:
    engine = crowded_engine(preemption, prefix_cache)
    assert outputs(run(engine, crowd())) == crowd_alone()
    check_kinds(engine, preemption)


@GIVING_WAY
def test_giving_way_changes_no_draw(preemption: PreemptionConfig) -> None:
    engine = crowded_engine(preemption, RadixPrefixCacheConfig())
    assert outputs(run(engine, crowd(temperature=1.0))) == crowd_alone(1.0)
    check_kinds(engine, preemption)


@PREFIX_CACHES
def test_aborts_of_swapped_requests_leave_the_others_as_they_are(prefix_cache: PrefixCacheConfig) -> None:
    engine, specs = crowded_engine(SWAP, prefix_cache), crowd()
    heard: dict[str, Heard] = {one.request_id: Heard() for one in specs}
    aborted: set[str] = set()
    for one in specs:
        engine.add([one])
    while engine.has_work:
        for event in engine.step().events:
            heard[event.request_id].events.append(event)
        engine.check()
        swapped = [request for request in engine._scheduler._requests.values() if request.host_block_ids]
        if swapped and len(aborted) < 4:
            aborted.add(swapped[-1].request_id)
            engine.abort([swapped[-1].request_id])
            engine.check()
    assert len(aborted) > 1, "requests were meant to be aborted while they were swapped out"
    for one, reference in zip(specs, crowd_alone(), strict=True):
        tokens = heard[one.request_id].tokens
        assert tokens == (reference[:len(tokens)] if one.request_id in aborted else reference)
    kv = engine._scheduler.kv
    assert kv.pool.num_used == kv.host_pool.num_used == 0
