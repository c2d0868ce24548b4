"""The composition root of the engine: from a configuration and a model's files to a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, Device, DType, KernelSet
from servekit.core.build import build_scheduler
from servekit.engine.engine import Engine
from servekit.engine.messages import EngineFacts
from servekit.kernels import load_kernels
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel
from servekit.runner.device import DeviceFacts, find_device
from servekit.runner.kv_tensors import allocate_kv
from servekit.runner.memory import MemoryPlan, plan_memory
from servekit.runner.runner import Runner

OnProgress = Callable[[str, int, int, str], None]
"""Told (stage, done, total, unit) while an engine starts."""

_TORCH_DTYPES = {DType.float64: torch.float64, DType.float32: torch.float32, DType.bfloat16: torch.bfloat16,
                 DType.float16: torch.float16}


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready, and what was found out while it was built."""

    engine: Engine
    facts: EngineFacts


@dataclass(frozen=True)
class _Resolved:
    """What `auto` and `null` came to on this machine."""

    dtype: DType
    kv_dtype: DType
    kernels: KernelSet
    threads: int
    notes: tuple[str, ...]


def build_engine(config: Config, local: LocalModel, on_progress: OnProgress) -> BuiltEngine:
    """Resolve the configuration against model and device, plan the memory, load, and wire the parts together.

    Raises ConfigError for a setting that does not fit the model or the device, ModelFileError for the files.
    """
    spec = load_spec(local)
    device = find_device(config.engine.device)
    resolved = _resolve(config, device)
    memory = plan_memory(config, spec, device, _size_bytes(resolved.dtype), _size_bytes(resolved.kv_dtype))
    torch.set_num_threads(resolved.threads)
    started = time.monotonic()
    decoder = load_decoder(local, spec, _TORCH_DTYPES[resolved.dtype], device.torch_device,
                           load_kernels(resolved.kernels.value), memory.max_model_len,
                           lambda done, total: on_progress("weights", done, total, "B"))
    load_s = time.monotonic() - started
    kv = allocate_kv(spec, memory.num_kv_blocks, config.memory.block_size_tokens, _TORCH_DTYPES[resolved.kv_dtype],
                     device.torch_device)
    scheduler = build_scheduler(config.scheduler, memory.num_kv_blocks, config.memory.block_size_tokens,
                                memory.max_model_len)
    runner = Runner(decoder, kv, config.memory.block_size_tokens, device.torch_device)
    facts = _facts(local, spec.vocab_size, config, device, resolved, memory, load_s)
    return BuiltEngine(Engine(scheduler, runner), facts)


def _resolve(config: Config, device: DeviceFacts) -> _Resolved:
    """Settle every `auto` and `null`; each choice is one note."""
    notes = []
    dtype, kv_dtype = config.model.dtype, config.memory.kv_dtype
    if config.engine.device is Device.auto:
        notes.append(f"engine.device: auto -> {device.kind.value}")
    if dtype is DType.auto:
        dtype = DType.float32 if device.kind is Device.cpu else DType.bfloat16
        notes.append(f"model.dtype: auto -> {dtype.value}")
    if kv_dtype is DType.auto:
        kv_dtype = dtype
    if kv_dtype is not dtype:
        raise ConfigError("memory.kv_dtype", kv_dtype.value, f"the cache is kept in the model's format, {dtype.value}",
                          "set memory.kv_dtype=auto")
    threads = config.engine.threads
    if threads is None:
        threads = device.cores
        notes.append(f"engine.threads: null -> {threads}")
    if threads > device.cores:
        raise ConfigError("engine.threads", threads, f"this process may use {device.cores} cores",
                          f"set engine.threads={device.cores} or less")
    kernels = KernelSet.reference if config.engine.kernels is KernelSet.auto else config.engine.kernels
    return _Resolved(dtype, kv_dtype, kernels, threads, tuple(notes))


def _facts(local: LocalModel, vocab_size: int, config: Config, device: DeviceFacts, resolved: _Resolved,
           memory: MemoryPlan, load_s: float) -> EngineFacts:
    return EngineFacts(
        model_name=config.model.name or local.name,
        max_model_len=memory.max_model_len,
        vocab_size=vocab_size,
        num_kv_blocks=memory.num_kv_blocks,
        block_size_tokens=config.memory.block_size_tokens,
        device=device.name,
        dtype=resolved.dtype.value,
        kernels=resolved.kernels.value,
        threads=resolved.threads,
        weights_bytes=memory.weights_bytes,
        kv_bytes=memory.kv_bytes,
        load_s=load_s,
        notes=resolved.notes + memory.notes)


def _size_bytes(dtype: DType) -> int:
    return _TORCH_DTYPES[dtype].itemsize
