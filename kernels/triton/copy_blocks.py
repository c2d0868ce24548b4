"""Copies of whole KV blocks within one device, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels import copy_blocks as plain
from servekit.kernels.triton.launch import launch

_NUMBERS_PER_PROGRAM = 4096


def copy_blocks(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `servekit.kernels.copy_blocks.reference`, which also serves between two devices and two formats."""
    if source.device != target.device or source.dtype != target.dtype:
        plain.reference(source, target, source_blocks, target_blocks)
        return
    numbers = source[0].numel()
    launch(
        _copy_blocks, (len(source_blocks), triton.cdiv(numbers, _NUMBERS_PER_PROGRAM)),
        _as_integers(source), _as_integers(target), source_blocks, target_blocks, numbers,
        NUMBERS=_NUMBERS_PER_PROGRAM, num_warps=4)


def _as_integers(cache: Tensor) -> Tensor:
    """The same bytes in a type that every GPU has."""
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.itemsize])


@triton.jit
def _copy_blocks(source, target, source_blocks, target_blocks, numbers, NUMBERS: tl.constexpr):
    index = tl.program_id(0)
    place = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = place < numbers
    origin = source + tl.load(source_blocks + index).to(tl.int64) * numbers
    goal = target + tl.load(target_blocks + index).to(tl.int64) * numbers
    tl.store(goal + place, tl.load(origin + place, mask=is_inside), mask=is_inside)
