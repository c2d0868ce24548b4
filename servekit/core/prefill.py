"""Prefill: how many tokens of a prompt one step computes."""

from __future__ import annotations

from typing import Protocol


class Prefill(Protocol):
    """The share of a step's token budget that one prompt gets. Decodes have been charged before it is asked."""

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        """Tokens of a prompt to compute now, given what it still needs and what the step has left; 0: none."""


class ChunkedPrefill:
    """Chunks of at most `chunk_tokens`, as much as the decodes leave (Sarathi-Serve, OSDI'24)."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self._chunk_tokens = chunk_tokens

    def grant(self, remaining_tokens: int, budget_tokens: int) -> int:
        granted = min(remaining_tokens, budget_tokens)
        return granted if self._chunk_tokens is None else min(granted, self._chunk_tokens)
