"""The composition root of the engine: from a configuration and a model's files to a running engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from servekit.config.errors import ConfigError, require
from servekit.config.resolve import as_dict
from servekit.config.schema import Config, Device, DType, EngineConfig, KernelSet, KVDType
from servekit.core.build import build_scheduler
from servekit.engine.engine import Engine
from servekit.engine.execution import Execution, resolve_execution
from servekit.engine.messages import EngineFacts
from servekit.engine.pipeline import Lockstep, Overlapped
from servekit.engine.resolve import Resolved, resolve
from servekit.engine.step_log import NoStepLog, Opened, StepLog, StepLogFile
from servekit.kernels import Kernels, reference_kernels
from servekit.kernels.cpu import cpu_kernels
from servekit.kernels.cpu.build import CompilationError, NoCompilerError
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel
from servekit.model.sharding import Shard, shard_spec
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts, find_device, use_gpu
from servekit.runner.graphs import CudaCapturer, DecodeGraphs, GraphInputs, GraphSizes, graph_bytes
from servekit.runner.group import ONE_RANK, Group, ProcessGroup
from servekit.runner.inputs import SharedStep, StepInputs
from servekit.runner.kv_tensors import KVTensors, allocate_host_kv, allocate_kv
from servekit.runner.memory import Formats, MemoryPlan, plan_memory
from servekit.runner.profile import cuda_peak_bytes, measure_activation_bytes
from servekit.runner.queue import work_queue
from servekit.runner.runner import OtherRanks, Runner
from servekit.runner.workers import RankOrder, Workers

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int, str], None]
"""Told (stage, done, total, unit) while an engine starts."""

_TORCH_DTYPES = {DType.float64: torch.float64, DType.float32: torch.float32, DType.bfloat16: torch.bfloat16,
                 DType.float16: torch.float16}
_TORCH_KV_DTYPES = {**{KVDType(dtype.value): torch_dtype for dtype, torch_dtype in _TORCH_DTYPES.items()},
                    KVDType.fp8: torch.float8_e4m3fn}


@dataclass(frozen=True)
class LoadedModel:
    """What a change of the scheduler's or the cache's settings leaves as it is."""

    config: Config
    """The settings it was loaded with."""
    local: LocalModel
    spec: ModelSpec
    device: DeviceFacts
    """As they were before anything was loaded."""
    kernels: Kernels
    resolved: Resolved
    decoder: Decoder
    """This rank's part of the model, where it is divided."""
    load_s: float
    group: Group = ONE_RANK


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready, and what was found out while it was built."""

    engine: Engine
    facts: EngineFacts
    model: LoadedModel
    workers: Workers | None
    """The other ranks' processes, where the model is divided."""


def build_engine(config: Config, local: LocalModel, cache_dir: Path, on_progress: OnProgress) -> BuiltEngine:
    """Resolve the configuration against model and device, plan the memory, load, and wire the parts together.

    Args:
        config: What was asked for.
        local: The model's files.
        cache_dir: Where compiled operations are kept.
        on_progress: Told how far it is.

    It also sets how many threads torch computes with in this process.

    Raises ConfigError for a setting that does not fit the model or the device, ModelFileError for the files.
    """
    found = _find(config, local, cache_dir, on_progress)
    workers = (Workers(config, local, cache_dir, found.device.torch_device) if config.engine.tensor_parallel > 1
               else None)
    model = _load(config, local, found, ONE_RANK if workers is None else workers.group, on_progress)
    return assemble(config, model, workers, on_progress)


def assemble(config: Config, model: LoadedModel, workers: Workers | None = None,
             on_progress: OnProgress = lambda *_: None) -> BuiltEngine:
    """An engine around a loaded model: KV cache, scheduler, runner with its CUDA graphs. Raises ConfigError."""
    if workers is not None:
        workers.assemble(config)
    execution, memory, runner = _equip(config, model, workers, on_progress)
    scheduler = build_scheduler(config.scheduler, memory.num_kv_blocks, config.memory.block_size_tokens,
                                memory.max_model_len, memory.num_host_blocks)
    facts = _facts(model.local, model.spec.vocab_size, config, model.device, model.resolved, memory, model.load_s,
                   execution.notes)
    pipeline = Overlapped(runner) if execution.overlap else Lockstep(runner)
    return BuiltEngine(Engine(scheduler, pipeline, log=_step_log(config, memory)), facts, model, workers)


class FollowingRank:
    """A rank of a divided model beside the first one: a runner without a scheduler."""

    def __init__(self, order: RankOrder) -> None:
        """Meet the others and load this rank's part of the model. Raises ConfigError, ModelFileError, RankLost."""
        config, device = order.config, torch.device(order.device)
        if device.type == "cuda":
            use_gpu(order.rank)
        group = ProcessGroup(order.rank, config.engine.tensor_parallel, device, order.meeting_file,
                             config.engine.startup_timeout_s)
        self._model = _load(config, order.local, _find(config, order.local, order.cache_dir), group)
        self._runner: Runner | None = None

    def assemble(self, config: Config) -> None:
        """Do what the first rank does to change its settings. Raises ConfigError where it is refused too."""
        self._runner = None  # Its cache goes before the new one comes: they may not fit side by side.
        self._runner = _equip(config, self._model).runner

    def follow(self, step: SharedStep) -> None:
        """Do this rank's part of a step."""
        assert self._runner is not None, "a step before there is a cache"
        self._runner.follow(step)


@dataclass(frozen=True)
class _Found:
    """What model, machine and settings come to before anything is loaded."""

    spec: ModelSpec
    device: DeviceFacts
    kernels: Kernels
    resolved: Resolved


def _find(config: Config, local: LocalModel, cache_dir: Path, on_progress: OnProgress = lambda *_: None) -> _Found:
    spec = load_spec(local)
    device = find_device(config.engine.device)
    kernels = _load_kernels(config, resolve(config, spec, device), device, cache_dir, on_progress)
    resolved = resolve(config, spec, device, KernelSet(kernels.name))
    resolve_memory(config, spec, device, resolved)  # What cannot fit is refused before anything is loaded.
    return _Found(spec, device, kernels, resolved)


def _load(config: Config, local: LocalModel, found: _Found, group: Group, on_progress: OnProgress = lambda *_: None
          ) -> LoadedModel:
    spec, resolved, device = found.spec, found.resolved, _agreed(found.device, group)
    torch.set_num_threads(resolved.threads)
    started = time.monotonic()
    decoder = load_decoder(local, spec, _TORCH_DTYPES[resolved.dtype], device.torch_device, found.kernels,
                           config.model.max_model_len or spec.max_context_tokens,
                           lambda done, total: on_progress("weights", done, total, "B"), resolved.quantization,
                           config.model.quantization_report,
                           Shard(group.rank, group.size, group.add_up) if group.size > 1 else None)
    if all(map(found.kernels.has_own_threads, decoder.weights.products)):
        torch.set_num_threads(1)  # Torch's would wait for work by spinning, on the cores of those that compute.
    return LoadedModel(config, local, spec, device, found.kernels, resolved, decoder, time.monotonic() - started, group)


def _agreed(device: DeviceFacts, group: Group) -> DeviceFacts:
    """The same for all ranks, so that all plan the same KV blocks: what the fullest of their devices has free."""
    return replace(device, total_bytes=group.smallest(device.total_bytes), free_bytes=group.smallest(device.free_bytes),
                   host_free_bytes=group.smallest(device.host_free_bytes))


class _Equipped(NamedTuple):
    execution: Execution
    memory: MemoryPlan
    runner: Runner


def _equip(config: Config, model: LoadedModel, others: OtherRanks | None = None,
           on_progress: OnProgress = lambda *_: None) -> _Equipped:
    """What every rank has around its part of the model. Raises ConfigError, on all ranks alike."""
    _check_same_model(config, model.config)
    execution = resolve_execution(config, model.device, model.resolved.kernels)
    memory = resolve_memory(config, model.spec, model.device, model.resolved, _profile(config, model))
    device = model.device.torch_device
    kv = allocate_kv(model.decoder.spec, memory.num_kv_blocks, config.memory.block_size_tokens,
                     _TORCH_KV_DTYPES[model.resolved.kv_dtype], device)
    graphs = _capture(execution.graph_sizes, config, model, memory, kv, on_progress) if execution.graph_sizes else None
    queue = work_queue(device, execution.overlap)
    runner = Runner(model.decoder, kv, allocate_host_kv(kv, memory.num_host_blocks), model.kernels,
                    config.memory.block_size_tokens, device, queue if others is None else others.watched(queue), graphs,
                    model.group, others)
    return _Equipped(execution, memory, runner)


@torch.inference_mode()
def _capture(sizes: tuple[int, ...], config: Config, model: LoadedModel, memory: MemoryPlan, kv: KVTensors,
             on_progress: OnProgress) -> DecodeGraphs:
    """Decode steps of the decoder over this cache, as CUDA graphs."""
    decoder = model.decoder

    def forward(inputs: StepInputs) -> Tensor:
        return decoder.logits(decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, kv))

    inputs = GraphInputs(max(sizes), memory.max_model_len, config.memory.block_size_tokens, model.device.torch_device)
    return DecodeGraphs(GraphSizes(sizes), inputs, forward, CudaCapturer(),
                        lambda done, total: on_progress("CUDA graphs", done, total, "graphs"))


class ReconfigurableEngine:
    """An engine whose scheduler and KV cache can be replaced while its model stays loaded."""

    def __init__(self, config: Config, built: BuiltEngine) -> None:
        self._config = config
        self._built: BuiltEngine | None = built
        self._model = built.model
        self._workers = built.workers

    def check(self) -> None:
        """Raise RankLost if a rank of the model has ended."""
        if self._workers is not None:
            self._workers.check()

    @property
    def engine(self) -> Engine:
        assert self._built is not None
        return self._built.engine

    @property
    def facts(self) -> EngineFacts:
        """Of the engine that is in place."""
        assert self._built is not None
        return self._built.facts

    def reconfigure(self, config: Config) -> EngineFacts:
        """Start over under other settings, with empty caches and counters; returns the new facts.

        Raises ConfigError for requests in flight, and for settings that do not fit the model, the memory or what only
        a fresh process can change; the engine then goes on under its old settings.
        """
        require(not self.engine.has_work, "engine", "busy", "has requests, which a change of settings would lose",
                "wait until they have ended")
        self._built = None  # Its cache goes before the new one comes: they may not fit side by side.
        try:
            self._built = assemble(config, self._model, self._workers)
            self._config = config
        finally:
            if self._built is None:
                self._built = assemble(self._config, self._model, self._workers)
        return self.facts


def resolve_memory(config: Config, spec: ModelSpec, device: DeviceFacts, resolved: Resolved,
                   measured_activation_bytes: int | None = None) -> MemoryPlan:
    """The memory plan of a resolved configuration, of one rank; see `plan_memory`. Raises ConfigError."""
    ranks = config.engine.tensor_parallel
    spec, device = shard_spec(spec, ranks), device.shared_by(ranks)
    formats = Formats(resolved.quantization, resolved.kernels, _TORCH_DTYPES[resolved.dtype].itemsize,
                      _TORCH_KV_DTYPES[resolved.kv_dtype].itemsize)
    graphs = graph_bytes(spec, resolve_execution(config, device, resolved.kernels).graph_sizes,
                         config.model.max_model_len or spec.max_context_tokens, config.memory.block_size_tokens,
                         formats.dtype_bytes)
    return plan_memory(config, spec, device, formats, measured_activation_bytes, graphs)


def _profile(config: Config, model: LoadedModel) -> int | None:
    """Bytes of the largest step's temporary tensors, measured; None on a CPU, where nothing counts them."""
    if model.device.kind is not Device.cuda:
        return None
    scheduler, max_len = config.scheduler, config.model.max_model_len or model.spec.max_context_tokens
    measured = measure_activation_bytes(model.decoder, scheduler.max_step_tokens, scheduler.max_num_seqs,
                                        config.memory.block_size_tokens, max_len,
                                        _TORCH_KV_DTYPES[model.resolved.kv_dtype], model.device.torch_device,
                                        cuda_peak_bytes)
    return -model.group.smallest(-measured)


def _check_same_model(config: Config, loaded: Config) -> None:
    """Raise ConfigError for a setting that only a fresh process can change."""
    asked, have = ({"model": one.model, "engine": _but_for_graph_sizes(one), "memory.kv_dtype": one.memory.kv_dtype}
                   for one in (config, loaded))
    for key, value in asked.items():
        require(value == have[key], key, value, "cannot change while the model is loaded", "start the engine anew")


def _but_for_graph_sizes(config: Config) -> EngineConfig:
    """Graphs are captured again for every KV cache, so their sizes may change with it."""
    return replace(config.engine, graph_batch_sizes=None)


def _step_log(config: Config, memory: MemoryPlan) -> StepLog:
    """Raises ConfigError for a file that cannot be written."""
    if config.engine.step_log is None:
        return NoStepLog()
    try:
        file = Path(config.engine.step_log).open("ab")  # noqa: SIM115 - it stays open as long as the engine
    except OSError as error:
        raise ConfigError("engine.step_log", config.engine.step_log, f"cannot be written ({error.strerror})",
                          "name a file in a folder to write in, or set engine.step_log=null") from None
    return StepLogFile(file, Opened(as_dict(config), memory.num_kv_blocks, memory.num_host_blocks,
                                    config.memory.block_size_tokens, memory.max_model_len))


def _load_kernels(config: Config, resolved: Resolved, device: DeviceFacts, cache_dir: Path, on_progress: OnProgress
                  ) -> Kernels:
    """The operations; where `auto` cannot have the fast ones, the reference, and a warning that says so."""
    reference = reference_kernels()
    try:
        match resolved.kernels:
            case KernelSet.cpu:
                return cpu_kernels(reference, cache_dir / "kernels", resolved.threads,
                                   lambda: on_progress("CPU operations, compiled once for this machine", 0, 1, ""))
            case KernelSet.triton:
                return _triton_kernels(reference, device.torch_device)
            case _:
                return reference
    except (NoCompilerError, CompilationError, ImportError) as error:
        wanted = config.engine.kernels
        if wanted is not KernelSet.auto:
            raise ConfigError("engine.kernels", wanted.value, str(error), "or set engine.kernels=reference") from error
        log.warning("%s; going on with the reference operations, which are several times slower", error)
        return reference


def _triton_kernels(reference: Kernels, device: torch.device) -> Kernels:
    """Raises ImportError where Triton is not installed, as on systems that it does not exist for."""
    from servekit.kernels.triton import find_gpu, triton_kernels

    return triton_kernels(reference, find_gpu(device))


def _facts(local: LocalModel, vocab_size: int, config: Config, device: DeviceFacts, resolved: Resolved,
           memory: MemoryPlan, load_s: float, notes: tuple[str, ...]) -> EngineFacts:
    return EngineFacts(
        model_name=config.model.name or local.name,
        max_model_len=memory.max_model_len,
        vocab_size=vocab_size,
        num_kv_blocks=memory.num_kv_blocks,
        block_size_tokens=config.memory.block_size_tokens,
        device=device.name,
        dtype=resolved.dtype.value,
        quantization=resolved.quantization.value,
        kv_dtype=resolved.kv_dtype.value,
        kernels=resolved.kernels.value,
        threads=resolved.threads,
        weights_bytes=memory.use.weights_bytes,
        kv_bytes=memory.kv_bytes,
        load_s=load_s,
        notes=resolved.notes + memory.notes + notes,
        num_host_blocks=memory.num_host_blocks,
        memory=memory.use)
