"""Which tokens top-k, top-p (Holtzman et al., 2020) and min-p (Nguyen et al., 2025) leave to be drawn."""

from __future__ import annotations

import torch
from torch import Tensor


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
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    # Shifted before the division: a tiny temperature must not overflow.
    weights = ((ordered - ordered[:, :1]) / temperatures.unsqueeze(1)).exp()
    is_kept = torch.arange(logits.shape[1], device=logits.device) < top_k.unsqueeze(1)
    shares = weights * is_kept / (weights * is_kept).sum(dim=-1, keepdim=True)
    is_needed = shares.cumsum(dim=-1) - shares < top_p.unsqueeze(1)
    is_kept &= (is_needed | (top_p >= 1).unsqueeze(1)) & (weights >= min_p.unsqueeze(1))
    is_kept[:, 0] = True
    return torch.where(is_kept.new_empty(is_kept.shape).scatter_(1, ids, is_kept), logits, float("-inf"))
