"""The NVIDIA GPUs of a machine, as their driver describes them: whether or not torch can use them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from servekit.doctor.findings import Finding, Status
from servekit.model.footprint import gigabytes

_FIELDS = ("name", "compute_cap", "driver_version", "memory.total", "memory.used")
_MEBIBYTE = 2**20
_FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the oldest GPUs that the Triton operations are compiled for."""
_QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    compute_capability: tuple[int, int]
    driver: str
    total_bytes: int
    used_bytes: int
    """Held by other processes and the driver, before this one has touched it."""


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; none where there is no such program, or no driver behind it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(parse_gpus(said))


def parse_gpus(said: str) -> Iterator[Gpu]:
    """Read lines such as `NVIDIA H200, 9.0, 570.86.15, 143771, 4`; sizes are in MiB."""
    for line in filter(None, said.splitlines()):
        name, capability, driver, total, used = (word.strip() for word in line.rsplit(",", 4))
        major, minor = capability.split(".")
        yield Gpu(name, (int(major), int(minor)), driver, int(total) * _MEBIBYTE, int(used) * _MEBIBYTE)


def examine_gpus(gpus: tuple[Gpu, ...], torch_version: str, torch_sees_one: bool, torch_requirement: str
                 ) -> Iterator[Finding]:
    """Each GPU, and why torch finds none where there are some.

    Args:
        gpus: What the driver lists.
        torch_version: Of the installed torch.
        torch_sees_one: Whether torch finds a GPU that it can use.
        torch_requirement: The torch that servekit needs, as pip takes it.
    """
    if not gpus and not torch_sees_one:
        yield Finding(Status.limited, "GPU", "none: neither nvidia-smi nor torch finds one, and the processor computes")
    for index, gpu in enumerate(gpus):
        yield _describe(index, gpu)
    if gpus and not torch_sees_one:
        yield _unused(torch_version, gpus[0].driver, torch_requirement)


def _describe(index: int, gpu: Gpu) -> Finding:
    text = (f"{gpu.name}, compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}, "
            f"{gigabytes(gpu.total_bytes - gpu.used_bytes)} of {gigabytes(gpu.total_bytes)} free "
            f"({gigabytes(gpu.used_bytes)} held by other processes and the driver), driver {gpu.driver}")
    if gpu.compute_capability < _FIRST_WITH_BFLOAT16:
        return Finding(Status.limited, f"GPU {index}", f"{text}; it multiplies no bfloat16 numbers, which "
                       "compute capability 8.0 was the first to", "set model.dtype=float16")
    return Finding(Status.ok, f"GPU {index}", text)


def _unused(torch_version: str, driver: str, requirement: str) -> Finding:
    if torch_version.endswith("+cpu"):
        return Finding(Status.limited, "torch on the GPU", f"torch {torch_version} is built for processors alone, so "
                       "the GPU is not used", "pip install --force-reinstall --index-url https://pypi.org/simple "
                       f'"{requirement}"')
    return Finding(Status.limited, "torch on the GPU", f"torch {torch_version} finds no GPU that it can use: the "
                   f"driver {driver} is too old for it, or CUDA_VISIBLE_DEVICES hides the GPU",
                   'python -c "import torch; torch.cuda.init()" says which')
