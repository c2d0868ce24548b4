"""What every `auto` and `null` comes to, and what does not go together."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.helpers import dummy_model, make_config, run, spec
from servekit.config.errors import ConfigError
from servekit.config.schema import (
    Config,
    Device,
    DType,
    EngineConfig,
    KernelSet,
    KVDType,
    MemoryConfig,
    ModelConfig,
    Quantization,
)
from servekit.engine.build import build_engine
from servekit.engine.resolve import Resolved, resolve
from servekit.model.loader import load_spec
from servekit.model.stored_quantization import Fp8Layout, Inputs, Modules, StoredQuantization, matches
from servekit.runner.device import DeviceFacts

CPU = DeviceFacts(Device.cpu, "cpu", cores=6, total_bytes=2**34, free_bytes=2**33, host_free_bytes=2**33)
CUDA = DeviceFacts(Device.cuda, "a GPU", cores=6, total_bytes=2**34, free_bytes=2**33, host_free_bytes=2**33)
AUTO, NONE, INT8, INT4 = Quantization.auto, Quantization.none, Quantization.int8, Quantization.int4
FLOAT32, BFLOAT16 = DType.float32, DType.bfloat16
KV_FLOAT32, KV_BFLOAT16 = KVDType.float32, KVDType.bfloat16


def config(*, dtype: DType = DType.auto, quantization: Quantization = AUTO, kv_dtype: KVDType = KVDType.auto,
           cpu_quantization: Quantization = AUTO, device: Device = Device.auto, kernels: KernelSet = KernelSet.auto,
           threads: int | None = None) -> Config:
    return Config(model=ModelConfig(source="dummy:tiny", dtype=dtype, quantization=quantization,
                                    cpu_quantization=cpu_quantization),
                  engine=EngineConfig(device=device, kernels=kernels, threads=threads),
                  memory=MemoryConfig(kv_dtype=kv_dtype))


def resolved(machine: DeviceFacts = CPU, checkpoint: str = "float32", available: KernelSet | None = KernelSet.cpu,
             **settings: Any) -> Resolved:
    model = dataclasses.replace(load_spec(dummy_model()), checkpoint_dtype=checkpoint)
    return resolve(config(**settings), model, machine, available)


def note_on(key: str, notes: tuple[str, ...]) -> str | None:
    found = [note for note in notes if note.startswith(f"{key}: ")]
    assert len(found) <= 1
    return found[0] if found else None


# --- What is left open ------------------------------------------------------------------------------------------------


def test_on_a_cpu_everything_left_open_is_said() -> None:
    result = resolved()
    assert result == Resolved(FLOAT32, KV_FLOAT32, NONE, KernelSet.cpu, 6, result.notes)
    assert result.notes == ("engine.device: auto -> cpu", "model.dtype: auto -> float32", "engine.kernels: auto -> cpu",
                            "engine.threads: null -> 6")


def test_on_a_gpu_everything_left_open_is_said() -> None:
    result = resolved(CUDA, available=KernelSet.triton)
    assert result == Resolved(BFLOAT16, KV_BFLOAT16, NONE, KernelSet.triton, 6, result.notes)
    assert result.notes == ("engine.device: auto -> cuda", "model.dtype: auto -> bfloat16",
                            "engine.kernels: auto -> triton", "engine.threads: null -> 6")


def test_on_a_gpu_the_triton_operations_serve_where_they_can() -> None:
    assert resolved(CUDA, available=None).kernels is KernelSet.triton
    assert resolved(CUDA, available=KernelSet.reference).kernels is KernelSet.reference
    assert resolved(CUDA, available=None, dtype=DType.float64).kernels is KernelSet.reference


@pytest.mark.parametrize(("machine", "dtype"), [(CPU, FLOAT32), (CUDA, DType.float64)], ids=str)
def test_the_triton_operations_are_refused_where_they_cannot_serve(machine: DeviceFacts, dtype: DType) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels=triton.*on a GPU"):
        resolved(machine, dtype=dtype, kernels=KernelSet.triton)


def test_what_is_given_is_kept_and_nothing_is_said() -> None:
    result = resolved(dtype=FLOAT32, quantization=NONE, kv_dtype=KV_BFLOAT16, device=Device.cpu, kernels=KernelSet.cpu,
                      threads=2)
    assert result == Resolved(FLOAT32, KV_BFLOAT16, NONE, KernelSet.cpu, 2, ())


@pytest.mark.parametrize("dtype", [DType.float64, DType.bfloat16, DType.float16])
def test_the_cpp_operations_are_for_float32_alone(dtype: DType) -> None:
    result = resolved(dtype=dtype)
    assert (result.kernels, result.kv_dtype) == (KernelSet.reference, KVDType(dtype.value))


def test_without_the_cpp_operations_auto_is_the_reference() -> None:
    result = resolved(available=KernelSet.reference, checkpoint="Q4_1")
    assert (result.kernels, result.quantization, result.kv_dtype) == (KernelSet.reference, NONE, KV_FLOAT32)
    assert note_on("engine.kernels", result.notes) == "engine.kernels: auto -> reference"


@pytest.mark.parametrize(("available", "asked", "expected"), [
    (KernelSet.cpu, AUTO, INT8), (KernelSet.cpu, INT4, INT4), (KernelSet.reference, AUTO, NONE)])
def test_what_a_model_wants_on_a_cpu_is_taken_with_the_cpp_operations_alone(
        available: KernelSet, asked: Quantization, expected: Quantization) -> None:
    result = resolved(available=available, checkpoint="Q4_1", quantization=asked, cpu_quantization=INT8)
    assert result.quantization is expected
    assert note_on("model.quantization", result.notes) == (
        "model.quantization: auto -> int8 (model.cpu_quantization)" if expected is INT8 else None)


@pytest.mark.parametrize(("checkpoint", "expected"), [
    ("Q8_0", INT8), ("Q4_0", INT4), ("Q4_1", INT4), ("Q4_K", NONE), ("F16", NONE), ("float32", NONE)])
def test_auto_takes_the_integers_that_the_checkpoint_holds(checkpoint: str, expected: Quantization) -> None:
    result = resolved(checkpoint=checkpoint)
    assert result.quantization is expected
    assert result.kv_dtype is (KV_FLOAT32 if expected is NONE else KV_BFLOAT16)
    if expected is NONE:
        assert note_on("model.quantization", result.notes) is note_on("memory.kv_dtype", result.notes) is None
    else:
        assert note_on("model.quantization", result.notes) == (
            f"model.quantization: auto -> {expected.value} (the file's own {checkpoint} integers, not rounded again)")
        assert note_on("memory.kv_dtype", result.notes) == "memory.kv_dtype: auto -> bfloat16"


@pytest.mark.parametrize("settings", [{"kernels": KernelSet.reference}, {"dtype": DType.float64},
                                      {"dtype": BFLOAT16}], ids=str)
def test_auto_keeps_numbers_where_no_kernel_multiplies_by_the_files_integers(settings: dict[str, Any]) -> None:
    result = resolved(checkpoint="Q4_1", **settings)
    assert result.quantization is NONE and result.kv_dtype is KVDType(result.dtype.value)


@pytest.mark.parametrize("quantization", [NONE, INT8, INT4])
@pytest.mark.parametrize("checkpoint", ["Q8_0", "Q4_1", "float32"])
@pytest.mark.parametrize("kernels", [KernelSet.cpu, KernelSet.reference])
def test_a_quantization_that_is_asked_for_is_kept(kernels: KernelSet, checkpoint: str,
                                                  quantization: Quantization) -> None:
    result = resolved(checkpoint=checkpoint, quantization=quantization, kernels=kernels)
    assert result.quantization is quantization and note_on("model.quantization", result.notes) is None
    beside_integers = quantization is not NONE and kernels is KernelSet.cpu
    assert result.kv_dtype is (KV_BFLOAT16 if beside_integers else KV_FLOAT32)


@pytest.mark.parametrize("kv_dtype", [KV_FLOAT32, KV_BFLOAT16])
@pytest.mark.parametrize("quantization", [NONE, INT8, INT4])
def test_the_cpp_operations_keep_either_cache(quantization: Quantization, kv_dtype: KVDType) -> None:
    result = resolved(quantization=quantization, kv_dtype=kv_dtype)
    assert result.kv_dtype is kv_dtype and note_on("memory.kv_dtype", result.notes) is None


@pytest.mark.parametrize("threads", [1, 5, 6])
def test_threads_up_to_the_cores_are_kept(threads: int) -> None:
    assert resolved(threads=threads).threads == threads


FP8_CHECKPOINT = StoredQuantization("fp8", Fp8Layout(), Inputs.rounded_by_row, Modules(("Linear",), (), matches))


def resolved_fp8(machine: DeviceFacts, **settings: Any) -> Resolved:
    model = dataclasses.replace(load_spec(dummy_model()), stored_quantization=FP8_CHECKPOINT)
    return resolve(config(**settings), model, machine, None)


@pytest.mark.parametrize("machine", [CPU, dataclasses.replace(CUDA, compute_capability=(8, 9)),
                                     dataclasses.replace(CUDA, compute_capability=(10, 0))], ids=str)
def test_auto_takes_the_products_that_a_checkpoint_was_made_for(machine: DeviceFacts) -> None:
    result = resolved_fp8(machine)
    assert result.quantization is Quantization.fp8_dynamic
    assert note_on("model.quantization", result.notes) == (
        "model.quantization: auto -> fp8_dynamic (the checkpoint's own numbers, fp8)")


@pytest.mark.parametrize("asked", [AUTO, Quantization.fp8_dynamic])
def test_products_of_eight_bit_floats_are_refused_on_a_gpu_without_them(asked: Quantization) -> None:
    a100 = dataclasses.replace(CUDA, name="NVIDIA A100", compute_capability=(8, 0))
    with pytest.raises(ConfigError) as caught:
        resolved_fp8(a100, quantization=asked)
    text = str(caught.value)
    assert caught.value.key == "model.quantization" and "NVIDIA A100 multiplies no eight-bit floats" in text
    assert "8.0; 8.9 is the first" in text and "set model.quantization=fp8," in text and "\n" not in text
    assert resolved_fp8(a100, quantization=Quantization.fp8).quantization is Quantization.fp8
    assert resolved_fp8(a100, quantization=asked, kernels=KernelSet.reference).quantization is Quantization.fp8_dynamic


def test_activations_that_no_kernel_rounds_are_refused() -> None:
    model = dataclasses.replace(load_spec(dummy_model()), stored_quantization=dataclasses.replace(
        FP8_CHECKPOINT, inputs=Inputs.rounded_otherwise))
    with pytest.raises(ConfigError, match=r"quantization=auto: the checkpoint \(fp8\) wants activations rounded"):
        resolve(config(), model, CPU, None)
    assert resolve(config(quantization=Quantization.fp8), model, CPU, None).quantization is Quantization.fp8


# --- What does not go together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "dtype", "what"), [
    (CPU, DType.float64, "float64 on cpu"), (CPU, BFLOAT16, "bfloat16 on cpu"), (CPU, DType.float16, "float16 on cpu"),
    (CUDA, DType.auto, "bfloat16 on cuda"), (CUDA, FLOAT32, "float32 on cuda")])
def test_the_cpp_operations_are_refused_for_what_they_cannot_compute(device: DeviceFacts, dtype: DType,
                                                                     what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(device, dtype=dtype, kernels=KernelSet.cpu)
    assert str(caught.value) == ("engine.kernels=cpu: the C++ operations compute in float32 on a CPU, and this is "
                                 f"{what}; set engine.kernels=auto or model.dtype=float32")


def test_more_query_heads_than_the_cpp_attention_holds_go_to_the_reference() -> None:
    model = dataclasses.replace(load_spec(dummy_model()), num_heads=128, num_kv_heads=1)
    assert resolve(config(), model, CPU).kernels is KernelSet.reference
    with pytest.raises(ConfigError, match="96 query heads a key head, and the model has 128"):
        resolve(config(kernels=KernelSet.cpu), model, CPU)
    assert resolve(config(), dataclasses.replace(model, num_heads=96), CPU).kernels is KernelSet.cpu


@pytest.mark.parametrize(("kernels", "dtype", "kv_dtype", "allowed"), [
    (KernelSet.cpu, FLOAT32, KVDType.float16, "float32 or bfloat16"),
    (KernelSet.cpu, FLOAT32, KVDType.float64, "float32 or bfloat16"),
    (KernelSet.cpu, FLOAT32, KVDType.fp8, "float32 or bfloat16"),
    (KernelSet.reference, FLOAT32, KV_BFLOAT16, "float32 or fp8"),
    (KernelSet.reference, DType.float64, KV_FLOAT32, "float64 or fp8"),
    (KernelSet.auto, BFLOAT16, KV_FLOAT32, "bfloat16 or fp8")])
def test_a_cache_in_another_number_format_is_refused(kernels: KernelSet, dtype: DType, kv_dtype: KVDType,
                                                     allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(kernels=kernels, dtype=dtype, kv_dtype=kv_dtype)
    name = "reference" if kernels is KernelSet.auto else kernels.value
    assert str(caught.value) == (f"memory.kv_dtype={kv_dtype.value}: the {name} kernels keep the cache in {allowed}; "
                                 "set memory.kv_dtype=auto")


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, DType.float64])
def test_the_reference_keeps_a_cache_in_fp8_where_the_cpp_operations_do_not(dtype: DType) -> None:
    result = resolved(dtype=dtype, kv_dtype=KVDType.fp8)
    assert (result.kernels, result.kv_dtype, result.dtype) == (KernelSet.reference, KVDType.fp8, dtype)
    assert note_on("engine.kernels", result.notes) == (
        "engine.kernels: auto -> reference (the cpu kernels keep no cache in fp8)")


def test_the_triton_operations_keep_a_cache_in_fp8() -> None:
    result = resolved(CUDA, available=KernelSet.triton, kv_dtype=KVDType.fp8)
    assert (result.kernels, result.kv_dtype) == (KernelSet.triton, KVDType.fp8)
    assert note_on("engine.kernels", result.notes) == "engine.kernels: auto -> triton"


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(threads=7)
    assert str(caught.value) == "engine.threads=7: this process may use 6 cores; set engine.threads=6 or less"


# --- A machine without a compiler -------------------------------------------------------------------------------------


def without_compiler(kernels: KernelSet) -> Config:
    return make_config(dtype=FLOAT32, engine=EngineConfig(threads=1, device=Device.cpu, kernels=kernels))


def test_without_a_compiler_auto_goes_on_with_the_reference_and_a_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    threads = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        built = build_engine(without_compiler(KernelSet.auto), dummy_model(), tmp_path, lambda *_: None)
    torch.set_num_threads(threads)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "apt install g++" in warning and "reference" in warning and "\n" not in warning
    assert built.facts.kernels == "reference" and "engine.kernels: auto -> reference" in built.facts.notes
    assert len(run(built.engine, [spec([1, 2, 3], max_tokens=4)])[0].tokens) == 4


def test_without_a_compiler_the_cpp_operations_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        build_engine(without_compiler(KernelSet.cpu), dummy_model(), tmp_path, lambda *_: None)
    assert str(caught.value).startswith("engine.kernels=cpu: no C++ compiler") and "\n" not in str(caught.value)
    assert "apt install g++" in str(caught.value) and "engine.kernels=reference" in str(caught.value)
