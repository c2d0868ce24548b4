"""What the machine has, as far as an engine needs to know."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from servekit.config.errors import ConfigError
from servekit.config.schema import Device

FIRST_WITH_FP8 = (8, 9)
"""Compute capability from which on GPUs multiply eight-bit floats."""


@dataclass(frozen=True)
class DeviceFacts:
    """The device that the model will run on."""

    kind: Device
    """`cpu` or `cuda`."""
    name: str
    cores: int
    """Processor cores that this process may use."""
    total_bytes: int
    """Memory of the device; on a CPU the machine's or the container's."""
    free_bytes: int
    """What of it nobody uses now."""
    host_free_bytes: int
    """Memory of the host that nobody uses now; on a CPU that is the device's own."""
    compute_capability: tuple[int, int] | None = None
    """Of a GPU: which instructions it has, as its maker numbers them."""
    count: int = 1
    """GPUs of this machine; 1 on a CPU."""

    def shared_by(self, ranks: int) -> DeviceFacts:
        """What each of several processes on this machine has: a GPU of its own, or a part of the processors' memory."""
        host_free_bytes = self.host_free_bytes // ranks
        if self.kind is Device.cuda:
            return replace(self, host_free_bytes=host_free_bytes)
        return replace(self, host_free_bytes=host_free_bytes, total_bytes=self.total_bytes // ranks,
                       free_bytes=self.free_bytes // ranks)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind.value)


def find_device(wanted: Device) -> DeviceFacts:
    """The device that `wanted` means on this machine. Raises ConfigError when there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted is Device.cuda and not has_cuda:
        raise ConfigError("engine.device", "cuda", "torch finds no CUDA device on this machine",
                          "set engine.device=cpu, or install a CUDA build of torch and the NVIDIA driver")
    if wanted is Device.cuda or (wanted is Device.auto and has_cuda):
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        _, host_free_bytes = _host_memory_bytes(Path("/"))
        return DeviceFacts(Device.cuda, torch.cuda.get_device_name(), usable_cores(), total_bytes, free_bytes,
                           host_free_bytes, torch.cuda.get_device_capability(), torch.cuda.device_count())
    total_bytes, free_bytes = _host_memory_bytes(Path("/"))
    return DeviceFacts(Device.cpu, "cpu", usable_cores(), total_bytes, free_bytes, free_bytes)


def use_gpu(index: int) -> None:
    """Let `cuda` mean this GPU, in this thread."""
    torch.cuda.set_device(index)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores by affinity and by the control group's quota, whichever is less; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words(root / "sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        return max(1, min(affinity, int(quota[0]) // int(quota[1])))
    return affinity


def _host_memory_bytes(root: Path) -> tuple[int, int]:
    """Total and available memory, within the control group's limit if there is one."""
    total, available = _meminfo_bytes(root)
    limit, used = (_read_words(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit and limit[0].isdigit() and used:
        total = min(total, int(limit[0]))
        available = min(available, int(limit[0]) - int(used[0]))
    return total, max(0, available)


def _meminfo_bytes(root: Path) -> tuple[int, int]:
    lines = (root / "proc/meminfo")
    if not lines.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines.read_text().splitlines()}
    return values["MemTotal"], values["MemAvailable"]


def _read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
