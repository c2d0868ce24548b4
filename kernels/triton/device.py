"""What the kernels must know of the GPU that they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_WITH_FP8 = (8, 9)


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    num_processors: int
    """Streaming multiprocessors: a launch of fewer programs leaves some idle."""
    has_fp8: bool
    """Converts and multiplies numbers in e4m3; without it, they are converted by integer operations."""


def find_gpu(device: torch.device) -> Gpu:
    """The facts about a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, (properties.major, properties.minor) >= _FIRST_WITH_FP8)
