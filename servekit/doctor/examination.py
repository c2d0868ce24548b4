"""Everything that is examined once torch can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, Device, KernelSet
from servekit.doctor.findings import Finding, Section, Status
from servekit.doctor.gpus import examine_gpus
from servekit.doctor.machine import Machine, examine_machine, find_machine
from servekit.doctor.outlook import (
    built_library,
    examine_outlook,
    examine_quantizations,
    find_obstacle,
    find_outlook,
    load_own_operations,
)
from servekit.doctor.packages import installed_version, requirements
from servekit.model.loader import load_spec
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.source import find_local
from servekit.model.spec import ModelSpec
from servekit.runner.device import DeviceFacts, find_device

_STAND_IN = "smollm2-135m"
"""Shape to speak of while the model's own is not known."""


def examine_engine(config: Config, cache_dir: Path) -> Iterator[Section]:
    """The machine, the model, and the engine that would be built of them."""
    machine = find_machine()
    yield Section("machine", (*examine_machine(machine), *_gpus(machine)))
    try:
        device = find_device(config.engine.device)
        local = find_local(config.model, cache_dir)
        spec = load_spec(local or LocalModel(SourceKind.dummy, _STAND_IN, None, _STAND_IN))
    except (ConfigError, ModelFileError) as error:
        yield Section("model", (_refusal(error),))
        return
    yield Section("model", (describe_model(config, local),))
    yield from examine_device(config, machine, device, spec, cache_dir)


def examine_device(config: Config, machine: Machine, device: DeviceFacts, spec: ModelSpec, cache_dir: Path
                   ) -> Iterator[Section]:
    """The engine for a model on a device, the operations it would use, and the quantisations it could have."""
    obstacle = find_obstacle(config, machine, device)
    available = KernelSet.reference if obstacle else None
    try:
        outlook = find_outlook(config, spec, device, available)
    except ConfigError as error:
        yield Section("engine", (*([obstacle] if obstacle else []), _refusal(error)))
        return
    library = built_library(machine, cache_dir)
    operations = describe_operations(outlook.resolved.kernels, library)
    yield Section("engine", (*([obstacle] if obstacle else []), *operations,
                             *examine_outlook(outlook, device, config.memory.block_size_tokens)))
    own = load_own_operations(outlook.resolved, device, library)
    yield Section("quantisations", tuple(examine_quantizations(config, spec, device, available, own)))


def describe_model(config: Config, local: LocalModel | None) -> Finding:
    """Where the model is, or that it is still to be fetched."""
    if local is None:
        return Finding(Status.limited, "model", f"{config.model.source} is not on this machine yet; the first start "
                       f"fetches it. What follows is said of {_STAND_IN} in plain numbers", "servekit serve")
    return Finding(Status.ok, "model", str(local.path or config.model.source))


def describe_operations(kernels: KernelSet, library: Path | None) -> tuple[Finding, ...]:
    """Whether the operations are compiled."""
    match kernels:
        case KernelSet.reference:
            return ()
        case KernelSet.triton:
            return (Finding(Status.ok, "operations", "Triton compiles and times them when they are first used, and "
                            "keeps the result in its cache"),)
    if library is None:
        return (Finding(Status.limited, "operations", "are not compiled for this machine yet; the first start does it, "
                        "in some ten seconds", "servekit serve"),)
    return (Finding(Status.ok, "operations", str(library)),)


def _gpus(machine: Machine) -> Iterator[Finding]:
    required = next(f"torch{one.specifier}" for one in requirements() if one.name == "torch")
    return examine_gpus(machine.gpus, installed_version("torch") or "", _torch_sees_gpu(), required)


def _torch_sees_gpu() -> bool:
    return find_device(Device.auto).kind is Device.cuda


def _refusal(error: ConfigError | ModelFileError) -> Finding:
    if isinstance(error, ConfigError):
        return Finding(Status.missing, error.key, f"{error.value}: {error.limit}", error.remedy)
    return Finding(Status.missing, "model", str(error))
