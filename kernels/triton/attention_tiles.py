"""What attention of decodes and of prefill chunks have in common: reading the paged cache, and the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cache_rows(table, position, is_read, kv_head, num_kv_heads, BLOCK_SIZE: tl.constexpr):
    """Rows of a cache [num_blocks * num_kv_heads * BLOCK_SIZE, head_dim] in which one request's positions lie."""
    block = tl.load(table + position // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    return (block * num_kv_heads + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def attend(scores, value, weighted, best, total):
    """Add a tile of keys to a softmax whose end is not known yet (Milakov and Gimelshein, 2018).

    Args:
        scores: [rows, keys] float32, logarithms to base 2; -inf where a row may not look.
        value: [keys, head_dim].
        weighted: [rows, head_dim] float32, values weighted by 2^(score - best).
        best: [rows] float32, the largest score so far; -inf before the first.
        total: [rows] float32, sum of the weights.

    Returns:
        The last three with the tile included.
    """
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    # Three products of 19 bits give float32 its precision on tensor cores; other formats are not concerned.
    weighted = tl.dot(weights.to(value.dtype), value, weighted * shrink[:, None], input_precision="tf32x3")
    return weighted, new_best, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def quotient(weighted, total):
    """Zero for a row that saw no key."""
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]
