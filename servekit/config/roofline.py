"""What the roofline model of step times is told: a GPU, number formats, and how close to its limits real kernels come.

The rules are those of schema.py. The facts about GPUs are in servekit/sim/gpus.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.bounds import at_least, within


class GpuName(Enum):
    """The GPUs whose facts are known, each in its SXM form."""

    a100 = "a100"
    """A100, 80 GB."""
    h100 = "h100"
    """H100, 80 GB."""
    h200 = "h200"
    """H200, 141 GB."""
    b200 = "b200"
    """B200, 180 GB."""


class Precision(Enum):
    """A number format that GPUs multiply in. float16 counts as bfloat16: it has the same size and speed."""

    bfloat16 = "bfloat16"
    fp8 = "fp8"
    int8 = "int8"
    fp4 = "fp4"


@dataclass(frozen=True)
class EfficiencyConfig:
    """How close to a GPU's limits an engine's kernels come, and what a step costs beside them.

    The defaults are round numbers that put TensorRT-LLM's published throughput of Llama 3 on H200 and H100 within
    15 % (tests/plan/test_published.py). They are an assumption for every other engine: measure, then set them.
    """

    compute: float = 0.55
    """Share of the dense peak that matrix products reach when they are bound by arithmetic. In fp4 it is lower:
    TensorRT-LLM's published figures for B200 correspond to 0.38."""
    bandwidth: float = 0.8
    """Share of the memory bandwidth that reading weights and keys and values reaches."""
    link: float = 0.8
    """Share of the link bandwidth, to other GPUs and to the host, that large transfers reach."""
    step_overhead_s: float = 0.0005
    """What every step costs beside its kernels, in seconds: scheduling, sampling, launching."""
    layer_overhead_s: float = 0.00003
    """What every layer adds to that, in seconds: gaps between kernels and small kernels."""
    all_reduce_latency_s: float = 0.00001
    """What an all-reduce takes beside its transfer, in seconds; a layer has two with tensor parallelism."""

    def __post_init__(self) -> None:
        within("efficiency.compute", self.compute, 0.01, 1.0, 0.55)
        within("efficiency.bandwidth", self.bandwidth, 0.01, 1.0, 0.8)
        within("efficiency.link", self.link, 0.01, 1.0, 0.8)
        at_least("efficiency.step_overhead_s", self.step_overhead_s, 0, 0.0005)
        at_least("efficiency.layer_overhead_s", self.layer_overhead_s, 0, 0.00003)
        at_least("efficiency.all_reduce_latency_s", self.all_reduce_latency_s, 0, 0.00001)
