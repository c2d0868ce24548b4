"""Chunked prefill: prompts are cut so that decodes never stall."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


class ChunkedPrefill:
    """Decodes first, then chunks of at most `chunk_tokens` of what they leave (Sarathi-Serve, OSDI'24)."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self._chunk_tokens = chunk_tokens

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        return Turn.mixed

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        granted = min(remaining_tokens, budget_tokens)
        return granted if self._chunk_tokens is None else min(granted, self._chunk_tokens)

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        pass
