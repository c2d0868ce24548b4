"""One random token a row in Triton: the Gumbel-max trick, with the random bits of the reference and sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.argmax import argmax, best_of_parts, find_best, part_buffers, part_columns
from servekit.kernels.triton.launch import launch

COLDEST = tl.constexpr(1.2e-38)
HOTTEST = tl.constexpr(3.4e38)
"""Temperatures beyond these act as these do: the largest logit, or every token alike."""
_FIRST_FACTOR = tl.constexpr(0x85EBCA6B)
_SECOND_FACTOR = tl.constexpr(0xC2B2AE35)


def draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """See `servekit.kernels.draw.reference`, whose draws differ where float32 cannot tell the two best sums apart."""
    logits = logits.contiguous()
    best, _ = argmax(logits)
    values, indices = part_buffers(logits)
    launch(_draw_from_part, values.shape, logits, best, temperatures, keys, values, indices, logits.shape[1],
           COLUMNS=part_columns(logits), num_warps=4)
    return best_of_parts(values, indices)[1]


@triton.jit
def scaled(logits, best, temperature):
    """(logits - best) / temperature in float32, for a temperature in float64."""
    return (logits - best) / tl.minimum(tl.maximum(temperature, COLDEST), HOTTEST).to(tl.float32)


@triton.jit
def _draw_from_part(logits, best, temperatures, keys, values, indices, vocab, COLUMNS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    numbers = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
    shifted = scaled(numbers, tl.load(best + row), tl.load(temperatures + row))
    first_key = tl.load(keys + 2 * row).to(tl.uint32)
    second_key = tl.load(keys + 2 * row + 1).to(tl.uint32)
    bits = _mix(_mix(column.to(tl.uint32) + first_key) ^ second_key)
    value, index = find_best(shifted + _gumbel(bits), column)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, value)
    tl.store(indices + place, index)


@triton.jit
def _mix(x):
    """The 32-bit finaliser of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * _FIRST_FACTOR
    x = (x ^ (x >> 13)) * _SECOND_FACTOR
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):
    """Noise from the upper 23 bits."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(_minus_log(uniform))


@triton.jit
def _minus_log(uniform):
    """-log(uniform), also near 1, where the largest noise comes from and a plain logarithm loses its digits there."""
    # 1 - uniform is exact. Six terms of the series are float32's precision below 1/16.
    rest = 1.0 - uniform
    small = rest * (1.0 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5 + rest / 6)))))
    return tl.where(rest < 1 / 16, small, -tl.log(uniform))
