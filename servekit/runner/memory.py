"""The memory planner: how many KV blocks fit beside the weights and the largest step."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.errors import ConfigError, require
from servekit.config.preemption import SwapPreemptionConfig
from servekit.config.schema import Config, Device, KernelSet, Quantization
from servekit.model.footprint import MemoryUse, WeightBits, activation_bytes, gigabytes, memory_use, weights_bytes
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts

_DEFAULT_FRACTION = {Device.cuda: 0.9, Device.cpu: 0.3}
"""A GPU is the engine's own; a CPU's memory is shared with everything else on the machine."""

_DEFAULT_SWAP_SHARE = 0.1
"""Of the host's memory that nothing else takes."""

_EIGHT_BITS = (Quantization.int8, Quantization.int8_dynamic, Quantization.fp8, Quantization.fp8_dynamic)
_HEAD_IN_INT8 = (Quantization.int8, Quantization.int8_dynamic, Quantization.int4)
_OWN_CPU_PRODUCTS = (Quantization.int8, Quantization.int4)
"""What the C++ operations multiply by as it is; they leave the rest to the reference."""
_SCALE_BITS = {Quantization.mxfp4: 8, Quantization.nvfp4: 8}
"""Bits of a group's scale; the others have one in float32, or a scale and a minimum in half that."""
_GROUP_SIZES = {Quantization.int4: 32, Quantization.mxfp4: 32, Quantization.nvfp4: 16}
"""Weights that share a scale, where they are rounded on load; the others have one scale for each output channel."""
_GGUF_INT8, _GGUF_GROUP = "Q8_0", 32
_DEQUANTIZED_BYTES = 12
"""Of a number of the matrix that a reference product dequantises: itself, and what it is computed from."""


@dataclass(frozen=True)
class Formats:
    """What decides how large a model's tensors are."""

    quantization: Quantization
    kernels: KernelSet
    dtype_bytes: int
    """Of weights that are not quantised, and of activations."""
    kv_dtype_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, and what the KV cache holds."""

    use: MemoryUse
    kv_bytes: int
    num_kv_blocks: int
    num_host_blocks: int
    """KV blocks in the host's memory, for requests that are swapped out."""
    max_model_len: int
    """Longest context, in tokens: the configured one, the model's, or what the cache can hold."""
    notes: tuple[str, ...]
    """What was derived or lowered, one line each."""


def plan_memory(config: Config, spec: ModelSpec, device: DeviceFacts, formats: Formats,
                measured_activation_bytes: int | None = None, graph_bytes: int = 0) -> MemoryPlan:
    """Divide the device's memory before the KV cache is allocated.

    The cache gets what is left of the usable share after weights, the largest step, graphs and the headroom, but no
    more than all of scheduler.max_num_seqs requests can fill at full length. A model length that was asked for must
    fit; one that only the model declares is lowered to what fits, and said.

    Args:
        config: What was asked for.
        spec: The model.
        device: As it was before the model was loaded.
        formats: Number formats and kernels.
        measured_activation_bytes: Of the largest step, from a profile run; None: estimate.
        graph_bytes: What CUDA graphs take.

    Raises ConfigError with the numbers and the knob to turn.
    """
    memory, block_size = config.memory, config.memory.block_size_tokens
    require(config.model.max_model_len is None or config.model.max_model_len <= spec.max_context_tokens,
            "model.max_model_len", config.model.max_model_len, f"the model reaches {spec.max_context_tokens} tokens",
            f"set model.max_model_len={spec.max_context_tokens} or less")
    wanted_len = config.model.max_model_len or spec.max_context_tokens
    fraction = memory.memory_fraction or _DEFAULT_FRACTION[device.kind]
    use = memory_use(device.total_bytes, device.free_bytes, fraction, memory.headroom,
                     weights_bytes(spec, weight_bits(spec, formats)),
                     _estimate(config, spec, formats) if measured_activation_bytes is None
                     else measured_activation_bytes, graph_bytes, measured_activation_bytes is not None)
    block_bytes = block_size * spec.kv_bytes_per_token(formats.kv_dtype_bytes)
    notes = _usable_notes(config, use, fraction)
    if memory.num_kv_blocks is None:
        num_blocks = min(max(0, use.room_bytes) // block_bytes,
                         config.scheduler.max_num_seqs * -(-wanted_len // block_size))
    else:
        num_blocks = _checked_blocks(memory.num_kv_blocks, use, block_bytes)
    if num_blocks * block_size < wanted_len:
        notes.append(_fit_length(config, wanted_len, num_blocks, use))
    taken = use.weights_bytes + use.activation_bytes + num_blocks * block_bytes
    host_free = device.host_free_bytes - taken if device.kind is Device.cpu else device.host_free_bytes
    num_host_blocks = _num_host_blocks(config, num_blocks, block_bytes, max(0, host_free), notes)
    return MemoryPlan(use, num_blocks * block_bytes, num_blocks, num_host_blocks,
                      min(wanted_len, num_blocks * block_size), tuple(notes))


def weight_bits(spec: ModelSpec, formats: Formats) -> WeightBits:
    """Bits of a model's weights as the kernels keep them."""
    quantization, plain = formats.quantization, 8.0 * formats.dtype_bytes
    if quantization is Quantization.none:
        return WeightBits(plain, plain, plain)
    stored = spec.stored_quantization
    layout = stored.layout if stored is not None and quantization in stored.kept_by else None
    group_size = _group_size(spec, quantization) if layout is None else layout.group_size or spec.hidden_size
    codes = 8 if quantization in _EIGHT_BITS or not _packs(quantization, formats.kernels, layout is not None) else 4
    rounds_head = quantization in _HEAD_IN_INT8 and layout is None
    return WeightBits(codes + _SCALE_BITS.get(quantization, 32) / group_size,
                      8 + 32 / _group_size(spec, Quantization.int8) if rounds_head else plain, plain)


def _group_size(spec: ModelSpec, quantization: Quantization) -> int:
    """Weights that share a scale, unless the checkpoint's config.json says it."""
    by_channel = _GGUF_GROUP if spec.checkpoint_dtype == _GGUF_INT8 else spec.hidden_size
    return _GROUP_SIZES.get(quantization, by_channel)


def _packs(quantization: Quantization, kernels: KernelSet, is_kept: bool) -> bool:
    """Whether two four-bit numbers share a byte."""
    match kernels:
        case KernelSet.triton:
            return True
        case KernelSet.cpu:
            # A checkpoint's own integers take eight bits where four do not hold them exactly: reckoned as if all did.
            return quantization is Quantization.int4 and not is_kept
        case _:
            return False


def _estimate(config: Config, spec: ModelSpec, formats: Formats) -> int:
    scheduler = config.scheduler
    largest_matrix = max(2 * spec.intermediate_size, spec.num_heads * spec.head_dim) * spec.hidden_size
    return (activation_bytes(spec, scheduler.max_step_tokens, scheduler.max_num_seqs, formats.dtype_bytes)
            + (_DEQUANTIZED_BYTES * largest_matrix if _dequantizes(formats) else 0))


def _dequantizes(formats: Formats) -> bool:
    """Whether a product makes plain numbers of its matrix first."""
    match formats.kernels:
        case KernelSet.triton:
            return False
        case KernelSet.cpu:
            return formats.quantization not in (Quantization.none, *_OWN_CPU_PRODUCTS)
        case _:
            return formats.quantization is not Quantization.none


def _usable_notes(config: Config, use: MemoryUse, fraction: float) -> list[str]:
    notes = [f"memory.memory_fraction: null -> {fraction}"] if config.memory.memory_fraction is None else []
    if use.is_limited_by_others:
        notes.append(f"usable memory: {gigabytes(use.total_bytes * fraction)} -> {gigabytes(use.usable_bytes)} "
                     f"({use.others})")
    return notes


def _checked_blocks(wanted: int, use: MemoryUse, block_bytes: int) -> int:
    """The blocks that were asked for: they may take all that is free, the headroom included."""
    free = use.total_bytes - use.others_bytes
    rest = use.weights_bytes + use.activation_bytes + use.graph_bytes
    most = max(1, (free - rest) // block_bytes)
    require(wanted <= most, "memory.num_kv_blocks", wanted,
            f"needs {gigabytes(wanted * block_bytes)} beside {gigabytes(use.weights_bytes)} of weights and "
            f"{gigabytes(rest - use.weights_bytes)} for the largest step, and {gigabytes(free)} are free",
            f"set at most memory.num_kv_blocks={most}")
    return wanted


def _num_host_blocks(config: Config, num_blocks: int, block_bytes: int, free_bytes: int, notes: list[str]) -> int:
    """Blocks for requests that are swapped out, where they are. ConfigError if what was asked for does not fit."""
    preemption = config.scheduler.preemption
    if not isinstance(preemption, SwapPreemptionConfig):
        return 0
    key, wanted_bytes = "scheduler.preemption.swap_space_bytes", preemption.swap_space_bytes
    if wanted_bytes is None:
        num_host_blocks = min(num_blocks, int(free_bytes * _DEFAULT_SWAP_SHARE) // block_bytes)
        notes.append(f"{key}: null -> {num_host_blocks * block_bytes} ({num_host_blocks} KV blocks)")
        return num_host_blocks
    require(wanted_bytes >= block_bytes, key, wanted_bytes, f"one KV block takes {block_bytes} bytes",
            f"set at least {key}={block_bytes}, or scheduler/preemption=recompute")
    require(wanted_bytes <= free_bytes, key, wanted_bytes, f"{free_bytes} bytes of the host's memory are free",
            f"set at most {key}={free_bytes}")
    return wanted_bytes // block_bytes


def _fit_length(config: Config, wanted_len: int, num_blocks: int, use: MemoryUse) -> str:
    """A note that the length was lowered; ConfigError where it was asked for or nothing useful is left."""
    holds = num_blocks * config.memory.block_size_tokens
    if config.model.max_model_len is not None or holds < 2:
        raise ConfigError("model.max_model_len", wanted_len,
                          f"the KV cache holds {holds} tokens ({num_blocks} blocks of "
                          f"{config.memory.block_size_tokens}; {use})",
                          f"set model.max_model_len={holds} or raise memory.num_kv_blocks or memory.memory_fraction"
                          if holds >= 2 else
                          "raise memory.memory_fraction or memory.num_kv_blocks, lower scheduler.max_step_tokens, or "
                          "take a smaller model, dtype or model.quantization")
    return (f"model.max_model_len: {wanted_len} -> {holds} (the KV cache holds no more; raise memory.num_kv_blocks or "
            "memory.memory_fraction for longer requests)")
