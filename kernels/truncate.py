"""Which tokens top-k, top-p (Holtzman et al., 2020) and min-p (Nguyen et al., 2025) leave to be drawn."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CANDIDATES = 1024
"""Most likely tokens that are looked at before the whole vocabulary is sorted."""


def reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set all logits to -inf but those of each row's most likely tokens, of which it leaves one at least.

    Tokens are ordered by their logits, equal ones by their ids. top-p looks at the probabilities that top-k leaves.

    Args:
        logits: [S, vocab] in float32 or float64. Each row has a finite one.
        temperatures: [S] float64, above 0; top-p and min-p look at softmax(logits / temperature).
        top_k: [S] int64, at least 1: so many tokens at most.
        top_p: [S] float64, 0 to 1: as few tokens as have so large a share together; 1: all.
        min_p: [S] float64, 0 to 1: only tokens at least so likely relative to the most likely one.

    Returns:
        [S, vocab], a new tensor.
    """
    rows = zip(logits, temperatures.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    return torch.stack([_truncated(*row) for row in rows])


def _truncated(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row."""
    vocab = len(logits)
    if top_k < vocab:
        candidates = logits.topk(top_k).values
        return _most_likely(logits, candidates, _num_kept(candidates, candidates, temperature, top_p, min_p))
    if top_p >= 1 and min_p <= 0:
        return logits
    candidates = logits.topk(min(_CANDIDATES, vocab)).values
    num_kept = _num_kept(candidates, logits, temperature, top_p, min_p)
    if num_kept == len(candidates) < vocab:
        candidates = logits.sort(descending=True).values
        num_kept = _num_kept(candidates, logits, temperature, top_p, min_p)
    return _most_likely(logits, candidates, num_kept)


def _num_kept(candidates: Tensor, population: Tensor, temperature: float, top_p: float, min_p: float) -> int:
    """How many of the largest logits, in descending order, top-p of a population and min-p keep."""
    weights = _weights(candidates, candidates[0], temperature)
    is_kept = weights >= min_p
    if top_p < 1:
        total = _weights(population, candidates[0], temperature).sum()
        is_kept &= (weights.cumsum(dim=0) - weights) / total < top_p
    return max(1, int(is_kept.sum()))


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """In float64, relative to the most likely token."""
    # Shifted before the division: a tiny temperature must not overflow.
    return ((logits.double() - largest.double()) / temperature).exp()


def _most_likely(logits: Tensor, candidates: Tensor, count: int) -> Tensor:
    """A row with its `count` largest logits, which are the first of the candidates, and -inf for all others."""
    least = candidates[count - 1]
    left = F.threshold(logits, least.item(), float("-inf"))
    at_the_least = (logits == least).nonzero().flatten()[:int((candidates[:count] == least).sum())]
    left[at_the_least] = logits[at_the_least]
    return left
