"""Products with a matrix of eight-bit numbers, integers or floats, for activations of any format, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.device import Gpu
from servekit.kernels.triton.e4m3 import for_kernels, widen
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

_SMALLEST_GROUP = 16
"""Columns that a tensor core multiplies at least."""


def require_group(group: int) -> None:
    """Refuse a group that the kernels cannot take in steps of a power of two."""
    if group < _SMALLEST_GROUP or group & (group - 1):
        raise ValueError(f"groups of {group} columns: the Triton kernels take powers of two from {_SMALLEST_GROUP} on, "
                         "or one scale for each output channel")


def multiply(x: Tensor, numbers: Tensor, scales: Tensor, gpu: Gpu, rounded: tuple[Tensor, Tensor] | None = None
             ) -> Tensor:
    """x @ W.T for x [..., in], in x's number format.

    Args:
        x: The activations.
        numbers: [out, in] int8 or torch.float8_e4m3fn.
        scales: [out, groups] float32; W = numbers * scales.
        gpu: What it runs on.
        rounded: x as numbers [rows, in] of the same format and scales [rows] float32; None: multiply x as it is.
    """
    (columns, depth), groups = numbers.shape, scales.shape[1]
    factors, factor_scales = rounded or (x.reshape(-1, depth).contiguous(), None)
    rows = len(factors)
    splits = num_splits(rows, columns, depth, gpu.num_processors)
    out = product_buffer(x, rows, columns, splits)
    _PRODUCT.launch(
        product_grid(rows, columns, splits), factors, for_kernels(numbers, gpu), scales, factor_scales, out, rows,
        columns, depth, groups, ROWS_BUCKET=triton.next_power_of_2(rows), GROUP=0 if groups == 1 else depth // groups)
    return sum_splits(out, x)


@triton.jit
def _product(x, numbers, scales, x_scales, out, num_rows, num_columns, depth, groups, ROWS_BUCKET: tl.constexpr,
             GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    STEP: tl.constexpr = DEPTH if GROUP == 0 else min(DEPTH, GROUP)
    ARE_INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    row_tile, column_tile = tile_of(num_rows, num_columns, ROWS, COLUMNS)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    accumulated = tl.zeros((ROWS, COLUMNS), tl.int32 if ARE_INTEGERS else tl.float32)
    first, end = steps_of_split(tl.cdiv(depth, STEP))
    for step in range(first, end):
        inner = step * STEP + tl.arange(0, STEP)
        factor = tl.load(x + row.to(tl.int64)[:, None] * depth + inner[None, :],
                         mask=(row < num_rows)[:, None] & (inner < depth)[None, :], other=0.0)
        number = tl.load(numbers + column.to(tl.int64)[None, :] * depth + inner[:, None],
                         mask=(column < num_columns)[None, :] & (inner < depth)[:, None], other=0.0)
        if GROUP == 0:
            accumulated = tl.dot(factor, widen(number, factor.dtype), accumulated, input_precision="tf32x3",
                                 out_dtype=accumulated.dtype)
        else:
            scale = tl.load(scales + column * groups + step * STEP // GROUP, mask=column < num_columns, other=0.0)
            accumulated += tl.dot(factor, widen(number, factor.dtype), input_precision="tf32x3") * scale[None, :]
    total = accumulated.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scales + column, mask=column < num_columns, other=0.0)[None, :]
    if x_scales is not None:
        total *= tl.load(x_scales + row, mask=row < num_rows, other=0.0)[:, None]
    store_split(out, total, row, column, num_rows, num_columns)


_PRODUCT = Tuned(
    _product,
    [triton.Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
     for rows, columns, depth, warps, stages in ((16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 128, 4, 3),
                                                 (32, 64, 128, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3),
                                                 (128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (128, 256, 64, 8, 3))],
    key=["ROWS_BUCKET", "num_columns", "depth", "GROUP"])
