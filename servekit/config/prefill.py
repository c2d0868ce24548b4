"""How prompts share steps with decodes: the components of scheduler.prefill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.checks import at_least, fixed_kind


class Prefill(Enum):
    """How prompts share steps with decodes."""

    chunked = "chunked"


@dataclass(frozen=True)
class PrefillConfig:
    """Base of the prefill components."""

    kind: Prefill = Prefill.chunked
    """Which component this is."""


@dataclass(frozen=True)
class ChunkedPrefillConfig(PrefillConfig):
    """Decodes first, then chunks of prompts up to the step's token budget (Sarathi-Serve)."""

    chunk_tokens: int | None = 256
    """Most prompt tokens of one request in one step; null: whatever the step's budget leaves."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.chunked)
        at_least("scheduler.prefill", "chunk_tokens", self.chunk_tokens, 1, 256)
