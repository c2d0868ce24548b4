"""Multiplication of activations that are rounded to eight-bit integers, row by row, by a matrix of such integers."""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.kernels.int8_linear import Int8Weight

_MOST = 127


def reference(x: Tensor, weight: Int8Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format; each row of x is rounded with a scale of its own.

    The weight has one scale for each output channel. Raises ValueError for one with more.
    """
    require_channels(weight)
    integers, scales = quantize_rows(x)
    # In float64 the sums of integers are exact.
    product = (integers.double() @ weight.integers.double().T).float()
    return (product * scales.unsqueeze(-1) * weight.scales.squeeze(1)).to(x.dtype)


def require_channels(weight: Int8Weight) -> None:
    """Refuse a weight with more than one scale for an output channel."""
    if weight.scales.shape[1] != 1:
        raise ValueError(f"the weight has {weight.scales.shape[1]} scales for each output channel; products of two "
                         "integers need one: quantize it without group_size, or keep the activations' format")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., width] to int8 and a float32 scale for each row, [...]; integers * scale is about x."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / _MOST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    integers = (wide / scales.unsqueeze(-1)).round_().clamp_(-_MOST, _MOST)
    return integers.to(torch.int8), scales
