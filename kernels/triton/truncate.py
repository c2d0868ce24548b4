"""Top-k, top-p and min-p in Triton, without sorting.

What they leave of a row is a prefix of its tokens in order of their logits, so it has a threshold: the logits above it
stay, and some of those equal to it. The threshold is found by halving an interval of logits; each step moves the ends
to logits that occur, so that it ends when one is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servekit.kernels.triton.argmax import argmax
from servekit.kernels.triton.draw import scaled
from servekit.kernels.triton.launch import launch

_COLUMNS = 4096
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


def truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `servekit.kernels.truncate.reference`; shares are summed in float32."""
    logits = logits.contiguous()
    best, _ = argmax(logits)
    out = torch.empty_like(logits)
    num_rows, vocab = logits.shape
    launch(_truncate, (num_rows,), logits, best, temperatures, top_k, top_p, min_p, out, vocab,
           COLUMNS=min(_COLUMNS, triton.next_power_of_2(vocab)), num_warps=8)
    return out


@triton.jit
def _truncate(logits, best, temperatures, top_k, top_p, min_p, out, vocab, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits, out = logits + row * vocab, out + row * vocab
    largest, temperature = tl.load(best + row), tl.load(temperatures + row)
    most = tl.load(top_k + row)
    share = tl.load(top_p + row).to(tl.float32)
    highest = _key(largest)
    _, threshold, _ = _sweep(logits, largest, temperature, vocab, _LOWEST, False, COLUMNS)
    ties = vocab
    if most < vocab:
        threshold = _find(logits, largest, temperature, vocab, threshold, highest, most.to(tl.float32), False, COLUMNS)
        above, _, _ = _sweep(logits, largest, temperature, vocab, threshold, False, COLUMNS)
        ties = most.to(tl.int32) - above.to(tl.int32)
    if share < 1.0:
        limit = share * _mass(logits, largest, temperature, vocab, threshold, ties, COLUMNS)
        narrower = _find(logits, largest, temperature, vocab, threshold, highest, limit, True, COLUMNS)
        above, _, _ = _sweep(logits, largest, temperature, vocab, narrower, True, COLUMNS)
        weight = tl.exp(scaled(_number(narrower), largest, temperature))
        # As many equal logits as it takes to reach the limit; more than there are is all of them.
        needed = tl.minimum(tl.ceil((limit - above) / weight), 2.0**30).to(tl.int32)
        ties = tl.where(narrower > threshold, needed, tl.minimum(ties, needed))
        threshold = narrower
    _write(logits, out, largest, temperature, vocab, threshold, tl.maximum(ties, 1),
           tl.load(min_p + row).to(tl.float32), COLUMNS)


@triton.jit
def _key(number):
    """An int32 that orders as the float32 does, with one zero."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, column, vocab):
    return tl.load(logits + column, mask=column < vocab, other=float("-inf"))


@triton.jit
def _sweep(logits, largest, temperature, vocab, threshold, BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """What lies above a threshold (its weight or its number), the lowest key there and the highest that is not."""
    above = tl.zeros((COLUMNS,), tl.float32)
    lowest_above = tl.full((COLUMNS,), _HIGHEST, tl.int32)
    highest_below = tl.full((COLUMNS,), _LOWEST, tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        numbers = _load(logits, column, vocab)
        key = _key(numbers)
        is_above = (key > threshold) & (column < vocab)
        if BY_WEIGHT:
            above += tl.where(is_above, tl.exp(scaled(numbers, largest, temperature)), 0.0)
        else:
            above += is_above.to(tl.float32)
        lowest_above = tl.minimum(lowest_above, tl.where(is_above, key, _HIGHEST))
        highest_below = tl.maximum(highest_below, tl.where(is_above | (column >= vocab), _LOWEST, key))
    return tl.sum(above, axis=0), tl.min(lowest_above, axis=0), tl.max(highest_below, axis=0)


@triton.jit
def _find(logits, largest, temperature, vocab, low, high, limit, BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """The lowest key from `low` to `high` above which lies less than `limit`; both occur in the row."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        above, lowest_above, highest_below = _sweep(logits, largest, temperature, vocab, middle, BY_WEIGHT, COLUMNS)
        is_enough = above < limit
        high = tl.where(is_enough, highest_below, high)
        low = tl.where(is_enough, low, lowest_above)
    return low


@triton.jit
def _mass(logits, largest, temperature, vocab, threshold, ties, COLUMNS: tl.constexpr):
    """Weight of what lies above a threshold and of `ties` of those at it."""
    total = tl.zeros((COLUMNS,), tl.float32)
    num_equal = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        numbers = _load(logits, column, vocab)
        key = _key(numbers)
        total += tl.where(key > threshold, tl.exp(scaled(numbers, largest, temperature)), 0.0)
        num_equal += ((key == threshold) & (column < vocab)).to(tl.int32)
    kept = tl.minimum(tl.sum(num_equal, axis=0), ties).to(tl.float32)
    return tl.sum(total, axis=0) + kept * tl.exp(scaled(_number(threshold), largest, temperature))


@triton.jit
def _write(logits, out, largest, temperature, vocab, threshold, ties, least, COLUMNS: tl.constexpr):
    """The logits above the threshold and the first `ties` at it that have a weight of `least`; -inf for all others."""
    before = 0
    for start in range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        numbers = _load(logits, column, vocab)
        key = _key(numbers)
        is_equal = ((key == threshold) & (column < vocab)).to(tl.int32)
        rank = before + tl.cumsum(is_equal, axis=0) - is_equal
        before += tl.sum(is_equal, axis=0)
        is_kept = (key > threshold) | ((key == threshold) & (rank < ties))
        is_kept &= tl.exp(scaled(numbers, largest, temperature)) >= least
        tl.store(out + column, tl.where(is_kept, numbers, float("-inf")), mask=column < vocab)
