"""The memory planner's arithmetic and refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from servekit.config.errors import ConfigError
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig, SwapPreemptionConfig
from servekit.config.schema import Config, Device, MemoryConfig, ModelConfig, Quantization, SchedulerConfig
from servekit.model.loader import load_spec
from servekit.model.local import LocalModel, SourceKind
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts, usable_cores
from servekit.runner.memory import MemoryPlan, activation_bytes, plan_memory, weights_bytes

SPEC = load_spec(LocalModel(SourceKind.dummy, "llama", None, "llama-3-8b"))
GPU = DeviceFacts(Device.cuda, "a GPU", cores=8, total_bytes=80 * 10**9, free_bytes=79 * 10**9,
                  host_free_bytes=50 * 10**9)


def config(max_num_seqs: int = 128, max_model_len: int | None = None, preemption: PreemptionConfig | None = None,
           **memory: object) -> Config:
    return Config(model=ModelConfig("dummy:llama-3-8b", max_model_len=max_model_len),
                  memory=MemoryConfig(**memory),  # type: ignore[arg-type]
                  scheduler=SchedulerConfig(max_num_seqs=max_num_seqs,
                                            preemption=preemption or RecomputePreemptionConfig()))


def plan(config: Config, spec: ModelSpec, device: DeviceFacts, kv_dtype_bytes: int = 2) -> MemoryPlan:
    return plan_memory(config, spec, device, Quantization.none, 2, kv_dtype_bytes)


def test_the_parts_add_up_to_the_usable_share() -> None:
    planned = plan(config(), SPEC, GPU)
    assert planned.usable_bytes == int(0.9 * GPU.total_bytes)
    assert planned.weights_bytes == pytest.approx(16.06e9, rel=0.001)
    assert planned.headroom_bytes == int(0.1 * planned.usable_bytes)
    block_bytes = 16 * 131072
    spent = planned.weights_bytes + planned.activation_bytes + planned.headroom_bytes + planned.kv_bytes
    assert planned.kv_bytes == planned.num_kv_blocks * block_bytes
    assert planned.usable_bytes - block_bytes < spent <= planned.usable_bytes
    assert planned.notes == ("memory.memory_fraction: null -> 0.9",)


def test_no_more_blocks_than_all_requests_can_fill() -> None:
    planned = plan(config(max_num_seqs=2, max_model_len=1000), SPEC, GPU)
    assert planned.num_kv_blocks == 2 * 63


def test_others_memory_is_not_counted_as_free() -> None:
    busy = dataclasses.replace(GPU, free_bytes=40 * 10**9)
    assert plan(config(), SPEC, busy).usable_bytes == 40 * 10**9


def test_half_the_bytes_a_token_hold_twice_the_blocks() -> None:
    wide, narrow = (plan(config(memory_fraction=0.5), SPEC, GPU, kv_dtype_bytes=size).num_kv_blocks for size in (2, 1))
    assert narrow == pytest.approx(2 * wide, abs=1)


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    small = dataclasses.replace(GPU, total_bytes=16 * 10**9, free_bytes=16 * 10**9)
    with pytest.raises(ConfigError, match=r"16\.06 GB weights") as caught:
        plan(config(), SPEC, small)
    assert "holds 0 tokens" in str(caught.value) and "smaller model" in str(caught.value)


def test_a_cache_below_the_wanted_length_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_model_len=4096.*holds 1600 tokens"):
        plan(config(max_model_len=4096, num_kv_blocks=100), SPEC, GPU)
    assert plan(config(max_model_len=1600, num_kv_blocks=100), SPEC, GPU).max_model_len == 1600


def test_the_remedy_for_too_many_blocks_works() -> None:
    with pytest.raises(ConfigError, match=r"at most memory\.num_kv_blocks=(\d+)") as caught:
        plan(config(num_kv_blocks=10**6), SPEC, GPU)
    most = int(caught.value.remedy.rsplit("=", 1)[1])
    assert plan(config(num_kv_blocks=most), SPEC, GPU).num_kv_blocks == most


def test_larger_steps_need_more_room() -> None:
    assert activation_bytes(SPEC, 8192, 128, 2) > activation_bytes(SPEC, 512, 128, 2) > 0


@pytest.mark.parametrize("quota, expected", [("150000 100000", 1), ("max 100000", None), ("50000 100000", 1)])
def test_the_control_groups_quota_limits_the_cores(tmp_path: Path, quota: str, expected: int | None) -> None:
    file = tmp_path / "sys/fs/cgroup/cpu.max"
    file.parent.mkdir(parents=True)
    file.write_text(quota)
    assert usable_cores(tmp_path) == (expected or usable_cores(Path("/nowhere")))


def test_integers_take_fewer_bytes_and_a_tied_head_stands_beside_the_embedding() -> None:
    full, int8, int4 = (weights_bytes(SPEC, kind, 2) for kind in
                        (Quantization.none, Quantization.int8, Quantization.int4))
    assert int4 < int8 < full == 2 * SPEC.num_parameters
    head = SPEC.vocab_size * SPEC.hidden_size
    assert int8 == pytest.approx(9 / 8 * (SPEC.num_matrix_parameters + head) + 2 * head, rel=0.001)
    tied = dataclasses.replace(SPEC, tied_head=True)
    assert weights_bytes(tied, Quantization.int8, 2) == int8


# The host's memory, for requests that are swapped out.

BLOCK_BYTES = 16 * 131072
SWAP_SPACE = "scheduler.preemption.swap_space_bytes"


def test_without_swapping_no_memory_of_the_host_is_taken() -> None:
    assert plan(config(), SPEC, GPU).num_host_blocks == 0


def test_swap_space_is_a_tenth_of_what_the_host_has_free_and_the_choice_is_told() -> None:
    planned = plan(config(preemption=SwapPreemptionConfig()), SPEC, GPU)
    assert planned.num_host_blocks == 5 * 10**9 // BLOCK_BYTES < planned.num_kv_blocks
    assert planned.notes[-1] == (f"{SWAP_SPACE}: null -> {planned.num_host_blocks * BLOCK_BYTES} "
                                 f"({planned.num_host_blocks} KV blocks)")


def test_swap_space_is_no_larger_than_the_cache() -> None:
    planned = plan(config(preemption=SwapPreemptionConfig(), max_model_len=1600, num_kv_blocks=100), SPEC, GPU)
    assert planned.num_host_blocks == 100


def test_on_a_cpu_swap_space_comes_out_of_what_the_engine_leaves() -> None:
    cpu = DeviceFacts(Device.cpu, "cpu", cores=8, total_bytes=80 * 10**9, free_bytes=40 * 10**9,
                      host_free_bytes=40 * 10**9)
    planned = plan(config(preemption=SwapPreemptionConfig(), memory_fraction=0.3), SPEC, cpu)
    left = 40 * 10**9 - planned.weights_bytes - planned.activation_bytes - planned.kv_bytes
    assert planned.num_host_blocks == left // 10 // BLOCK_BYTES > 0


def test_swap_space_that_was_asked_for_is_given_in_whole_blocks() -> None:
    planned = plan(config(preemption=SwapPreemptionConfig(swap_space_bytes=3 * BLOCK_BYTES + 5)), SPEC, GPU)
    assert planned.num_host_blocks == 3 and not any(SWAP_SPACE in note for note in planned.notes)


@pytest.mark.parametrize("swap_space_bytes", [BLOCK_BYTES - 1, 51 * 10**9])
def test_swap_space_below_a_block_or_beyond_the_host_is_refused_and_the_remedy_works(swap_space_bytes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config(preemption=SwapPreemptionConfig(swap_space_bytes=swap_space_bytes)), SPEC, GPU)
    assert caught.value.key == SWAP_SPACE
    found = re.search(rf"{re.escape(SWAP_SPACE)}=(\d+)", caught.value.remedy)
    assert found is not None
    remedy = SwapPreemptionConfig(swap_space_bytes=int(found[1]))
    assert plan(config(preemption=remedy), SPEC, GPU).num_host_blocks == remedy.swap_space_bytes // BLOCK_BYTES
