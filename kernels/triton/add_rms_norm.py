"""The residual addition and the RMSNorm that follows it, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.launch import launch
from servekit.kernels.triton.rms_norm import RowTile, normalized


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `servekit.kernels.add_rms_norm.reference`."""
    x, residual = x.contiguous(), residual.contiguous()
    num_rows, width = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(x)
    tile = RowTile(width)
    launch(
        _add_rms_norm, (triton.cdiv(num_rows, tile.rows),),
        x, residual, weight, normed, total, num_rows, width, eps,
        ROWS=tile.rows, WIDTH=tile.width, num_warps=tile.num_warps)
    return normed, total


@triton.jit
def _add_rms_norm(x, residual, weight, normed, total, num_rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    before = tl.load(residual + place, mask=is_inside, other=0.0).to(tl.float32)
    added = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
    rounded = (before + added).to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=is_inside)
    factors = tl.load(weight + column, mask=column < width, other=0.0)
    result = normalized(rounded.to(tl.float32), factors, width, eps, normed.dtype.element_ty)
    tl.store(normed + place, result, mask=is_inside)
