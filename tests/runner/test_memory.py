"""The memory planner's arithmetic and refusals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.config.errors import ConfigError
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig, SwapPreemptionConfig
from servekit.config.schema import (
    Config,
    Device,
    KernelSet,
    MemoryConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from servekit.kernels import Product, reference_kernels
from servekit.model.footprint import activation_bytes, weights_bytes
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, SourceKind
from servekit.model.spec import ModelSpec
from servekit.model.stored_quantization import AwqLayout, Inputs, Modules, StoredQuantization, matches
from servekit.runner.device import DeviceFacts, usable_cores
from servekit.runner.memory import Formats, MemoryPlan, plan_memory, weight_bits
from servekit.runner.profile import measure_activation_bytes

SPEC = load_spec(LocalModel(SourceKind.dummy, "llama", None, "llama-3-8b"))
GPU = DeviceFacts(Device.cuda, "a GPU", cores=8, total_bytes=80 * 10**9, free_bytes=79 * 10**9,
                  host_free_bytes=50 * 10**9)

BLOCK_BYTES = 16 * 131072


def config(max_num_seqs: int = 128, max_model_len: int | None = None, preemption: PreemptionConfig | None = None,
           **memory: object) -> Config:
    return Config(model=ModelConfig("dummy:llama-3-8b", max_model_len=max_model_len),
                  memory=MemoryConfig(**memory),  # type: ignore[arg-type]
                  scheduler=SchedulerConfig(max_num_seqs=max_num_seqs,
                                            preemption=preemption or RecomputePreemptionConfig()))


def formats(quantization: Quantization = Quantization.none, kernels: KernelSet = KernelSet.triton,
            kv_dtype_bytes: int = 2) -> Formats:
    return Formats(quantization, kernels, 2, kv_dtype_bytes)


def plan(config: Config, spec: ModelSpec, device: DeviceFacts, kv_dtype_bytes: int = 2,
         measured_activation_bytes: int | None = None, graph_bytes: int = 0) -> MemoryPlan:
    return plan_memory(config, spec, device, formats(kv_dtype_bytes=kv_dtype_bytes), measured_activation_bytes,
                       graph_bytes)


def weights(quantization: Quantization, spec: ModelSpec = SPEC, kernels: KernelSet = KernelSet.triton) -> int:
    return weights_bytes(spec, weight_bits(spec, formats(quantization, kernels)))


def test_the_parts_add_up_to_the_usable_share() -> None:
    planned = plan(config(), SPEC, GPU)
    assert planned.use.usable_bytes == int(0.9 * GPU.total_bytes)
    assert planned.use.weights_bytes == pytest.approx(16.06e9, rel=0.001)
    assert planned.use.headroom_bytes == int(0.1 * planned.use.usable_bytes)
    block_bytes = 16 * 131072
    spent = planned.use.weights_bytes + planned.use.activation_bytes + planned.use.headroom_bytes + planned.kv_bytes
    assert planned.kv_bytes == planned.num_kv_blocks * block_bytes
    assert planned.use.usable_bytes - block_bytes < spent <= planned.use.usable_bytes
    assert planned.notes == ("memory.memory_fraction: null -> 0.9",)


def test_no_more_blocks_than_all_requests_can_fill() -> None:
    planned = plan(config(max_num_seqs=2, max_model_len=1000), SPEC, GPU)
    assert planned.num_kv_blocks == 2 * 63


def test_others_memory_is_not_counted_as_free() -> None:
    busy = dataclasses.replace(GPU, free_bytes=40 * 10**9)
    assert plan(config(), SPEC, busy).use.usable_bytes == 40 * 10**9


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


# The weights, in every format.

HEAD = SPEC.vocab_size * SPEC.hidden_size


def test_fewer_bits_take_fewer_bytes() -> None:
    sizes = [weights(kind) for kind in (Quantization.mxfp4, Quantization.nvfp4, Quantization.fp8, Quantization.none)]
    assert sizes == sorted(set(sizes)) and sizes[-1] == 2 * SPEC.num_parameters
    assert weights(Quantization.int4) < weights(Quantization.int8) < weights(Quantization.fp8)
    assert weights(Quantization.fp8) == weights(Quantization.fp8_dynamic)


def test_integers_round_the_head_too_and_a_tied_one_stands_beside_the_embedding() -> None:
    int8 = weights(Quantization.int8)
    assert int8 == pytest.approx(SPEC.num_matrix_parameters + HEAD + 2 * HEAD, rel=0.002)
    tied = dataclasses.replace(SPEC, tied_head=True)
    assert weights(Quantization.int8, tied) == int8
    assert weights(Quantization.fp8, tied) == pytest.approx(weights(Quantization.fp8) - 2 * HEAD, abs=1)


def test_groups_of_32_take_a_bit_more_of_every_number() -> None:
    in_groups = dataclasses.replace(SPEC, checkpoint_dtype="Q8_0")
    expected = 9 / 8 * (SPEC.num_matrix_parameters + HEAD) + 2 * HEAD
    assert weights(Quantization.int8, in_groups) == pytest.approx(expected, rel=0.001)


def test_a_quantised_checkpoint_keeps_its_own_head_and_groups() -> None:
    stored = StoredQuantization("awq", AwqLayout(128), Inputs.kept, Modules(("Linear",), (), matches))
    awq = dataclasses.replace(SPEC, stored_quantization=stored)
    expected = (4 + 32 / 128) / 8 * SPEC.num_matrix_parameters + 2 * 2 * HEAD
    assert weights(Quantization.int4, awq) == pytest.approx(expected, rel=0.001)
    assert weights(Quantization.int8, awq) == weights(Quantization.int8)


@pytest.mark.parametrize("quantization", [Quantization.int4, Quantization.mxfp4, Quantization.nvfp4])
def test_references_keep_a_four_bit_number_a_byte(quantization: Quantization) -> None:
    packed, unpacked = weights(quantization), weights(quantization, kernels=KernelSet.reference)
    assert unpacked - packed == pytest.approx(SPEC.num_matrix_parameters / 2, abs=1)
    on_cpu = weights(quantization, kernels=KernelSet.cpu)
    assert on_cpu == (packed if quantization is Quantization.int4 else unpacked)


@pytest.mark.parametrize("quantization", [kind for kind in Quantization if kind is not Quantization.auto])
def test_the_reckoning_is_that_of_the_tensors_that_are_loaded(quantization: Quantization) -> None:
    """By the reference kernels, which keep what they are given."""
    spec = load_spec(LocalModel(SourceKind.dummy, "tiny", None, "tiny"))
    held: set[Tensor] = set()

    def keep(weight: Any) -> Product:
        held.update([weight] if isinstance(weight, Tensor) else
                    [value for field in dataclasses.fields(weight)
                     if isinstance(value := getattr(weight, field.name), Tensor)])
        return lambda x: x

    kernels = dataclasses.replace(reference_kernels(), dense=keep, int8=keep, int8_dynamic=keep, int4=keep, fp8=keep,
                                  fp8_dynamic=keep, fp4=keep)
    decoder = load_decoder(LocalModel(SourceKind.dummy, "tiny", None, "tiny"), spec, torch.bfloat16,
                           torch.device("cpu"), kernels, 64, lambda *_: None, quantization)
    held.add(decoder.weights.embedding)
    norms = 2 * spec.hidden_size * (2 * spec.num_layers + 1)
    total = norms + sum(tensor.nbytes for tensor in held)
    reckoned = weights(quantization, spec, KernelSet.reference)
    assert reckoned == pytest.approx(total, rel=0.02)


# The largest step, graphs, and what others hold.


def test_the_parts_of_a_measured_step_and_of_graphs_are_taken_from_the_cache() -> None:
    estimated, measured = plan(config(), SPEC, GPU), plan(config(), SPEC, GPU, measured_activation_bytes=5 * 10**9,
                                                          graph_bytes=10**9)
    assert (measured.use.activation_bytes, measured.use.graph_bytes) == (5 * 10**9, 10**9)
    lost = estimated.kv_bytes - measured.kv_bytes
    assert lost == pytest.approx(6 * 10**9 - estimated.use.activation_bytes, abs=2 * BLOCK_BYTES)


def test_a_step_of_dequantised_matrices_takes_more() -> None:
    def step(kernels: KernelSet) -> int:
        return plan_memory(config(), SPEC, GPU, formats(Quantization.fp8, kernels)).use.activation_bytes

    dequantized = 12 * 2 * SPEC.intermediate_size * SPEC.hidden_size
    assert step(KernelSet.reference) - step(KernelSet.triton) == dequantized
    assert step(KernelSet.cpu) == step(KernelSet.reference)
    own, = {plan_memory(config(), SPEC, GPU, formats(quantization, KernelSet.cpu)).use.activation_bytes
            for quantization in (Quantization.none, Quantization.int8, Quantization.int4)}
    assert own == step(KernelSet.triton)


def test_what_others_hold_is_said() -> None:
    busy = dataclasses.replace(GPU, free_bytes=40 * 10**9)
    planned = plan(config(), SPEC, busy)
    assert planned.use.others_bytes == 40 * 10**9
    assert planned.notes[-1] == "usable memory: 72.00 GB -> 40.00 GB (others hold 40.00 GB of 80.00 GB)"
    full = dataclasses.replace(GPU, free_bytes=17 * 10**9)
    with pytest.raises(ConfigError, match=r"others hold 63\.00 GB of 80\.00 GB") as caught:
        plan(config(), SPEC, full)
    assert "17.00 GB usable, less 16.06 GB weights" in str(caught.value) and "\n" not in str(caught.value)


def test_blocks_that_were_asked_for_leave_room_for_the_largest_step() -> None:
    room = GPU.free_bytes - 2 * SPEC.num_parameters - 2 * 10**9
    most = room // BLOCK_BYTES
    assert plan(config(num_kv_blocks=most), SPEC, GPU, measured_activation_bytes=10**9, graph_bytes=10**9)
    with pytest.raises(ConfigError, match=rf"at most memory\.num_kv_blocks={most}"):
        plan(config(num_kv_blocks=most + 1), SPEC, GPU, measured_activation_bytes=10**9, graph_bytes=10**9)


def test_the_profile_runs_the_largest_step_and_adds_what_sampling_takes() -> None:
    spec = load_spec(LocalModel(SourceKind.dummy, "tiny", None, "tiny"))
    decoder = load_decoder(LocalModel(SourceKind.dummy, "tiny", None, "tiny"), spec, torch.float32,
                           torch.device("cpu"), reference_kernels(), 64, lambda *_: None)
    logits: list[Any] = []

    def measure(run: Callable[[], object]) -> int:
        logits.append(run())
        return 1000

    measured = measure_activation_bytes(decoder, 150, 140, 16, 64, torch.float32, torch.device("cpu"), measure)
    assert measured == 1000 + 2 * 4 * 140 * spec.vocab_size
    assert logits[0].shape == (140, spec.vocab_size)
    # Prompts of one token over and over, 64 times at most: each is computed as the others are.
    torch.testing.assert_close(logits[0][64:128], logits[0][:64])
    torch.testing.assert_close(logits[0][128:], logits[0][:12])


# The host's memory, for requests that are swapped out.

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
    left = 40 * 10**9 - planned.use.weights_bytes - planned.use.activation_bytes - planned.kv_bytes
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
