"""What every `auto` and `null` comes to, given the model and the device. Nothing is written back."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.errors import ConfigError, require
from servekit.config.schema import Config, Device, DType, KernelSet, KVDType, Quantization
from servekit.model.sharding import require_divisible
from servekit.model.spec import ModelSpec
from servekit.runner.device import FIRST_WITH_FP8, DeviceFacts

_STORED_INTEGERS = {"Q8_0": Quantization.int8, "Q4_0": Quantization.int4, "Q4_1": Quantization.int4}
"""Checkpoints whose matrices are integers that the kernels can multiply by as they are."""

_MOST_HEADS_PER_KEY_HEAD = {KernelSet.cpu: 96, KernelSet.triton: 32}
"""Query rows that one pass of the attention holds (kernels/cpu/attention.h and kernels/triton/attention_prefill.py)."""


_SAID_OF_RANKS = ("engine.tensor_parallel: {} processes (bytes and threads are those of each; layers are computed "
                  "operation by operation)")


@dataclass(frozen=True)
class Resolved:
    """The settings of one engine that depend on its machine and its model."""

    dtype: DType
    kv_dtype: KVDType
    quantization: Quantization
    kernels: KernelSet
    threads: int
    notes: tuple[str, ...]
    """`key: requested -> resolved (why)`, one line each."""


def resolve(config: Config, spec: ModelSpec, device: DeviceFacts, available: KernelSet | None = None) -> Resolved:
    """Settle what was left open; `auto` kernels are those that suit the device if they are `available`.

    `available` is None before they were tried; afterwards it is what came of it.

    Raises ConfigError for what does not go together.
    """
    notes = [f"engine.device: auto -> {device.kind.value}"] if config.engine.device is Device.auto else []
    dtype = config.model.dtype
    if dtype is DType.auto:
        dtype = DType.float32 if device.kind is Device.cpu else DType.bfloat16
        notes.append(f"model.dtype: auto -> {dtype.value}")
    kernels = _kernels(config, spec, device, dtype, available, notes)
    quantization = _quantization(config, spec, device, kernels, notes)
    kv_dtype = _kv_dtype(config, kernels, quantization, dtype, notes)
    if config.engine.tensor_parallel > 1:
        _check_ranks(config, spec, device, quantization)
        notes.append(_SAID_OF_RANKS.format(config.engine.tensor_parallel))
    return Resolved(dtype, kv_dtype, quantization, kernels, _threads(config, device, notes), tuple(notes))


def _kernels(config: Config, spec: ModelSpec, device: DeviceFacts, dtype: DType,
             available: KernelSet | None, notes: list[str]) -> KernelSet:
    heads_per_key_head = spec.num_heads // spec.num_kv_heads
    wanted, fast = config.engine.kernels, KernelSet.cpu if device.kind is Device.cpu else KernelSet.triton
    can_compute = dtype is DType.float32 if fast is KernelSet.cpu else dtype is not DType.float64
    if wanted is KernelSet.auto:
        is_suited = can_compute and heads_per_key_head <= _MOST_HEADS_PER_KEY_HEAD[fast]
        has_cache = fast is not KernelSet.cpu or config.memory.kv_dtype is not KVDType.fp8
        kernels = fast if is_suited and has_cache and available in (None, fast) else KernelSet.reference
        why = "" if has_cache else f" (the {fast.value} kernels keep no cache in fp8)"
        notes.append(f"engine.kernels: auto -> {kernels.value}{why}")
        return kernels
    if wanted is not KernelSet.reference:
        where = "the C++ operations compute in float32 on a CPU" if wanted is KernelSet.cpu else (
            "the Triton operations compute in float32 or less on a GPU")
        require(wanted is fast and can_compute, "engine.kernels", wanted.value,
                f"{where}, and this is {dtype.value} on {device.kind.value}",
                "set engine.kernels=auto or model.dtype=float32")
        most = _MOST_HEADS_PER_KEY_HEAD[wanted]
        require(heads_per_key_head <= most, "engine.kernels", wanted.value,
                f"its attention takes {most} query heads a key head, and the model has {heads_per_key_head}",
                "set engine.kernels=auto")
    return wanted


def _quantization(config: Config, spec: ModelSpec, device: DeviceFacts, kernels: KernelSet,
                  notes: list[str]) -> Quantization:
    wanted = config.model.quantization
    quantization = _left_open(config, spec, kernels, notes) if wanted is Quantization.auto else wanted
    if quantization is Quantization.fp8_dynamic and kernels is KernelSet.triton:
        capability = device.compute_capability or (0, 0)
        require(capability >= FIRST_WITH_FP8, "model.quantization", wanted.value,
                f"{device.name} multiplies no eight-bit floats (compute capability {capability[0]}.{capability[1]}; "
                f"{FIRST_WITH_FP8[0]}.{FIRST_WITH_FP8[1]} is the first to)",
                "set model.quantization=fp8, whose activations are not rounded, or int8_dynamic, int8, int4 or none")
    return quantization


def _left_open(config: Config, spec: ModelSpec, kernels: KernelSet, notes: list[str]) -> Quantization:
    on_cpu = config.model.cpu_quantization
    if kernels is not KernelSet.cpu or on_cpu is Quantization.auto:
        return _as_stored(spec, kernels, notes)
    notes.append(f"model.quantization: auto -> {on_cpu.value} (model.cpu_quantization)")
    return on_cpu


def _as_stored(spec: ModelSpec, kernels: KernelSet, notes: list[str]) -> Quantization:
    """What the checkpoint's own matrices can be multiplied by as they are."""
    stored = spec.stored_quantization
    if stored is not None:
        weights = stored.layout.quantization.value
        if stored.as_made is None:
            raise ConfigError("model.quantization", "auto", f"the checkpoint ({stored.method}) wants activations "
                              "rounded in a way that no kernel has: with fixed scales, or to four bits",
                              f"set model.quantization={weights}, whose activations are not rounded")
        notes.append(f"model.quantization: auto -> {stored.as_made.value} (the checkpoint's own numbers, "
                     f"{stored.method})")
        return stored.as_made
    in_gguf = _STORED_INTEGERS.get(spec.checkpoint_dtype, Quantization.none)
    quantization = in_gguf if kernels is KernelSet.cpu else Quantization.none
    if quantization is not Quantization.none:
        notes.append(f"model.quantization: auto -> {quantization.value} (the file's own {spec.checkpoint_dtype} "
                     "integers, not rounded again)")
    return quantization


def _check_ranks(config: Config, spec: ModelSpec, device: DeviceFacts, quantization: Quantization) -> None:
    """Raise ConfigError for more ranks than the model or the machine is good for."""
    ranks = config.engine.tensor_parallel
    require_divisible(spec, quantization, ranks)
    require(device.kind is not Device.cuda or ranks <= device.count, "engine.tensor_parallel", ranks,
            f"each needs a GPU of its own, and torch finds {device.count} on this machine",
            f"set engine.tensor_parallel={device.count} or less")
    require(config.model.quantization_report is None, "model.quantization_report", config.model.quantization_report,
            f"measures whole matrices, and engine.tensor_parallel={ranks} divides them",
            "set engine.tensor_parallel=1 for the report")


def _kv_dtype(config: Config, kernels: KernelSet, quantization: Quantization, dtype: DType,
              notes: list[str]) -> KVDType:
    wanted, of_model = config.memory.kv_dtype, KVDType(dtype.value)
    if wanted is KVDType.auto:
        beside_integers = kernels is KernelSet.cpu and quantization is not Quantization.none
        kv_dtype = KVDType.bfloat16 if beside_integers else of_model
        if kv_dtype is not of_model:
            notes.append(f"memory.kv_dtype: auto -> {kv_dtype.value}")
        return kv_dtype
    allowed = (KVDType.float32, KVDType.bfloat16) if kernels is KernelSet.cpu else (of_model, KVDType.fp8)
    if wanted not in allowed:
        raise ConfigError("memory.kv_dtype", wanted.value,
                          f"the {kernels.value} kernels keep the cache in {' or '.join(d.value for d in allowed)}",
                          "set memory.kv_dtype=auto")
    return wanted


def _threads(config: Config, device: DeviceFacts, notes: list[str]) -> int:
    threads = config.engine.threads
    if threads is None:
        threads = max(1, device.cores // config.engine.tensor_parallel)
        notes.append(f"engine.threads: null -> {threads}")
        return threads
    require(threads <= device.cores, "engine.threads", threads, f"this process may use {device.cores} cores",
            f"set engine.threads={device.cores} or less")
    return threads
