"""The memory planner: how many KV blocks fit beside the weights and the largest step."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.errors import ConfigError, require
from servekit.config.preemption import SwapPreemptionConfig
from servekit.config.schema import Config, Device, Quantization
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts

_DEFAULT_FRACTION = {Device.cuda: 0.9, Device.cpu: 0.3}
"""A GPU is the engine's own; a CPU's memory is shared with everything else on the machine."""

_DEFAULT_SWAP_SHARE = 0.1
"""Of the host's memory that nothing else takes."""

_BITS = {Quantization.int4: 5.0, Quantization.int8: 9.0}
"""Bits of a quantised weight with its share of the scales: at most one scale for 32 weights."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes, and what the KV cache holds."""

    usable_bytes: int
    weights_bytes: int
    activation_bytes: int
    """Estimate for the largest step."""
    headroom_bytes: int
    kv_bytes: int
    num_kv_blocks: int
    num_host_blocks: int
    """KV blocks in the host's memory, for requests that are swapped out."""
    max_model_len: int
    """Longest context, in tokens: the configured one, the model's, or what the cache can hold."""
    notes: tuple[str, ...]
    """What was derived or lowered, one line each."""


def plan_memory(config: Config, spec: ModelSpec, device: DeviceFacts, quantization: Quantization, dtype_bytes: int,
                kv_dtype_bytes: int) -> MemoryPlan:
    """Divide the device's memory before anything is allocated.

    The cache gets what is left of the usable share after weights, the largest step and the headroom, but no more
    than all of scheduler.max_num_seqs requests can fill at full length. A model length that was asked for must
    fit; one that only the model declares is lowered to what fits, and said.

    Raises ConfigError with the numbers and the knob to turn.
    """
    memory, block_size = config.memory, config.memory.block_size_tokens
    require(config.model.max_model_len is None or config.model.max_model_len <= spec.max_context_tokens,
            "model.max_model_len", config.model.max_model_len, f"the model reaches {spec.max_context_tokens} tokens",
            f"set model.max_model_len={spec.max_context_tokens} or less")
    wanted_len = config.model.max_model_len or spec.max_context_tokens
    fraction = memory.memory_fraction or _DEFAULT_FRACTION[device.kind]
    usable = min(int(device.total_bytes * fraction), device.free_bytes)
    weights = weights_bytes(spec, quantization, dtype_bytes)
    activations = activation_bytes(spec, config.scheduler.max_step_tokens, config.scheduler.max_num_seqs, dtype_bytes)
    headroom = int(usable * memory.headroom)
    block_bytes = block_size * spec.kv_bytes_per_token(kv_dtype_bytes)
    room = usable - weights - activations - headroom
    if memory.num_kv_blocks is not None:
        num_blocks = memory.num_kv_blocks
        most = max(1, (device.free_bytes - weights) // block_bytes)
        require(num_blocks <= most, "memory.num_kv_blocks", num_blocks,
                f"needs {_gb(num_blocks * block_bytes)} beside {_gb(weights)} of weights and "
                f"{_gb(device.free_bytes)} are free", f"set at most memory.num_kv_blocks={most}")
    else:
        num_blocks = min(max(0, room) // block_bytes, config.scheduler.max_num_seqs * -(-wanted_len // block_size))
    notes = [f"memory.memory_fraction: null -> {fraction}"] if memory.memory_fraction is None else []
    if num_blocks * block_size < wanted_len:
        notes.append(_fit_length(config, wanted_len, num_blocks, _budget_line(usable, weights, activations, headroom)))
    taken = weights + activations + num_blocks * block_bytes
    host_free = device.host_free_bytes - taken if device.kind is Device.cpu else device.host_free_bytes
    num_host_blocks = _num_host_blocks(config, num_blocks, block_bytes, max(0, host_free), notes)
    return MemoryPlan(usable, weights, activations, headroom, num_blocks * block_bytes, num_blocks, num_host_blocks,
                      min(wanted_len, num_blocks * block_size), tuple(notes))


def weights_bytes(spec: ModelSpec, quantization: Quantization, dtype_bytes: int) -> int:
    """Bytes of all weights. A head that is quantised stands beside the embedding, even where the two are tied."""
    if quantization is Quantization.none:
        return spec.num_parameters * dtype_bytes
    head = spec.vocab_size * spec.hidden_size
    matrices = spec.num_matrix_parameters
    others = spec.num_parameters - matrices - (0 if spec.tied_head else head)
    bits = _BITS[quantization]
    return int(matrices * bits / 8) + int(head * _BITS[Quantization.int8] / 8) + others * dtype_bytes


def activation_bytes(spec: ModelSpec, max_step_tokens: int, max_num_seqs: int, dtype_bytes: int) -> int:
    """Estimate of the largest step's temporary tensors: the widest layer, and two copies of the logits in float32."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    widest = 4 * spec.hidden_size + 3 * spec.intermediate_size + heads
    return max_step_tokens * widest * dtype_bytes + 2 * 4 * max_num_seqs * spec.vocab_size


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


def _fit_length(config: Config, wanted_len: int, num_blocks: int, budget: str) -> str:
    """A note that the length was lowered; ConfigError where it was asked for or nothing useful is left."""
    holds = num_blocks * config.memory.block_size_tokens
    if config.model.max_model_len is not None or holds < 2:
        raise ConfigError("model.max_model_len", wanted_len,
                          f"the KV cache holds {holds} tokens ({num_blocks} blocks of "
                          f"{config.memory.block_size_tokens}; {budget})",
                          f"set model.max_model_len={holds} or raise memory.num_kv_blocks or memory.memory_fraction"
                          if holds >= 2 else
                          "raise memory.memory_fraction or memory.num_kv_blocks, or take a smaller model or dtype")
    return (f"model.max_model_len: {wanted_len} -> {holds} (the KV cache holds no more; raise memory.num_kv_blocks or "
            "memory.memory_fraction for longer requests)")


def _budget_line(usable: int, weights: int, activations: int, headroom: int) -> str:
    return (f"{_gb(usable)} usable, less {_gb(weights)} weights, {_gb(activations)} for the largest step, "
            f"{_gb(headroom)} headroom")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
