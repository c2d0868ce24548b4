"""The largest logit of each row, in Triton: each row is split into parts, whose largest are then compared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.launch import launch

MOST_COLUMNS = 4096
"""Of one part."""
_NO_COLUMN = tl.constexpr(2**31 - 1)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `servekit.kernels.argmax.reference`; of equal logits the first counts."""
    logits = logits.contiguous()
    values, indices = part_buffers(logits)
    launch(_best_of_part, values.shape, logits, values, indices, logits.shape[1],
           COLUMNS=part_columns(logits), num_warps=4)
    return best_of_parts(values, indices)


def part_columns(logits: Tensor) -> int:
    """Columns of each part of a row but the last."""
    enough: int = triton.next_power_of_2(logits.shape[1])
    return min(MOST_COLUMNS, enough)


def part_buffers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the best of each part of each row: values like `logits` and columns in int32, [S, parts]."""
    shape = len(logits), triton.cdiv(logits.shape[1], part_columns(logits))
    return (torch.empty(shape, dtype=logits.dtype, device=logits.device),
            torch.empty(shape, dtype=torch.int32, device=logits.device))


def best_of_parts(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """[S, parts] to the largest value and its int64 column, each [S]."""
    num_rows, parts = values.shape
    best = torch.empty(num_rows, dtype=values.dtype, device=values.device)
    columns = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    launch(_best_of_parts, (num_rows,), values, indices, best, columns, parts,
           PARTS_WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return best, columns


@triton.jit
def find_best(values, columns):
    """The largest of `values` and its column, the first of equals; NaN counts as the largest."""
    is_nan = values != values
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    largest = tl.max(values, axis=0)
    is_best = tl.where(has_nan, is_nan, values == largest)
    first = tl.min(tl.where(is_best, columns, _NO_COLUMN), axis=0)
    return tl.where(has_nan, float("nan"), largest), first


@triton.jit
def _best_of_part(logits, values, indices, vocab, COLUMNS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    numbers = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    value, index = find_best(numbers, column)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, value.to(values.dtype.element_ty))
    tl.store(indices + place, index)


@triton.jit
def _best_of_parts(values, indices, best, columns, parts, PARTS_WIDTH: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS_WIDTH)
    place = row * parts + part
    numbers = tl.load(values + place, mask=part < parts, other=float("-inf")).to(tl.float32)
    value, column = find_best(numbers, tl.load(indices + place, mask=part < parts, other=_NO_COLUMN))
    tl.store(best + row, value.to(best.dtype.element_ty))
    tl.store(columns + row, column.to(tl.int64))
