"""What the compiled kernels take of a GPU's processor, found without a GPU.

A kernel is compiled exactly as a launch with the same arguments would compile it: the operation is called with tensors
in host memory, and its launches are compiled for a given GPU instead of run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_WARP_THREADS = 32
_REGISTERS = 65536
_MOST_WARPS = 64
_MOST_PROGRAMS = 32
_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Shared memory of a processor, by compute capability."""
_RESERVED_BYTES = 1024
"""Shared memory that each program takes besides its own."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes of a processor."""

    kernel: str
    capability: int
    """80, 90 or 100."""
    warps: int
    registers: int
    """Of each thread."""
    stack_bytes: int
    """Local memory of each thread. Not 0: the registers did not suffice and are spilled to memory."""
    shared_bytes: int

    @property
    def programs_per_processor(self) -> int:
        """How many programs fit on a processor at once; 0: it cannot be launched."""
        # Registers are given to warps in portions of 256.
        registers = -(-self.registers * _WARP_THREADS // 256) * 256 * self.warps
        shared = _SHARED_BYTES[self.capability] // (self.shared_bytes + _RESERVED_BYTES)
        return min(_MOST_PROGRAMS, _MOST_WARPS // self.warps, _REGISTERS // registers, shared)

    @property
    def occupancy(self) -> float:
        """Share of the warps that a processor can hold."""
        return self.programs_per_processor * self.warps / _MOST_WARPS


def compile_for(capability: int, call: Callable[[], object]) -> list[Resources]:
    """What each kernel that `call` launches takes on a GPU of this compute capability (80, 90, 100).

    `call` must use tensors in host memory, and no result of what it launches. Triton must not be interpreting.
    """
    compiled: list[Any] = []
    with _compiling_only(GPUTarget("cuda", capability, _WARP_THREADS), compiled):
        call()
    return [_measured(kernel, capability) for kernel in compiled]


class _AbsentGpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling_only(target: GPUTarget, compiled: list[Any]) -> Iterator[None]:
    run, active = JITFunction.run, triton.runtime.driver._active

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_instead
    triton.runtime.driver.set_active(_AbsentGpu(target))
    try:
        yield
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = active


def _measured(kernel: Any, capability: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        said = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)],
                              capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", said)}
    return Resources(kernel.metadata.name, capability, kernel.metadata.num_warps, usage["REG"],
                     max(usage["STACK"], usage["LOCAL"]), kernel.metadata.shared)
