"""Eight-bit floats (e4m3: 1 sign, 4 exponent, 3 mantissa bits; OCP 8-bit floating point, 2023) inside kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.device import Gpu

LARGEST = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_STEP_IS_SMALLEST = tl.constexpr(16384.0)
"""A float32 of this size has steps of 2^-9, which is the smallest number of e4m3: adding it rounds to them."""
_STEP_IS_SMALLEST_BITS = tl.constexpr(0x46800000)


def for_kernels(numbers: Tensor, gpu: Gpu) -> Tensor:
    """The tensor as kernels take it: e4m3 as bytes where the GPU has no such type."""
    return numbers.view(torch.uint8) if numbers.dtype is torch.float8_e4m3fn and not gpu.has_fp8 else numbers


@triton.jit
def encode(x):
    """float32 to the nearest e4m3, as uint8; what is too large becomes the largest, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half of what is cut off, less one bit unless the last kept bit is odd: to nearest, ties to even.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (magnitude + _STEP_IS_SMALLEST).to(tl.int32, bitcast=True) - _STEP_IS_SMALLEST_BITS
    code = tl.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def widen(stored, dtype: tl.constexpr):
    """Numbers as they are stored in `dtype`; bytes are e4m3."""
    if stored.dtype == tl.uint8:
        return _decode(stored).to(dtype)
    return stored.to(dtype)


@triton.jit
def _decode(code):
    """uint8 to float16, exactly: the fields of e4m3 moved to their places, and the exponents' biases made good."""
    wide = code.to(tl.int16)
    number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
