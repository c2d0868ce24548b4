"""A KV cache in eight-bit floats, end to end: what it holds, what it takes, and what it changes in the answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.helpers import Heard, build, dummy_model, make_config, run, spec
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig, SwapPreemptionConfig
from servekit.config.schema import Device, DType, KVDType
from servekit.engine import build as engine_build
from servekit.engine.build import BuiltEngine, resolve_memory
from servekit.engine.resolve import resolve
from servekit.kernels.fp8_linear import to_e4m3
from servekit.model.loader import load_spec
from servekit.runner.device import DeviceFacts
from servekit.runner.kv_tensors import KVTensors

MOST_LOGPROB_CHANGE = 0.025
"""Of a prompt's tokens in the tiny model: three times what is measured."""


def prompts(seed: int, count: int, low: int, high: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(512) for _ in range(dice.randrange(low, high))] for _ in range(count)]


def built(kv_dtype: KVDType = KVDType.fp8, **options: object) -> BuiltEngine:
    config = make_config(**options)  # type: ignore[arg-type]
    return build(replace(config, memory=replace(config.memory, kv_dtype=kv_dtype)))


def scores(heard: list[Heard]) -> list[list[float]]:
    """Of the tokens that came: a wrong key changes these sooner than the tokens."""
    return [[scored.logprob for event in one.events for scored in event.logprobs] for one in heard]


@pytest.mark.parametrize("preemption", [RecomputePreemptionConfig(), SwapPreemptionConfig()], ids=["recompute", "swap"])
def test_company_chunks_prefixes_and_preemption_change_no_token(preemption: PreemptionConfig) -> None:
    shared = prompts(1, 1, 32, 33)[0]
    asked = [shared + tail for tail in prompts(2, 10, 1, 30)]
    alone = run(built().engine, [spec(prompt, 24, logprobs=0) for prompt in asked], together=False)
    engine = built(num_kv_blocks=13, block_size=8, max_model_len=96, chunk_tokens=16, prefix_cache=True,
                   preemption=preemption).engine
    heard = run(engine, [spec(prompt, 24, logprobs=0) for prompt in asked])
    assert [one.tokens for one in heard] == [one.tokens for one in alone]
    for mine, expected in zip(scores(heard), scores(alone), strict=True):
        assert len(mine) == 24 and mine == pytest.approx(expected, abs=1e-9)
    stats = engine.stats()
    assert stats.preemptions_total > 0 and stats.cached_tokens_total > 0


def test_it_holds_the_keys_and_values_rounded_and_takes_a_byte_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[KVTensors] = []

    def watched(*arguments: object) -> KVTensors:
        caches.append(allocate(*arguments))  # type: ignore[arg-type]
        for layer in caches[-1]:
            for cache in layer:
                cache.zero_()
        return caches[-1]

    allocate = engine_build.allocate_kv
    monkeypatch.setattr(engine_build, "allocate_kv", watched)
    exact, rounded = built(KVDType.float64), built()
    for one in (exact, rounded):
        run(one.engine, [spec(prompts(3, 1, 40, 41)[0], 1)])
    (exact_first, *_), (rounded_first, *_) = caches  # What the first layer writes hangs on no other key or value.
    for wide, narrow in zip(exact_first, rounded_first, strict=True):
        assert wide.abs().sum() > 0 and torch.equal(as_bytes(narrow), as_bytes(to_e4m3(wide)))
    taken = sum(cache.nbytes for layer in caches[1] for cache in layer)
    assert rounded.facts.kv_bytes == taken == exact.facts.kv_bytes // 8
    assert (rounded.facts.kv_dtype, rounded.facts.kernels) == ("fp8", "reference")


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def test_the_planner_finds_room_for_twice_the_blocks_of_a_cache_in_bfloat16() -> None:
    model, device = load_spec(dummy_model()), DeviceFacts(Device.cpu, "cpu", 2, 2**27, 2**27, 2**27)
    config = make_config(dtype=DType.bfloat16, num_kv_blocks=None, max_model_len=2048, max_num_seqs=512)
    counts = []
    for kv_dtype in (KVDType.bfloat16, KVDType.fp8):
        asked = replace(config, memory=replace(config.memory, kv_dtype=kv_dtype))
        counts.append(resolve_memory(asked, model, device, resolve(asked, model, device)).num_kv_blocks)
    assert counts[0] > 100 and counts[1] // 2 == counts[0]


def test_log_probabilities_of_a_prompt_are_near_those_with_an_exact_cache() -> None:
    asked = prompts(4, 4, 60, 120)

    def logprobs(kv_dtype: KVDType) -> list[float]:
        heard = run(built(kv_dtype).engine, [spec(prompt, 1, prompt_logprobs=0) for prompt in asked])
        return [scored.logprob for one in heard for event in one.events for scored in event.prompt_logprobs or ()
                if scored is not None]

    apart = [abs(mine - exact) for mine, exact in zip(logprobs(KVDType.fp8), logprobs(KVDType.float64), strict=True)]
    assert len(apart) == sum(map(len, asked)) - len(asked) and 0 < max(apart) < MOST_LOGPROB_CHANGE
