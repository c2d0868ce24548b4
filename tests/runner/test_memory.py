"""The memory planner's arithmetic and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, Device, MemoryConfig, ModelConfig, SchedulerConfig
from servekit.model.loader import load_spec
from servekit.model.local import LocalModel, SourceKind
from servekit.runner.device import DeviceFacts, usable_cores
from servekit.runner.memory import activation_bytes, plan_memory

SPEC = load_spec(LocalModel(SourceKind.dummy, "llama", None, "llama-3-8b"))
GPU = DeviceFacts(Device.cuda, "a GPU", cores=8, total_bytes=80 * 10**9, free_bytes=79 * 10**9)


def config(max_num_seqs: int = 128, max_model_len: int | None = None, **memory: object) -> Config:
    return Config(model=ModelConfig("dummy:llama-3-8b", max_model_len=max_model_len),
                  memory=MemoryConfig(**memory),  # type: ignore[arg-type]
                  scheduler=SchedulerConfig(max_num_seqs=max_num_seqs))


def test_the_parts_add_up_to_the_usable_share() -> None:
    plan = plan_memory(config(), SPEC, GPU, 2, 2)
    assert plan.usable_bytes == int(0.9 * GPU.total_bytes)
    assert plan.weights_bytes == pytest.approx(16.06e9, rel=0.001)
    assert plan.headroom_bytes == int(0.1 * plan.usable_bytes)
    block_bytes = 16 * 131072
    spent = plan.weights_bytes + plan.activation_bytes + plan.headroom_bytes + plan.kv_bytes
    assert plan.kv_bytes == plan.num_kv_blocks * block_bytes
    assert plan.usable_bytes - block_bytes < spent <= plan.usable_bytes
    assert plan.notes == ("memory.memory_fraction: null -> 0.9",)


def test_no_more_blocks_than_all_requests_can_fill() -> None:
    plan = plan_memory(config(max_num_seqs=2, max_model_len=1000), SPEC, GPU, 2, 2)
    assert plan.num_kv_blocks == 2 * 63


def test_others_memory_is_not_counted_as_free() -> None:
    busy = dataclasses.replace(GPU, free_bytes=40 * 10**9)
    assert plan_memory(config(), SPEC, busy, 2, 2).usable_bytes == 40 * 10**9


def test_half_the_bytes_a_token_hold_twice_the_blocks() -> None:
    wide, narrow = (plan_memory(config(memory_fraction=0.5), SPEC, GPU, 2, size).num_kv_blocks for size in (2, 1))
    assert narrow == pytest.approx(2 * wide, abs=1)


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    small = dataclasses.replace(GPU, total_bytes=16 * 10**9, free_bytes=16 * 10**9)
    with pytest.raises(ConfigError, match=r"16\.06 GB weights") as caught:
        plan_memory(config(), SPEC, small, 2, 2)
    assert "holds 0 tokens" in str(caught.value) and "smaller model" in str(caught.value)


def test_a_cache_below_the_wanted_length_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_model_len=4096.*holds 1600 tokens"):
        plan_memory(config(max_model_len=4096, num_kv_blocks=100), SPEC, GPU, 2, 2)
    assert plan_memory(config(max_model_len=1600, num_kv_blocks=100), SPEC, GPU, 2, 2).max_model_len == 1600


def test_the_remedy_for_too_many_blocks_works() -> None:
    with pytest.raises(ConfigError, match=r"at most memory\.num_kv_blocks=(\d+)") as caught:
        plan_memory(config(num_kv_blocks=10**6), SPEC, GPU, 2, 2)
    most = int(caught.value.remedy.rsplit("=", 1)[1])
    assert plan_memory(config(num_kv_blocks=most), SPEC, GPU, 2, 2).num_kv_blocks == most


def test_larger_steps_need_more_room() -> None:
    assert activation_bytes(SPEC, 8192, 128, 2) > activation_bytes(SPEC, 512, 128, 2) > 0


@pytest.mark.parametrize("quota, expected", [("150000 100000", 1), ("max 100000", None), ("50000 100000", 1)])
def test_the_control_groups_quota_limits_the_cores(tmp_path: Path, quota: str, expected: int | None) -> None:
    file = tmp_path / "sys/fs/cgroup/cpu.max"
    file.parent.mkdir(parents=True)
    file.write_text(quota)
    assert usable_cores(tmp_path) == (expected or usable_cores(Path("/nowhere")))
