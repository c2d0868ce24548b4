"""One random token a row: the Gumbel-max trick with noise that depends on nothing but a key and the token's id.

argmax(logit + g) with g standard Gumbel is a draw from the softmax (Gumbel, 1954). A draw changes only where the two
best sums are as close as the logits' rounding, so batching and chunking practically never change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def reference(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature).

    Args:
        logits: [S, vocab] in float32 or float64; -inf: never drawn. Each row has a finite one.
        temperatures: [S] float64, above 0.
        keys: [S, 2] int64, each from 0 to 2^32 - 1.

    Returns:
        [S] int64 token ids.
    """
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True).double()
    # A tiny temperature turns differences into -inf; that is what it means.
    return (shifted / temperatures.unsqueeze(1) + _gumbel(keys, logits.shape[1])).argmax(dim=-1)


def _gumbel(keys: Tensor, vocab: int) -> Tensor:
    """[S, vocab] float64 noise, from 23 random bits each, so that float32 holds the uniform numbers exactly."""
    ids = torch.arange(vocab, device=keys.device)
    bits = _mix(_mix((ids + keys[:, :1]) & _MASK) ^ keys[:, 1:])
    uniform = ((bits >> 9).double() + 0.5) * 2.0 ** -23
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby), on int64 that hold 32-bit numbers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
