"""Multiplication by a weight matrix of four-bit floats (e2m1) in groups: MXFP4 and NVFP4.

MXFP4: groups of 32 with a power of two (OCP Microscaling Formats, 2023). NVFP4: groups of 16 with a scale in e4m3, and
one scale for the matrix (NVIDIA, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.kernels.fp8_linear import LARGEST as LARGEST_E4M3
from servekit.kernels.fp8_linear import to_e4m3

MXFP4_GROUP = 32
NVFP4_GROUP = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a code stand for; the fourth is the sign."""
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Half-way between the magnitudes."""
_LARGEST = _MAGNITUDES[-1]
_LARGEST_EXPONENT = 2
"""Of the power of two in the largest magnitude."""
_EXPONENT_BIAS = 127
_MOST_EXPONENT = 254


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """W[n, k] = number(codes[n, k]) * scales[n, k // group] * scale."""

    codes: Tensor
    """[out, in] uint8, 0 to 15."""
    scales: Tensor
    """[out, in / group]: torch.float8_e8m0fnu (MXFP4) or torch.float8_e4m3fn (NVFP4)."""
    scale: float = 1.0
    """Of the whole matrix."""


def unpack(packed: Tensor) -> Tensor:
    """[..., n] uint8, of two codes each, the first in the lower bits, to [..., 2 n]: how checkpoints store them."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_mxfp4(weight: Tensor) -> Fp4Weight:
    """Round [out, in] by groups of 32: their power of two is that of the largest magnitude, which may be cut to 6."""
    groups = _groups(weight, MXFP4_GROUP)
    largest = groups.abs().amax(dim=-1)
    exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    stored = torch.where(largest == 0, 0, exponents + _EXPONENT_BIAS).clamp(0, _MOST_EXPONENT)
    steps = torch.exp2((stored - _EXPONENT_BIAS).float())
    scales = stored.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Fp4Weight(_codes(groups / steps.unsqueeze(-1)).view(weight.shape), scales)


def quantize_nvfp4(weight: Tensor) -> Fp4Weight:
    """Round [out, in] by groups of 16, whose largest magnitude becomes 6."""
    groups = _groups(weight, NVFP4_GROUP)
    largest = groups.abs().amax(dim=-1)
    scale = float(largest.max()) / (_LARGEST * LARGEST_E4M3) or 1.0
    scales = to_e4m3(largest / (_LARGEST * scale))
    steps = scales.float().unsqueeze(-1) * scale
    return Fp4Weight(_codes(groups / torch.where(steps == 0, torch.ones_like(steps), steps)).view(weight.shape), scales,
                     scale)


def dequantize(weight: Fp4Weight) -> Tensor:
    """[out, in] float32."""
    rows, columns = weight.codes.shape
    magnitudes = torch.tensor(_MAGNITUDES, device=weight.codes.device)
    numbers = magnitudes[(weight.codes & 7).long()] * (1.0 - 2.0 * (weight.codes >> 3).float())
    groups = numbers.view(rows, weight.scales.shape[1], -1)
    return (groups * (weight.scales.float() * weight.scale).unsqueeze(-1)).view(rows, columns)


def reference(x: Tensor, weight: Fp4Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format: activations are not rounded."""
    return x @ dequantize(weight).to(x.dtype).T


def _groups(weight: Tensor, size: int) -> Tensor:
    rows, columns = weight.shape
    return weight.float().view(rows, columns // size, size)


def _codes(x: Tensor) -> Tensor:
    """The nearest of the 15 numbers, ties to the even code; what is larger than 6 becomes 6."""
    bounds = torch.tensor(_BOUNDS, device=x.device)
    magnitude = x.abs()
    nearest = torch.bucketize(magnitude, bounds)
    # A tie counts as the lower of the two so far; where that is odd, the higher one is even.
    is_tie = (magnitude == bounds[nearest.clamp(max=len(_BOUNDS) - 1)]) & (nearest < len(_BOUNDS))
    nearest = torch.where(is_tie & (nearest % 2 == 1), nearest + 1, nearest)
    return (nearest | (x.signbit().long() << 3)).to(torch.uint8)
