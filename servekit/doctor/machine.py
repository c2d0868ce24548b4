"""Processor, memory and compilers of a machine, and its GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from servekit.config.schema import Device
from servekit.doctor.findings import Finding, Status
from servekit.doctor.gpus import Gpu, find_gpus
from servekit.kernels.cpu.build import NoCompilerError, find_compiler
from servekit.kernels.cpu.instruction_sets import FOR_INTEGERS, best_present
from servekit.model.footprint import gigabytes
from servekit.runner.device import DeviceFacts, find_device

_C_COMPILERS = ("gcc", "clang")
"""That Triton looks for; it compiles a few lines of C for every kernel."""


@dataclass(frozen=True)
class Machine:
    """What there is, whoever may use it."""

    system: str
    processor: str
    flags: frozenset[str]
    """Of the processor, as Linux lists them; empty on other systems."""
    num_processors: int
    host: DeviceFacts
    """The processor as a device: the cores and the memory that this process may use."""
    gpus: tuple[Gpu, ...]
    cpp_compiler: str | None
    c_compiler: str | None
    has_python_headers: bool


def find_machine() -> Machine:
    """This machine."""
    processor, flags = read_cpuinfo(Path("/proc/cpuinfo"))
    return Machine(f"{platform.system()} {platform.release()} {platform.machine()}", processor, flags,
                   os.cpu_count() or 1, find_device(Device.cpu), find_gpus(), _cpp_compiler(),
                   next(filter(None, map(shutil.which, _C_COMPILERS)), None),
                   (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file())


def read_cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """Name and flags of the first processor; elsewhere than on Linux the name alone."""
    lines = path.read_text().splitlines() if path.is_file() else []
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    flags = values.get("flags") or values.get("Features") or ""
    return values.get("model name") or platform.processor() or platform.machine(), frozenset(flags.split())


def _cpp_compiler() -> str | None:
    try:
        return find_compiler()
    except NoCompilerError:
        return None


def examine_machine(machine: Machine) -> Iterator[Finding]:
    """Everything but the GPUs."""
    host = machine.host
    yield Finding(Status.ok, "system", machine.system)
    yield _instructions(machine)
    yield Finding(Status.ok, "cores", f"{host.cores} of {machine.num_processors}, by affinity and control group")
    yield Finding(Status.ok, "memory", f"{gigabytes(host.free_bytes)} of {gigabytes(host.total_bytes)} free")


def _instructions(machine: Machine) -> Finding:
    found = best_present(machine.flags)
    text = "; ".join([machine.processor, *(f"{one.name} for {one.use}" for one in found)])
    if any(one in found for one in FOR_INTEGERS):
        return Finding(Status.ok, "processor", text)
    return Finding(Status.limited, "processor", f"{text}; products with integers have no code of their own for it",
                   "set model.quantization=none")
