"""Prefill: which steps compute prompts, and how many of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from servekit.core.plan import PlanItem
from servekit.core.request import Request


class Turn(Enum):
    """What a step computes first."""

    mixed = "mixed"
    """Decodes, then prompts with what they leave of the budget."""
    prompts = "prompts"
    """Prompts only; decodes if no prompt can be computed."""
    decodes = "decodes"
    """Decodes only; prompts if there is no decode."""


class Prefill(Protocol):
    """How prompts (and recomputation) share the engine's steps with decodes."""

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        """The next step's turn, given running decodes, running unfinished prompts and waiting requests."""

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        """Tokens of a prompt to compute now, given what it still needs and what the step has left; 0: none."""

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        """Whether a request may start in a step that computes these items; if not, those behind it may."""

    def stepped(self, items: Sequence[PlanItem]) -> None:
        """A step has been planned that computes these items."""
