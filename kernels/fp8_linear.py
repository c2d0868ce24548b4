"""Multiplication by a weight matrix of eight-bit floats (e4m3; OCP 8-bit floating point, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest number in e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """W[n, k] = numbers[n, k] * scales[n]."""

    numbers: Tensor
    """[out, in] torch.float8_e4m3fn."""
    scales: Tensor
    """[out] float32; all equal if the whole matrix has one scale."""


def quantize(weight: Tensor) -> Fp8Weight:
    """Round [out, in] so that the largest of each output channel becomes the largest of the format."""
    return Fp8Weight(*quantize_rows(weight))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., width] to torch.float8_e4m3fn and a float32 scale for each row, [...]; numbers * scale is about x."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return to_e4m3(wide / scales.unsqueeze(-1)), scales


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest number of the format; what is too large becomes the largest, NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def dequantize(weight: Fp8Weight) -> Tensor:
    """[out, in] float32."""
    return weight.numbers.float() * weight.scales.unsqueeze(-1)


def reference(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format: activations are not rounded."""
    return x @ dequantize(weight).to(x.dtype).T
