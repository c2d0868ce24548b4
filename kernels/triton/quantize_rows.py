"""Rounding of activations to eight bits, each row with a scale of its own, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton import e4m3
from servekit.kernels.triton.launch import launch

_LARGEST_INTEGER = tl.constexpr(127.0)
_STEP_IS_ONE = tl.constexpr(12582912.0)
"""A float32 of this size has steps of 1: adding it rounds to integers, ties to even."""
_NUMBERS_PER_WARP = 512


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[rows, width] to torch.int8 or torch.float8_e4m3fn and a float32 scale for each row; numbers * scale is about x.

    See `quantize_rows` of `servekit.kernels.int8_dynamic_linear` and `servekit.kernels.fp8_linear`.
    """
    x = x.contiguous()
    rows, width = x.shape
    is_fp8 = dtype is torch.float8_e4m3fn
    numbers = torch.empty(x.shape, dtype=torch.uint8 if is_fp8 else torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    tile = triton.next_power_of_2(width)
    launch(_quantize_row, (rows,), x, numbers, scales, width, WIDTH=tile, IS_FP8=is_fp8,
           num_warps=min(16, max(1, tile // _NUMBERS_PER_WARP)))
    return numbers.view(dtype), scales


@triton.jit
def _quantize_row(x, numbers, scales, width, WIDTH: tl.constexpr, IS_FP8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    # A NaN makes the whole row NaN, as it does in the reference.
    largest = tl.max(tl.abs(values), axis=0) + 0.0 * tl.sum(values, axis=0)
    scale = tl.div_rn(largest, e4m3.LARGEST if IS_FP8 else _LARGEST_INTEGER)
    scale = tl.where(scale == 0.0, 1.0, scale)
    scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
    rounded = e4m3.encode(scaled) if IS_FP8 else (scaled + _STEP_IS_ONE - _STEP_IS_ONE).to(tl.int8)
    tl.store(numbers + row * width + column, rounded, mask=column < width)
    tl.store(scales + row, scale)
