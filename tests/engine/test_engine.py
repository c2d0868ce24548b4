"""The step loop: failures stay with their request, refusals and aborts are heard, counters add up."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.helpers import build, make_config, make_engine, run, spec
from servekit.config.errors import ConfigError
from servekit.config.schema import Config, DType, EngineConfig, KVDType, MemoryConfig, ModelConfig, Quantization
from servekit.core.request import FinishReason
from servekit.engine import build as engine_build
from servekit.engine.build import ReconfigurableEngine
from servekit.engine.messages import EngineStats


def test_stop_tokens_and_min_tokens() -> None:
    engine = make_engine()
    free = run(engine, [spec([1, 2, 3], 12)])[0].tokens
    stopped = run(engine, [spec([1, 2, 3], 12, stop_token_ids=(free[2],))])[0]
    assert stopped.tokens == free[:free.index(free[2]) + 1] and stopped.last.finish is FinishReason.stop
    later = run(engine, [spec([1, 2, 3], 12, stop_token_ids=(free[2],), min_tokens=8)])[0]
    assert len(later.tokens) >= 8 and free[2] not in later.tokens[:8]


def test_a_second_end_of_sequence_token_stops_too() -> None:
    heard = run(make_engine(), [spec([5], 12, stop_token_ids=(400, 401), logit_bias={401: 100.0})])[0]
    assert heard.tokens == [401] and heard.last.stop_token_id == 401


def test_logprobs_are_the_models_own_and_sum_to_one() -> None:
    heard = run(make_engine(), [spec([1, 2, 3], 5, logprobs=512, temperature=0.0)])[0]
    for event in heard.events:
        (scored,) = event.logprobs
        assert scored.token_id == event.token_ids[0] and scored.rank == 1
        assert sum(math.exp(value) for _, value in scored.top) == pytest.approx(1.0)
        assert scored.top[0] == (scored.token_id, scored.logprob)


def test_a_weight_that_is_not_a_number_fails_its_request_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine_build.load_decoder

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        decoder = load(*args, **kwargs)
        decoder.weights.embedding[7] = float("nan")
        return decoder

    monkeypatch.setattr(engine_build, "load_decoder", poisoned)
    # The head is the embedding in this model, so a NaN row there reaches every request's logits.
    engine = make_engine()
    heard = run(engine, [spec([7, 8], 5), spec([9, 10], 5)])
    assert [one.last.finish for one in heard] == [FinishReason.error] * 2
    assert "not finite" in heard[0].last.message and heard[0].tokens == []
    assert engine.stats().num_running == 0 and engine.stats().kv_blocks_used == 0


def test_only_the_request_with_the_bad_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine_build.load_decoder

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        decoder = load(*args, **kwargs)
        embedding = decoder.weights.embedding.clone()
        embedding[7] = float("inf")
        object.__setattr__(decoder.weights, "embedding", embedding)  # The head keeps the sound matrix.
        return decoder

    monkeypatch.setattr(engine_build, "load_decoder", poisoned)
    engine = make_engine()
    bad, good = run(engine, [spec([7, 8], 5), spec([9, 10], 5)])
    assert bad.last.finish is FinishReason.error and good.last.finish is FinishReason.length
    assert good.tokens == run(make_engine(), [spec([9, 10], 5)])[0].tokens


def test_refusals_and_aborts_are_events_of_the_next_step() -> None:
    engine = make_engine(max_num_seqs=1, max_queue_requests=1)
    first, waiting, second = spec([1], 50), spec([3], 50), spec([2], 50)
    engine.add([first, waiting])
    engine.add([second])
    events = {event.request_id: event for event in engine.step().events}
    assert events[second.request_id].finish is FinishReason.queue_full
    engine.abort([first.request_id, waiting.request_id])
    assert [event.finish for event in engine.step().events] == [FinishReason.abort] * 2
    assert not engine.has_work


def test_counters_add_up() -> None:
    engine = make_engine(prefix_cache=True)
    prompt = list(range(40))
    run(engine, [spec(prompt, 6), spec(prompt, 6)], together=False)
    stats = engine.stats()
    assert stats.prompt_tokens_total == 40 + 8 and stats.cached_tokens_total == 32
    assert stats.generation_tokens_total == 12 and stats.prefix_queries_total == 80
    assert stats.breakdown is not None
    assert stats.num_steps_total == sum(stats.breakdown.bounds.values()) == 12
    assert stats.execute_s_total > 0 and stats.kv_blocks_used == 0


def test_counters_by_name_are_told_now_and_then_and_in_the_end() -> None:
    engine = make_engine()
    engine.add([spec([1, 2, 3], 40)])
    told = []
    while engine.has_work:
        told.append(engine.step().stats.breakdown)
    assert told[0] is not None and told[-1] is not None
    assert told[-1].bounds == {"nothing_waiting": 40}
    assert told.count(None) > len(told) / 2
    assert EngineStats(breakdown=None).after(EngineStats(breakdown=told[0])).breakdown is told[0]
    assert EngineStats(breakdown=told[-1]).after(EngineStats(breakdown=told[0])).breakdown is told[-1]


@pytest.mark.parametrize("memory, model, key, words", [
    (MemoryConfig(num_kv_blocks=8), ModelConfig("dummy:tiny", max_model_len=512), "model.max_model_len",
     ["512", "128"]),
    (MemoryConfig(num_kv_blocks=10**9), ModelConfig("dummy:tiny"), "memory.num_kv_blocks", ["1000000000", "GB"]),
    (MemoryConfig(), ModelConfig("dummy:tiny", max_model_len=10**6), "model.max_model_len", ["1000000", "2048"]),
    (MemoryConfig(kv_dtype=KVDType.float16), ModelConfig("dummy:tiny"), "memory.kv_dtype", ["float16", "float32"]),
])
def test_settings_that_do_not_fit_are_refused_with_numbers(memory: MemoryConfig, model: ModelConfig, key: str,
                                                           words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config(model=model, memory=memory))
    assert caught.value.key == key and "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_too_many_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.threads=10000"):
        build(make_config(engine=EngineConfig(threads=10000)))


def test_a_length_that_only_the_model_declares_is_lowered_and_said() -> None:
    built = build(make_config(num_kv_blocks=8, max_model_len=None))
    assert built.facts.max_model_len == 128
    assert any("2048 -> 128" in note for note in built.facts.notes)


@pytest.mark.parametrize("length", range(124, 131))
def test_every_length_up_to_the_advertised_capacity(length: int) -> None:
    engine = make_engine(num_kv_blocks=8, max_model_len=None)
    heard = run(engine, [spec([3] * length, 100)])[0]
    if length < 128:
        assert heard.last.finish is FinishReason.length and len(heard.tokens) == 128 - length
    else:
        assert heard.last.finish is FinishReason.too_long and "128" in heard.last.message


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.float16])
def test_every_number_format_runs(dtype: DType) -> None:
    heard = run(make_engine(dtype=dtype), [spec([1, 2, 3], 6), spec([4], 6)])
    assert [len(one.tokens) for one in heard] == [6, 6]


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Puts back how many threads torch computes with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_what_was_asked_for(torch_threads: None) -> None:
    built = build(make_config(engine=EngineConfig(threads=1)))
    assert torch.get_num_threads() == 1 == built.facts.threads


@pytest.mark.parametrize(("quantization", "expected"), [(Quantization.int8, 1), (Quantization.none, 2)])
def test_torch_has_threads_only_where_it_has_products_to_compute(quantization: Quantization, expected: int,
                                                                 torch_threads: None) -> None:
    config = make_config(dtype=DType.float32, engine=EngineConfig(threads=2))
    built = build(replace(config, model=replace(config.model, quantization=quantization)))
    assert (torch.get_num_threads(), built.facts.threads) == (expected, 2)


def test_a_change_of_settings_gives_the_cache_back_before_the_collector_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, caches = engine_build.allocate_kv, []

    def watched(*given, **options):  # type: ignore[no-untyped-def]
        cache = allocate(*given, **options)
        caches.append(weakref.ref(cache[0][0]))
        return cache

    monkeypatch.setattr(engine_build, "allocate_kv", watched)
    host = ReconfigurableEngine(make_config(), build(make_config()))
    run(host.engine, [spec([1, 2, 3]), spec([4, 5])])
    gc.disable()
    try:
        host.reconfigure(make_config(num_kv_blocks=64))
        assert caches[0]() is None and caches[1]() is not None
    finally:
        gc.enable()
