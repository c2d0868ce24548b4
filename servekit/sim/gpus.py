"""What the known GPUs can do at best, from their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from servekit.config.roofline import GpuName, Precision


@dataclass(frozen=True)
class Gpu:
    """One GPU's limits. Data sheets count operations with 2:4 sparsity; these are without."""

    name: str
    flops_per_s: Mapping[Precision, float]
    """Dense operations per second of its tensor cores, for the formats that they have."""
    memory_bytes: float
    """A data sheet's GB is read as 1e9 bytes; the devices report some per cent more."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other GPUs, in each direction."""
    host_bytes_per_s: float
    """To the host's memory, in each direction."""


def _flops(**by_format: float) -> Mapping[Precision, float]:
    return MappingProxyType({Precision[name]: value for name, value in by_format.items()})


GPUS: Mapping[GpuName, Gpu] = MappingProxyType({
    GpuName.a100: Gpu("A100 80 GB", _flops(bfloat16=312e12, int8=624e12), memory_bytes=80e9,
                      memory_bytes_per_s=2.039e12, link_bytes_per_s=300e9, host_bytes_per_s=32e9),
    GpuName.h100: Gpu("H100 80 GB", _flops(bfloat16=989e12, fp8=1979e12, int8=1979e12), memory_bytes=80e9,
                      memory_bytes_per_s=3.35e12, link_bytes_per_s=450e9, host_bytes_per_s=64e9),
    GpuName.h200: Gpu("H200 141 GB", _flops(bfloat16=989e12, fp8=1979e12, int8=1979e12), memory_bytes=141e9,
                      memory_bytes_per_s=4.8e12, link_bytes_per_s=450e9, host_bytes_per_s=64e9),
    GpuName.b200: Gpu("B200 180 GB", _flops(bfloat16=2.25e15, fp8=4.5e15, int8=4.5e15, fp4=9e15), memory_bytes=180e9,
                      memory_bytes_per_s=8e12, link_bytes_per_s=900e9, host_bytes_per_s=64e9),
})
"""A100 80GB, H100 and H200: NVIDIA's data sheets of the SXM form. B200: an eighth of the DGX B200 data sheet."""

BITS: Mapping[Precision, float] = MappingProxyType(
    {Precision.bfloat16: 16.0, Precision.fp8: 8.0, Precision.int8: 8.0, Precision.fp4: 4.5})
"""Bits a number takes in memory; fp4 is NVFP4, with an 8-bit scale for every 16 numbers."""
