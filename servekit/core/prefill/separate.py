"""Separate prefill: batches of prompts of like length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.alternation import Alternation
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


class SeparatePrefill:
    """Steps of whole prompts from one bucket of lengths, and steps of decodes between them.

    `buckets_tokens` are the upper bounds of the buckets; what is longer than all of them shares one more. The
    first prompt in the policy's order decides the bucket of a step, so none waits for a bucket to fill. The step's
    budget must hold the longest prompt, or that one could never start.
    """

    def __init__(self, buckets_tokens: Sequence[int], decode_steps: int) -> None:
        self._buckets_tokens = sorted(buckets_tokens)
        self._alternation = Alternation(decode_steps)

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        return self._alternation.turn(num_decodes, num_prompts, num_waiting)

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        return remaining_tokens if remaining_tokens <= budget_tokens else 0

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return not items or self._bucket(request) == self._bucket(items[0].request)

    def stepped(self, items: Sequence[PlanItem]) -> None:
        self._alternation.stepped(items)

    def _bucket(self, request: Request) -> int:
        return bisect_left(self._buckets_tokens, request.num_tokens)
