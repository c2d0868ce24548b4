"""Multiplication by a weight matrix of eight-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W[n, k] = integers[n, k] * scales[n, k // group]; one group is a whole row, or a part of it."""

    integers: Tensor
    """[out, in] int8, -127 to 127."""
    scales: Tensor
    """[out, in / group] float32."""


def quantize(weight: Tensor, group_size: int | None = None) -> Int8Weight:
    """Round [out, in] to the nearest of 255 evenly spaced values, by output channel or by groups of its columns."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group_size or columns)
    scales = groups.abs().amax(dim=-1) / _MOST
    integers = (groups / _nonzero(scales).unsqueeze(-1)).round_().clamp_(-_MOST, _MOST)
    return Int8Weight(integers.view(rows, columns).to(torch.int8), scales)


def dequantize(weight: Int8Weight) -> Tensor:
    """[out, in] float32."""
    rows, columns = weight.integers.shape
    groups = weight.integers.view(rows, weight.scales.shape[1], -1).float()
    return (groups * weight.scales.unsqueeze(-1)).view(rows, columns)


def reference(x: Tensor, weight: Int8Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format: activations are not rounded."""
    return x @ dequantize(weight).to(x.dtype).T


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)
