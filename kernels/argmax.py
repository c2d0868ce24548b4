"""The largest logit of each row."""

from __future__ import annotations

from torch import Tensor


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[S, vocab] to the largest value and its index, each [S]; a row with a NaN has NaN as its largest value."""
    values, indices = logits.max(dim=-1)
    return values, indices
