"""Chunked prefill: prompts are cut so that decodes never stall."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.base import Turn
from servekit.core.request import Request


class ChunkedPrefill:
    """Decodes first, then chunks of at most `chunk_tokens` of what they leave (Sarathi-Serve, OSDI'24).

    A chunk that does not end its prompt is a multiple of `multiple_tokens` (TensorRT-LLM). The step's budget must
    hold one multiple beside the decodes of all other running requests, or a prompt could wait for ever.
    """

    def __init__(self, chunk_tokens: int | None, multiple_tokens: int = 1) -> None:
        self._chunk_tokens = chunk_tokens
        self._multiple_tokens = multiple_tokens

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        return Turn.mixed

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        granted = min(remaining_tokens, budget_tokens)
        if self._chunk_tokens is not None:
            granted = min(granted, self._chunk_tokens)
        return granted if granted == remaining_tokens else granted - granted % self._multiple_tokens

    def suits(self, request: Request, items: Sequence[PlanItem]) -> bool:
        return True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        pass
