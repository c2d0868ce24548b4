"""What an engine would be on this machine: the same decisions that its start makes, without loading anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, Device, KernelSet, Quantization
from servekit.doctor.findings import Finding, Status
from servekit.doctor.machine import Machine
from servekit.engine.build import resolve_memory
from servekit.engine.execution import Execution, resolve_execution
from servekit.engine.resolve import Resolved, resolve
from servekit.kernels import Kernels, reference_kernels
from servekit.kernels.cpu import cpu_kernels
from servekit.kernels.cpu.build import library_path
from servekit.model.footprint import gigabytes
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts
from servekit.runner.memory import MemoryPlan

_BUILT = {KernelSet.cpu: "C++", KernelSet.triton: "Triton", KernelSet.reference: "torch, the reference"}
_OPERATION = {Quantization.mxfp4: "fp4", Quantization.nvfp4: "fp4"}
"""The field of `Kernels` that multiplies by such a matrix, where it has another name than the quantisation."""


@dataclass(frozen=True)
class Outlook:
    """An engine that could be built."""

    resolved: Resolved
    execution: Execution
    memory: MemoryPlan


def find_obstacle(config: Config, machine: Machine, device: DeviceFacts) -> Finding | None:
    """Why the fast operations of the device cannot be had; None if they can.

    Where `engine.kernels` asks for them, the engine does not start without.
    """
    lacking = _lacking_for_cpu(machine) if device.kind is Device.cpu else _lacking_for_triton(machine)
    if lacking is None or config.engine.kernels is KernelSet.reference:
        return None
    subject, remedy = lacking
    is_optional = config.engine.kernels is KernelSet.auto
    consequence = "the reference operations serve, several times slower" if is_optional else (
        f"engine.kernels={config.engine.kernels.value} needs it")
    return Finding(Status.limited if is_optional else Status.missing, subject, f"there is none: {consequence}", remedy)


def _lacking_for_cpu(machine: Machine) -> tuple[str, str] | None:
    return None if machine.cpp_compiler else ("C++ compiler", "apt install g++")


def _lacking_for_triton(machine: Machine) -> tuple[str, str] | None:
    """Triton compiles a launcher in C against Python's headers."""
    if find_spec("triton") is None:
        return "Triton", "pip install triton"
    if machine.c_compiler is None:
        return "C compiler", "apt install gcc"
    return None if machine.has_python_headers else ("Python.h", "apt install python3-dev")


def find_outlook(config: Config, spec: ModelSpec, device: DeviceFacts, available: KernelSet | None) -> Outlook:
    """What the settings come to. Raises ConfigError as the engine's start does."""
    resolved = resolve(config, spec, device, available)
    return Outlook(resolved, resolve_execution(config, device, resolved.kernels),
                   resolve_memory(config, spec, device, resolved))


def examine_outlook(outlook: Outlook, device: DeviceFacts, block_size_tokens: int) -> Iterator[Finding]:
    """Kernels, number formats and memory, and how each open setting was settled."""
    resolved, memory = outlook.resolved, outlook.memory
    is_fast = resolved.kernels is not KernelSet.reference
    yield Finding(Status.ok, "device", f"{device.name}, {resolved.threads} threads")
    yield Finding(Status.ok if is_fast else Status.limited, "kernels", _BUILT[resolved.kernels])
    yield Finding(Status.ok, "numbers", f"weights {_weights(resolved)}, activations {resolved.dtype.value}, KV cache "
                  f"{resolved.kv_dtype.value}")
    yield Finding(Status.ok, "steps", _steps(outlook.execution))
    yield Finding(Status.ok, "memory", f"{memory.use}; the KV cache takes {gigabytes(memory.kv_bytes)} for "
                  f"{memory.num_kv_blocks * block_size_tokens:,} tokens")
    for note in (*resolved.notes, *outlook.execution.notes, *memory.notes):
        key, _, settled = note.partition(": ")
        yield Finding(Status.ok, key, settled)


def _weights(resolved: Resolved) -> str:
    is_plain = resolved.quantization is Quantization.none
    return resolved.dtype.value if is_plain else resolved.quantization.value


def _steps(execution: Execution) -> str:
    overlap = "each planned while the one before it runs" if execution.overlap else "one after the other"
    sizes = execution.graph_sizes
    return f"{overlap}; " + (f"CUDA graphs for up to {max(sizes)} decodes" if sizes else "no CUDA graphs")


def examine_quantizations(config: Config, spec: ModelSpec, device: DeviceFacts, available: KernelSet | None,
                          own_operations: frozenset[str] | None) -> Iterator[Finding]:
    """Each quantisation: whether the device runs it, and by a product of its own.

    `own_operations` are those of `find_own_operations`; None where they are not built yet.
    """
    for quantization in Quantization:
        if quantization not in (Quantization.auto, Quantization.none):
            wanted = replace(config, model=replace(config.model, quantization=quantization))
            try:
                resolve(wanted, spec, device, available)
            except ConfigError as error:
                yield Finding(Status.limited, quantization.value, error.limit, error.remedy)
            else:
                yield _product(quantization, own_operations)


def _product(quantization: Quantization, own_operations: frozenset[str] | None) -> Finding:
    if own_operations is None:
        return Finding(Status.ok, quantization.value, "runs; how fast depends on the operations, which are not built")
    if _OPERATION.get(quantization, quantization.value) in own_operations:
        return Finding(Status.ok, quantization.value, "has a product of its own")
    return Finding(Status.limited, quantization.value, "runs by the reference, which makes plain numbers of a matrix "
                   "at every product: it saves memory, not time")


def built_library(machine: Machine, cache_dir: Path) -> Path | None:
    """The compiled operations for this processor; None if they are still to be compiled."""
    library = library_path(machine.cpp_compiler, cache_dir / "kernels") if machine.cpp_compiler else None
    return library if library is not None and library.exists() else None


def load_own_operations(resolved: Resolved, device: DeviceFacts, library: Path | None) -> frozenset[str] | None:
    """See `find_own_operations`, of the operations that the engine would have; None if they are not built."""
    match resolved.kernels:
        case KernelSet.triton:
            from servekit.kernels.triton import find_gpu, triton_kernels

            return find_own_operations(lambda reference: triton_kernels(reference, find_gpu(device.torch_device)))
        case KernelSet.cpu:
            return None if library is None else find_own_operations(
                lambda reference: cpu_kernels(reference, library.parent, resolved.threads, lambda: None))
        case _:
            return frozenset()


def find_own_operations(implement: Callable[[Kernels], Kernels]) -> frozenset[str]:
    """The fields of `Kernels` that `implement` replaces in the reference."""
    reference = reference_kernels()
    kernels = implement(reference)
    return frozenset(field.name for field in fields(Kernels)
                     if getattr(kernels, field.name) is not getattr(reference, field.name))
