"""Two ranks, in processes connected by gloo, answer as one: under every setting, until one of them ends.

In float64 a sum over two ranks differs from that over one in its last bits only, which changes no token here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.helpers import CACHE_DIR, Heard, build, dummy_model, make_config, run, spec
from engine.test_equality import RECOMPUTE, SMALL_BLOCK, SWAP, crowd, outputs, random_prompts
from engine.test_resolve import CPU, CUDA
from servekit.config.errors import ConfigError
from servekit.config.preemption import SwapPreemptionConfig
from servekit.config.prefix_cache import RadixPrefixCacheConfig
from servekit.config.schema import Config, EngineConfig, ModelConfig, RestartPolicy
from servekit.core.request import FinishReason, RequestSpec
from servekit.engine.build import ReconfigurableEngine
from servekit.engine.process_client import ProcessClient
from servekit.engine.resolve import resolve
from servekit.model.loader import load_spec
from servekit.runner.group import RankLost
from servekit.runner.workers import RankOrder

TWO = EngineConfig(threads=1, tensor_parallel=2, overlap=True)


def one(**options: Any) -> Config:
    return make_config(max_model_len=96, **options)


def two(**options: Any) -> Config:
    return one(engine=TWO, **options)


class Scenario(NamedTuple):
    """Settings, and requests that make use of them. Wrong keys change scores sooner than tokens: most ask for them."""

    settings: dict[str, Any]
    specs: list[RequestSpec]
    counter: str | None = None
    """Of the engine's, which must show that they did."""


CROWDED: dict[str, Any] = {"num_kv_blocks": 13, "block_size": SMALL_BLOCK, "chunk_tokens": 16}


def scored() -> list[RequestSpec]:
    return [spec(prompt, 4, logprobs=3, prompt_logprobs=2) for prompt in random_prompts(31, 3, 20, 40)]


def scenarios() -> dict[str, Scenario]:
    shared = random_prompts(32, 1, 40, 41)[0]
    return {
        "whole prompts, draws": Scenario({}, crowd(temperature=1.0)),
        "scores": Scenario({}, scored()),
        "chunks and cached prefixes": Scenario({"chunk_tokens": 9, "max_num_seqs": 2, "prefix_cache": True},
                                               [spec(shared + tail, 6, logprobs=0)
                                                for tail in random_prompts(33, 4, 3, 20)],
                                               "cached_tokens_total"),
        "recompute": Scenario({**CROWDED, "preemption": RECOMPUTE}, crowd(temperature=0.8, logprobs=0),
                              "recomputed_tokens_total"),
        "swap": Scenario({**CROWDED, "preemption": SWAP, "prefix_cache": RadixPrefixCacheConfig()}, crowd(logprobs=0),
                         "swapped_in_blocks_total"),
    }


def scores_of(heard: Heard) -> list[float]:
    ours = [scored.logprob for event in heard.events for scored in event.logprobs]
    return ours + [scored.logprob for scored in heard.events[0].prompt_logprobs or () if scored is not None]


def renamed(specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The same requests under other names."""
    return [replace(wanted, request_id=spec([1]).request_id) for wanted in specs]


def test_two_ranks_answer_as_one_under_every_setting_until_one_ends() -> None:
    built = build(two())
    host = ReconfigurableEngine(two(), built)
    for name, scenario in scenarios().items():
        check_scenario(host, name, scenario)
    check_aborts(host)
    check_refusal(host)
    assert built.workers is not None
    check_end(host, *built.workers.process_ids)


def check_scenario(host: ReconfigurableEngine, name: str, scenario: Scenario) -> None:
    settings, specs, counter = scenario
    facts = host.reconfigure(two(**settings))
    alone = build(one(**settings))
    assert facts.num_kv_blocks == alone.facts.num_kv_blocks and 2 * facts.kv_bytes == alone.facts.kv_bytes
    expected, found = run(alone.engine, renamed(specs)), run(host.engine, specs)
    assert outputs(found) == outputs(expected), name
    for mine, other in zip(found, expected, strict=True):
        assert scores_of(mine) == pytest.approx(scores_of(other), abs=1e-10), name
    if counter is not None:
        assert getattr(host.engine.stats(), counter) > 0, name


def check_aborts(host: ReconfigurableEngine) -> None:
    """Aborts of some, while there is room for a few only, leave the others as they are."""
    host.reconfigure(two(**CROWDED, preemption=SWAP))
    alone = outputs(run(build(one()).engine, crowd(), together=False))
    engine, specs, rng = host.engine, crowd(), random.Random(5)
    heard = {wanted.request_id: Heard() for wanted in specs}
    engine.add(specs)
    aborted = {wanted.request_id for wanted in rng.sample(specs, 4)}
    left = sorted(aborted)
    while engine.has_work:
        for event in engine.step().events:
            heard[event.request_id].events.append(event)
        engine.check()
        if left and rng.random() < 0.3:
            engine.abort([left.pop()])
    for wanted, reference in zip(specs, alone, strict=True):
        tokens = heard[wanted.request_id].tokens
        assert tokens == (reference[:len(tokens)] if wanted.request_id in aborted else reference)


def check_refusal(host: ReconfigurableEngine) -> None:
    """All ranks refuse what one refuses, and go on as they were."""
    with pytest.raises(ConfigError, match="swap_space_bytes"):
        host.reconfigure(two(**CROWDED, preemption=SwapPreemptionConfig(swap_space_bytes=1)))
    assert run(host.engine, [spec([1, 2, 3], 4)])[0].last.finish is FinishReason.length


def check_end(host: ReconfigurableEngine, rank: int) -> None:
    """In the middle of an answer, and known ever after."""
    host.engine.add([spec([1, 2, 3], 60)])
    host.engine.step()
    os.kill(rank, signal.SIGKILL)
    end = r"^rank 1 was killed by signal 9; the engine ends with it$"
    with pytest.raises(RankLost, match=end):
        while host.engine.has_work:
            host.engine.step()
    with pytest.raises(RankLost, match=end):
        host.check()


def test_a_rank_ends_with_the_first_one_whatever_it_waits_for(tmp_path: Path) -> None:
    """Here it waits for a first rank that never comes."""
    order = RankOrder(1, two(), dummy_model(), CACHE_DIR, "cpu", tmp_path / "store")
    with subprocess.Popen([sys.executable, "-m", "servekit.engine.worker"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        rank.stdin.write(pickle.dumps(order))
        rank.stdin.flush()
        assert rank.stdout.read(1) == b"."
        rank.stdin.close()
        try:
            assert rank.wait(timeout=20) == 1
        finally:
            rank.kill()  # One that goes on would be waited for for ever.


def test_a_rank_that_ends_while_nothing_is_asked_ends_the_engine_with_one_line(
        capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        config = make_config(engine=EngineConfig(threads=1, tensor_parallel=2, restart=RestartPolicy.never))
        client = ProcessClient(config, dummy_model(), CACHE_DIR, lambda _: None)
        await client.start()
        try:
            (stream,) = client.submit([spec([1, 2], 3)])
            assert [event.finish async for event in stream][-1] is FinishReason.length
            assert client.process_id is not None
            (rank,) = children(client.process_id)
            os.kill(rank, signal.SIGTERM)
            async with asyncio.timeout(20):
                while client.is_healthy:
                    await asyncio.sleep(0.05)
        finally:
            await client.shutdown()

    asyncio.run(asyncio.wait_for(body(), 100))
    assert "servekit: rank 1 was killed by signal 15; the engine ends with it\n" in capfd.readouterr().err


def children(process_id: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_that_cannot_be_divided_are_refused_before_a_process_starts(ranks: int) -> None:
    words = (rf"^engine\.tensor_parallel={ranks}: must divide the model's 2 key-value heads and 128 feed-forward "
             r"columns; set engine\.tensor_parallel to 1 or 2$")
    with pytest.raises(ConfigError, match=words):
        build(make_config(engine=EngineConfig(threads=1, tensor_parallel=ranks)))


def test_more_ranks_than_gpus_are_refused() -> None:
    model = load_spec(dummy_model())
    config = Config(ModelConfig("dummy:tiny"), EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2: each needs a GPU of its own, and torch finds 1 "
                                          r"on this machine; set engine\.tensor_parallel=1 or less"):
        resolve(config, model, CUDA)
    assert any("2 processes" in note for note in resolve(config, model, CPU).notes)


def test_a_report_on_whole_matrices_is_refused() -> None:
    config = Config(ModelConfig("dummy:tiny", quantization_report="errors.json"), EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"model\.quantization_report=errors\.json: .*engine\.tensor_parallel=1"):
        resolve(config, load_spec(dummy_model()), CPU)


def test_cores_and_memory_are_divided_among_the_ranks() -> None:
    config = Config(ModelConfig("dummy:tiny"), EngineConfig(tensor_parallel=2))
    assert resolve(config, load_spec(dummy_model()), CPU).threads == 3
    part, gpu = CPU.shared_by(2), CUDA.shared_by(2)
    assert (part.total_bytes, part.free_bytes, part.host_free_bytes) == (2**33, 2**32, 2**32)
    assert (gpu.total_bytes, gpu.free_bytes, gpu.host_free_bytes) == (2**34, 2**33, 2**32)


def test_fewer_ranks_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=0: must be a number of at least 1"):
        EngineConfig(tensor_parallel=0)
