"""Interleaved prefill: a chunk, then decodes, then the next chunk."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.alternation import Alternation
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


class InterleavedPrefill:
    """A step of `chunk_tokens` prompt tokens alone, `decode_steps` steps of decodes alone, and so on.

    Short prompts share a chunk. `max_step_tokens` is the budget of a whole step, of which the chunk is a part.
    """

    def __init__(self, chunk_tokens: int, decode_steps: int, max_step_tokens: int) -> None:
        self._kept_back_tokens = max_step_tokens - chunk_tokens
        self._alternation = Alternation(decode_steps)

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        return self._alternation.turn(num_decodes, num_prompts, num_waiting)

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        return max(0, min(remaining_tokens, budget_tokens - self._kept_back_tokens))

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        self._alternation.stepped(items)
