"""Multiplication by a weight matrix of four-bit floats in groups, MXFP4 and NVFP4, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.triton.device import Gpu
from servekit.kernels.triton.e4m3 import widen
from servekit.kernels.triton.int4_linear import pack_pairs
from servekit.kernels.triton.launch import Tuned
from servekit.kernels.triton.split_sum import (
    num_splits,
    product_buffer,
    product_grid,
    steps_of_split,
    store_split,
    sum_splits,
    tile_of,
)

_SPAN = 32
"""Distance of the two inputs that share a byte: a group of MXFP4, two of NVFP4."""


class Fp4Product:
    """See `servekit.kernels.fp4_linear.reference`."""

    def __init__(self, weight: Fp4Weight, gpu: Gpu) -> None:
        """Pack the matrix as the kernel reads it."""
        self._gpu = gpu
        self._depth = weight.codes.shape[1]
        self._group = self._depth // weight.scales.shape[1]
        missing = -self._depth % (2 * _SPAN)
        self._packed = pack_pairs(F.pad(weight.codes, (0, missing)), _SPAN)
        self._are_powers = weight.scales.dtype is torch.float8_e8m0fnu
        scales = F.pad(weight.scales.view(torch.uint8), (0, missing // self._group))
        self._scales = scales.T.contiguous()
        self._scale = weight.scale

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        inputs = x.reshape(-1, self._depth).contiguous()
        rows, (columns, num_bytes) = len(inputs), self._packed.shape
        splits = num_splits(rows, columns, self._depth, self._gpu.num_processors)
        out = product_buffer(x, rows, columns, splits)
        _PRODUCT.launch(
            product_grid(rows, columns, splits), inputs, self._packed, self._scales, out, rows, columns, self._depth,
            num_bytes, self._scale, ROWS_BUCKET=triton.next_power_of_2(rows), GROUP=self._group, SPAN=_SPAN,
            ARE_POWERS=self._are_powers)
        return sum_splits(out, x)


@triton.jit
def _product(x, packed, scales, out, num_rows, num_columns, depth, num_bytes, scale, ROWS_BUCKET: tl.constexpr,
             GROUP: tl.constexpr, SPAN: tl.constexpr, ARE_POWERS: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row_tile, column_tile = tile_of(num_rows, num_columns, ROWS, COLUMNS)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    accumulated = tl.zeros((ROWS, COLUMNS), tl.float32)
    first, end = steps_of_split(tl.cdiv(num_bytes, DEPTH))
    for step in range(first, end):
        byte = step * DEPTH + tl.arange(0, DEPTH)
        codes = tl.load(packed + column.to(tl.int64)[None, :] * num_bytes + byte[:, None],
                        mask=(byte < num_bytes)[:, None] & (column < num_columns)[None, :], other=0)
        for half in tl.static_range(2):
            inner = byte + (byte // SPAN + half) * SPAN
            factor = tl.load(x + row.to(tl.int64)[:, None] * depth + inner[None, :],
                             mask=(row < num_rows)[:, None] & (inner < depth)[None, :], other=0.0)
            own = _group_scales(scales, step, half, column, num_columns, num_bytes, GROUP, SPAN, ARE_POWERS, COLUMNS,
                                DEPTH)
            number = (_number((codes >> (4 * half)) & 15) * own).to(factor.dtype)
            accumulated = tl.dot(factor, number, accumulated, input_precision="tf32x3")
    store_split(out, accumulated * scale, row, column, num_rows, num_columns)


@triton.jit
def _group_scales(scales, step, half, column, num_columns, num_bytes, GROUP: tl.constexpr, SPAN: tl.constexpr,
                  ARE_POWERS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """The scale of each weight of a step, [DEPTH, COLUMNS] float32, each read once for its group."""
    byte = step * DEPTH + tl.arange(0, DEPTH // GROUP) * GROUP
    group = (byte + (byte // SPAN + half) * SPAN) // GROUP
    stored = tl.load(scales + group[:, None] * num_columns + column[None, :],
                     mask=(byte < num_bytes)[:, None] & (column < num_columns)[None, :], other=0)
    number = _power_of_two(stored) if ARE_POWERS else widen(stored, tl.float32)
    return tl.broadcast_to(number[:, None, :], (DEPTH // GROUP, GROUP, COLUMNS)).reshape(DEPTH, COLUMNS)


@triton.jit
def _power_of_two(exponent):
    """e8m0 to float32: 2^(e - 127), whose least is not a normal number any more; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent.to(tl.int32) << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _number(code):
    """e2m1 to float32: the fields moved to their places in a float16, and the exponents' biases made good."""
    wide = code.to(tl.int16)
    return ((((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0).to(tl.float32)


_PRODUCT = Tuned(
    _product,
    [triton.Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
     for rows, columns, depth, warps, stages in ((16, 64, 64, 4, 4), (16, 128, 32, 4, 4), (16, 64, 128, 4, 3),
                                                 (16, 128, 64, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 3),
                                                 (64, 128, 32, 4, 3), (128, 128, 32, 8, 3))],
    key=["ROWS_BUCKET", "num_columns", "depth", "GROUP"])
