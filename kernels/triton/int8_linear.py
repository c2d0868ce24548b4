"""Multiplication by a weight matrix of eight-bit integers, in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.kernels.int8_dynamic_linear import require_channels
from servekit.kernels.int8_linear import Int8Weight
from servekit.kernels.triton.device import Gpu
from servekit.kernels.triton.eight_bit_linear import multiply, require_group
from servekit.kernels.triton.quantize_rows import quantize_rows


@dataclass(frozen=True, slots=True)
class Int8Product:
    """See `servekit.kernels.int8_linear.reference`: activations are not rounded."""

    weight: Int8Weight
    gpu: Gpu

    def __post_init__(self) -> None:
        if self.weight.scales.shape[1] > 1:
            require_group(self.weight.integers.shape[1] // self.weight.scales.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return multiply(x, self.weight.integers, self.weight.scales, self.gpu)


@dataclass(frozen=True, slots=True)
class Int8DynamicProduct:
    """See `servekit.kernels.int8_dynamic_linear.reference`: each row of activations is rounded to integers."""

    weight: Int8Weight
    gpu: Gpu

    def __post_init__(self) -> None:
        require_channels(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rounded = quantize_rows(x.reshape(-1, x.shape[-1]), torch.int8)
        return multiply(x, self.weight.integers, self.weight.scales, self.gpu, rounded)
