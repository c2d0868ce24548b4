"""The memory attack, on tiny real engines and on one that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engine.helpers import CACHE_DIR, dummy_model, make_config
from servekit.config.errors import ConfigError
from servekit.config.preemption import RecomputePreemptionConfig, SwapPreemptionConfig
from servekit.config.resolve import config_hash
from servekit.config.schema import Config, EngineConfig, RestartPolicy
from servekit.engine.in_process_client import InProcessClient
from servekit.engine.process_client import ProcessClient
from servekit.tuner.attack import (
    OUTPUT_TOKENS,
    AttackLog,
    End,
    Lengths,
    Phase,
    Sent,
    Target,
    attack,
    attack_process,
    full_batch,
    longest_prompts,
    peak_memory_bytes,
    read_attack,
)

SMALL = make_config(num_kv_blocks=24, max_model_len=128, max_num_seqs=8, max_step_tokens=128)


def attacked(config: Config, timeout_s: float = 60.0) -> AttackLog:
    async def run() -> AttackLog:
        client = InProcessClient(config, dummy_model(), CACHE_DIR, lambda _: None)
        await client.start()
        try:
            return await attack(client, config, timeout_s, os.getpid())
        finally:
            await client.shutdown()

    return asyncio.run(run())


def test_the_load_is_the_worst_that_clients_may_send() -> None:
    target = Target(max_num_seqs=16, max_step_tokens=1000, max_model_len=400, kv_tokens=1600, vocab_size=100)
    assert longest_prompts(target) == [Lengths(400 - OUTPUT_TOKENS, OUTPUT_TOKENS)] * 6, "twice 1000 tokens of 392 each"
    assert full_batch(target) == [Lengths(87, 38)] * 16, "prompts of 1392 tokens; with answers 1.25 times the KV cache"
    roomy = replace(target, kv_tokens=1_000_000)
    assert full_batch(roomy) == [Lengths(400 - OUTPUT_TOKENS, OUTPUT_TOKENS)] * 16, "every context full"
    tight = replace(target, kv_tokens=100, max_num_seqs=1)
    for lengths in longest_prompts(tight) + full_batch(tight):
        assert lengths.prompt_tokens + lengths.output_tokens <= 100, "what can never fit is refused"


@pytest.mark.parametrize("preemption", [RecomputePreemptionConfig(), SwapPreemptionConfig()], ids=["recompute", "swap"])
def test_a_sound_engine_survives_with_its_cache_full(tmp_path: Path,
                                                     preemption: RecomputePreemptionConfig | SwapPreemptionConfig
                                                     ) -> None:
    config = replace(SMALL, scheduler=replace(SMALL.scheduler, preemption=preemption))
    log = attacked(config)
    assert log.survived and log.failure is None and log.config_hash == config_hash(config)
    assert [phase.name for phase in log.phases] == ["longest prompts", "full batch", "after it"]
    assert log.num(End.answered) == sum(len(phase.requests) for phase in log.phases)
    full = log.phases[1]
    assert full.peak_running >= 6 and log.peak_kv_share > 0.9
    assert log.preemptions > 0
    assert (log.swapped_out_blocks > 0) is log.swap_is_configured is (preemption == SwapPreemptionConfig())
    assert log.peak_memory_bytes is not None and log.peak_memory_bytes > 2**20
    log.write(tmp_path / "attack.json")
    assert read_attack(tmp_path / "attack.json") == log


def test_a_short_queue_does_not_spare_the_engine() -> None:
    config = make_config(num_kv_blocks=24, max_model_len=128, max_num_seqs=8, max_step_tokens=128, max_queue_requests=1)
    log = attacked(config)
    assert log.survived and log.phases[1].peak_running >= 6
    assert {sent.end for phase in log.phases for sent in phase.requests} == {End.answered}


def test_limits_of_the_configuration_are_no_loss_and_time_limits_are_told() -> None:
    log = attacked(make_config(num_kv_blocks=24, max_model_len=128, max_num_seqs=8, request_timeout_s=0.002))
    assert log.num(End.lost) == 0 and log.num(End.given_up) > 0
    log = attacked(SMALL, timeout_s=1e-4)
    assert log.num(End.cut_off) > 0 and log.num(End.lost) == 0
    assert not log.survived, "nothing was answered in the end, so nobody knows"


def test_an_engine_that_dies_does_not_survive() -> None:
    config = replace(SMALL, engine=EngineConfig(threads=1, restart=RestartPolicy.never))

    async def run() -> AttackLog:
        client = ProcessClient(config, dummy_model(), CACHE_DIR, lambda _: None)
        await client.start()
        assert client.process_id is not None
        victim = client.process_id
        client.observe(lambda stats, step: os.kill(victim, signal.SIGKILL) if stats.num_running > 1 else None)
        try:
            return await attack(client, config, 30.0, victim)
        finally:
            await client.shutdown()

    log = asyncio.run(run())
    assert not log.survived and log.failure == "the engine is dead"
    assert log.num(End.lost) > 0
    assert len(log.phases) < 3


def test_an_engine_that_cannot_start_does_not_survive() -> None:
    log = attack_process(make_config(max_model_len=100_000), dummy_model(), CACHE_DIR, 5.0)
    assert not log.survived and log.failure is not None and "max_model_len" in log.failure


def test_a_single_lost_request_is_too_much() -> None:
    def log(*ends: End) -> AttackLog:
        return AttackLog("h", 1, 1, False, [Phase("after it", 0.1, [Sent(1, 1, end) for end in ends], 1, 1, 0, 0)],
                         None, None)

    assert log(End.answered, End.given_up).survived
    assert not log(End.answered, End.lost).survived
    assert not log(End.given_up).survived


def test_memory_of_a_process_that_is_gone_is_unknown(tmp_path: Path) -> None:
    assert peak_memory_bytes(None) is None and peak_memory_bytes(2**22 + 1) is None
    (tmp_path / "x").write_text("{}")
    with pytest.raises(ConfigError, match="not the log of an attack"):
        read_attack(tmp_path / "x")
