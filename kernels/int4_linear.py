"""Multiplication by a weight matrix of four-bit integers in groups of 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Columns that share a scale and a minimum, as in GGUF's Q4_0 and Q4_1."""

_MOST = 15


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """W[n, k] = integers[n, k] * scales[n, k // 32] + minima[n, k // 32]."""

    integers: Tensor
    """[out, in] uint8, 0 to 15."""
    scales: Tensor
    """[out, in / 32] float16."""
    minima: Tensor
    """[out, in / 32] float16."""


def quantize(weight: Tensor) -> Int4Weight:
    """Round [out, in] to the nearest of 16 values between the smallest and the largest of each group."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP_SIZE, GROUP_SIZE)
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    scales, minima = ((highest - lowest) / _MOST).half(), lowest.half()
    steps = scales.float()
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    integers = ((groups - minima.float().unsqueeze(-1)) / steps.unsqueeze(-1)).round_().clamp_(0, _MOST)
    return Int4Weight(integers.view(rows, columns).to(torch.uint8), scales, minima)


def dequantize(weight: Int4Weight) -> Tensor:
    """[out, in] float32."""
    rows, columns = weight.integers.shape
    groups = weight.integers.view(rows, -1, GROUP_SIZE).float()
    return (groups * weight.scales.float().unsqueeze(-1) + weight.minima.float().unsqueeze(-1)).view(rows, columns)


def reference(x: Tensor, weight: Int4Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format: activations are not rounded."""
    return x @ dequantize(weight).to(x.dtype).T
