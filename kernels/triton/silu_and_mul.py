"""The gated activation of the feed-forward half, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.launch import launch

_COLUMNS = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `servekit.kernels.silu_and_mul.reference`."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width).contiguous()
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    launch(_silu_and_mul, (len(rows), triton.cdiv(width, columns)), rows, out, width, COLUMNS=columns, num_warps=4)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + 2 * row * width + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=is_inside, other=0.0).to(tl.float32)
    # exp(-gate) overflows to infinity for very negative gates, and the quotient is zero as it should be.
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(dtype), mask=is_inside)
