"""Products that share the sum over a matrix's columns among several programs, and add their parts in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.launch import Grid, launch

_PROGRAMS_PER_PROCESSOR = 2
_TILE = 64
"""Rows and columns of the tiles by which programs are counted."""
_SHORTEST_SPLIT = 512
_NUMBERS_PER_PROGRAM = 1024
_TILE_ROWS_TOGETHER = tl.constexpr(8)


def num_splits(rows: int, columns: int, depth: int, num_processors: int) -> int:
    """How many programs should share the sum over `depth` of a product [rows, columns], to keep all processors busy."""
    tiles: int = max(1, triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE))
    return max(1, min(_PROGRAMS_PER_PROCESSOR * num_processors // tiles, depth // _SHORTEST_SPLIT))


def product_grid(rows: int, columns: int, splits: int) -> Grid:
    """One program for each tile and each split."""
    return lambda meta: (triton.cdiv(rows, meta["ROWS"]) * triton.cdiv(columns, meta["COLUMNS"]), splits)


def product_buffer(x: Tensor, rows: int, columns: int, splits: int) -> Tensor:
    """[splits, rows, columns] in x's number format if there is one split, else in float32."""
    dtype = x.dtype if splits == 1 else torch.float32
    return torch.empty((splits, rows, columns), dtype=dtype, device=x.device)


def sum_splits(parts: Tensor, x: Tensor) -> Tensor:
    """[splits, rows, columns] to [..., columns], in the shape and number format of `x` [..., in]."""
    splits, rows, columns = parts.shape
    if splits > 1:
        total = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        launch(_sum_splits, (triton.cdiv(rows * columns, _NUMBERS_PER_PROGRAM),), parts, total, rows * columns,
               SPLITS=splits, NUMBERS=_NUMBERS_PER_PROGRAM, num_warps=4)
    else:
        total = parts
    return total.view(*x.shape[:-1], columns)


@triton.jit
def _sum_splits(parts, total, numbers, SPLITS: tl.constexpr, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = place < numbers
    added = tl.load(parts + place, mask=is_inside, other=0.0)
    for split in range(1, SPLITS):
        added += tl.load(parts + split * numbers.to(tl.int64) + place, mask=is_inside, other=0.0)
    tl.store(total + place, added.to(total.dtype.element_ty), mask=is_inside)


@triton.jit
def tile_of(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of the program's tile: neighbours share rows and columns, so that these stay in the L2 cache."""
    tile_rows, tile_columns = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0)
    return tl.swizzle2d(tile // tile_columns, tile % tile_columns, tile_rows, tile_columns, _TILE_ROWS_TOGETHER)


@triton.jit
def steps_of_split(num_steps):
    """First and end of the steps through the depth that belong to the program's split."""
    per_split = tl.cdiv(num_steps, tl.num_programs(1))
    first = tl.program_id(1) * per_split
    return first, tl.minimum(first + per_split, num_steps)


@triton.jit
def store_split(out, accumulated, row, column, num_rows, num_columns):
    """Write a tile of the program's split."""
    place = (tl.program_id(1).to(tl.int64) * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(out + place, accumulated.to(out.dtype.element_ty),
             mask=(row < num_rows)[:, None] & (column < num_columns)[None, :])
