"""RMSNorm in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.launch import launch

_NUMBERS_PER_PROGRAM = 2048
_NUMBERS_PER_WARP = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `servekit.kernels.rms_norm.reference`; `x` may be a view of some heads of a wider tensor."""
    width = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, width).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = rows.shape[0] * rows.shape[1]
    tile = RowTile(width)
    launch(
        _rms_norm, (triton.cdiv(num_rows, tile.rows),),
        rows, weight, out, num_rows, width, rows.shape[1], rows.stride(0), rows.stride(1), eps,
        ROWS=tile.rows, WIDTH=tile.width, num_warps=tile.num_warps)
    return out


class RowTile:
    """How many rows of a given width one program holds, and with how many warps."""

    def __init__(self, width: int) -> None:
        self.width: int = triton.next_power_of_2(width)
        self.rows = max(1, _NUMBERS_PER_PROGRAM // self.width)
        self.num_warps = min(16, max(1, self.rows * self.width // _NUMBERS_PER_WARP))


@triton.jit
def normalized(values, weight, width, eps, dtype: tl.constexpr):
    """Rows [ROWS, WIDTH] in float32, zero beyond `width`; rounded to `dtype` before the weight, as the reference is."""
    mean_square = tl.sum(values * values, axis=1) / width
    normed = (values * (1.0 / tl.sqrt(mean_square + eps))[:, None]).to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)[None, :]).to(dtype)


@triton.jit
def _rms_norm(x, weight, out, num_rows, width, num_heads, token_stride, head_stride, eps,
              ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_inside = (row < num_rows)[:, None] & (column < width)[None, :]
    start = (row // num_heads).to(tl.int64) * token_stride + (row % num_heads) * head_stride
    values = tl.load(x + start[:, None] + column[None, :], mask=is_inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=column < width, other=0.0)
    normed = normalized(values, factors, width, eps, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], normed, mask=is_inside)
