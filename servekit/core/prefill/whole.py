"""Whole prefill: prompts are never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servekit.core.plan import PlanItem
from servekit.core.prefill.alternation import DecodeStreak
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


@dataclass(frozen=True)
class Patience:
    """How many new prompts must wait before they interrupt the decodes (text-generation-inference's router)."""

    waiting_served_ratio: float
    """At least this many for each running request, rounded down in total."""
    max_decode_steps: int
    """After this many steps of decodes in a row, however few they are."""


class WholePrefill:
    """Prompts first, each in one step, in steps of their own (vLLM V0; Orca's iteration, mixed with the decodes).

    The step's budget must hold the longest prompt, or that one could never start.
    """

    def __init__(self, mix_decodes: bool = False, patience: Patience | None = None) -> None:
        self._prompt_turn = Turn.mixed if mix_decodes else Turn.prompts
        self._patience = patience
        self._streak = DecodeStreak()

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        may_interrupt = num_prompts > 0 or self._enough_wait(num_decodes, num_waiting)
        return self._prompt_turn if may_interrupt else Turn.decodes

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        return remaining_tokens if remaining_tokens <= budget_tokens else 0

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        self._streak.stepped(items)

    def _enough_wait(self, num_decodes: int, num_waiting: int) -> bool:
        patience = self._patience
        if patience is None or self._streak.num_steps >= patience.max_decode_steps:
            return num_waiting > 0
        return num_waiting >= max(1, int(num_decodes * patience.waiting_served_ratio))
