"""Multiplication by a weight matrix of four-bit integers in groups, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.triton.device import Gpu
from servekit.kernels.triton.eight_bit_linear import require_group
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

_LARGEST_GROUP = 256


class Int4Product:
    """See `servekit.kernels.grouped_int4_linear.reference` and `servekit.kernels.int4_linear.reference`."""

    def __init__(self, weight: GroupedInt4Weight | Int4Weight, gpu: Gpu) -> None:
        """Pack the matrix as the kernel reads it. Raises ValueError for groups that it cannot take."""
        depth = weight.integers.shape[1]
        group, scales, offsets = _smaller_groups(depth, weight.scales, _offsets(weight))
        self._gpu = gpu
        self._depth, self._group = depth, group
        self._inputs = weight.inputs if isinstance(weight, GroupedInt4Weight) else None
        # An even number of groups, so that each has another one to share its bytes with.
        missing = len(scales[0]) % 2
        self._packed = pack_pairs(F.pad(weight.integers, (0, missing * group)), group)
        self._scales, self._offsets = (F.pad(values, (0, missing)).T.contiguous() for values in (scales, offsets))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        inputs = x if self._inputs is None else x.index_select(-1, self._inputs)
        inputs = inputs.reshape(-1, self._depth).contiguous()
        rows, (columns, num_bytes) = len(inputs), self._packed.shape
        splits = num_splits(rows, columns, self._depth, self._gpu.num_processors)
        out = product_buffer(x, rows, columns, splits)
        _PRODUCT.launch(
            product_grid(rows, columns, splits), inputs, self._packed, self._scales, self._offsets, out, rows, columns,
            self._depth, num_bytes, ROWS_BUCKET=triton.next_power_of_2(rows), GROUP=self._group)
        return sum_splits(out, x)


def pack_pairs(codes: Tensor, span: int) -> Tensor:
    """[out, in] uint8 of four bits to [out, in / 2]: of 2 * `span` inputs, those `span` apart share a byte.

    So the lower and the upper halves of some bytes are each a run of inputs. The first input is in the lower half.
    """
    low, high = codes.view(len(codes), -1, 2, span).unbind(2)
    return (low | (high << 4)).flatten(1)


def _offsets(weight: GroupedInt4Weight | Int4Weight) -> Tensor:
    return weight.zeros if isinstance(weight, GroupedInt4Weight) else weight.minima


def _smaller_groups(depth: int, scales: Tensor, offsets: Tensor) -> tuple[int, Tensor, Tensor]:
    """Groups of a power of two, which share a scale where the given groups are of another size or very large."""
    given = depth // scales.shape[1]
    group = min(given & -given, _LARGEST_GROUP)
    require_group(group)
    scales, offsets = (values.repeat_interleave(given // group, dim=1) for values in (scales, offsets))
    return group, scales, offsets


@triton.jit
def _product(x, packed, scales, offsets, out, num_rows, num_columns, depth, num_bytes, ROWS_BUCKET: tl.constexpr,
             GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    STEP: tl.constexpr = min(DEPTH, GROUP)
    row_tile, column_tile = tile_of(num_rows, num_columns, ROWS, COLUMNS)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    accumulated = tl.zeros((ROWS, COLUMNS), tl.float32)
    first, end = steps_of_split(num_bytes // STEP)
    for step in range(first, end):
        byte = step * STEP + tl.arange(0, STEP)
        pair = step * STEP // GROUP
        codes = tl.load(packed + column.to(tl.int64)[None, :] * num_bytes + byte[:, None],
                        mask=(column < num_columns)[None, :], other=0)
        accumulated = _add_group(accumulated, x, codes & 15, scales, offsets, row, column, byte + pair * GROUP,
                                 2 * pair, num_rows, num_columns, depth)
        accumulated = _add_group(accumulated, x, codes >> 4, scales, offsets, row, column, byte + (pair + 1) * GROUP,
                                 2 * pair + 1, num_rows, num_columns, depth)
    store_split(out, accumulated, row, column, num_rows, num_columns)


@triton.jit
def _add_group(accumulated, x, integers, scales, offsets, row, column, inner, group, num_rows, num_columns, depth):
    """Add the product with a part of one group, which is scaled after it is summed: fewer sums than weights."""
    factor = tl.load(x + row.to(tl.int64)[:, None] * depth + inner[None, :],
                     mask=(row < num_rows)[:, None] & (inner < depth)[None, :], other=0.0)
    scale = tl.load(scales + group * num_columns + column, mask=column < num_columns, other=0.0).to(tl.float32)
    offset = tl.load(offsets + group * num_columns + column, mask=column < num_columns, other=0)
    if offsets.dtype.element_ty == tl.uint8:
        number = _raised(integers, factor.dtype) - _raised(offset, factor.dtype)[None, :]
        return accumulated + tl.dot(factor, number, input_precision="tf32x3") * scale[None, :]
    number = _raised(integers, factor.dtype) - _raised(tl.zeros_like(integers), factor.dtype)
    product = tl.dot(factor, number, input_precision="tf32x3") * scale[None, :]
    return accumulated + product + tl.sum(factor.to(tl.float32), axis=1)[:, None] * offset.to(tl.float32)[None, :]


@triton.jit
def _raised(integer, dtype: tl.constexpr):
    """0 to 31 plus a number that the format decides: differences of two are exact, and nothing has to be converted.

    Written into the last bits of a power of two whose step is 1.
    """
    if dtype == tl.float16:
        return (integer.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    if dtype == tl.bfloat16:
        return (integer.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    return integer.to(dtype)


_PRODUCT = Tuned(
    _product,
    [triton.Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
     for rows, columns, depth, warps, stages in ((16, 64, 64, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 4, 4),
                                                 (16, 128, 32, 4, 5), (32, 64, 64, 4, 4), (64, 64, 64, 4, 3),
                                                 (64, 128, 64, 4, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3))],
    key=["ROWS_BUCKET", "num_columns", "depth", "GROUP"])
