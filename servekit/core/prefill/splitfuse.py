"""SplitFuse: forward passes of one fixed size."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


class SplitFusePrefill:
    """Decodes first, and the pass filled up to the step's budget exactly (Dynamic SplitFuse, DeepSpeed-FastGen).

    Long prompts are cut and short ones joined, so that all passes with enough prompt tokens at hand are equal: the
    rate of tokens is concave in a pass's size, and equal passes give the most.
    """

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        return Turn.mixed

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        return min(remaining_tokens, budget_tokens)

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        pass
