"""Multiplication by a weight matrix of eight-bit floats, in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.triton.device import Gpu
from servekit.kernels.triton.eight_bit_linear import multiply
from servekit.kernels.triton.quantize_rows import quantize_rows


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """See `servekit.kernels.fp8_linear.reference`: activations are not rounded."""

    weight: Fp8Weight
    gpu: Gpu

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return multiply(x, self.weight.numbers, self.weight.scales.unsqueeze(1), self.gpu)


@dataclass(frozen=True, slots=True)
class Fp8DynamicProduct:
    """See `servekit.kernels.fp8_dynamic_linear.reference`: each row of activations is rounded to eight bits."""

    weight: Fp8Weight
    gpu: Gpu

    def __post_init__(self) -> None:
        if not self.gpu.has_fp8:
            raise ValueError("this GPU multiplies no eight-bit floats (compute capability 8.9 is the first to); keep "
                             "the activations' format, or round both to eight-bit integers")

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rounded = quantize_rows(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        return multiply(x, self.weight.numbers, self.weight.scales.unsqueeze(1), self.gpu, rounded)
