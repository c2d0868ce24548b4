"""How prompts share steps with decodes: the components of scheduler.prefill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.bounds import at_least, fixed_kind
from servekit.config.errors import require

_SECTION = "scheduler.prefill"


class Prefill(Enum):
    """How prompts share steps with decodes."""

    chunked = "chunked"
    splitfuse = "splitfuse"
    interleaved = "interleaved"
    whole = "whole"
    separate = "separate"


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
    chunk_multiple_tokens: int = 1
    """A chunk that does not end its prompt is rounded down to a multiple of this (TensorRT-LLM: one KV block)."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.chunked)
        at_least(f"{_SECTION}.chunk_tokens", self.chunk_tokens, 1, 256)
        at_least(f"{_SECTION}.chunk_multiple_tokens", self.chunk_multiple_tokens, 1, 1)
        if self.chunk_tokens is not None:
            require(self.chunk_multiple_tokens <= self.chunk_tokens, f"{_SECTION}.chunk_multiple_tokens",
                    self.chunk_multiple_tokens,
                    f"must not exceed {_SECTION}.chunk_tokens={self.chunk_tokens}, or no prompt could be cut",
                    f"set {_SECTION}.chunk_multiple_tokens={self.chunk_tokens} or raise {_SECTION}.chunk_tokens")


@dataclass(frozen=True)
class SplitFusePrefillConfig(PrefillConfig):
    """Decodes and prompts in passes of exactly scheduler.max_step_tokens, as long as prompts last (DeepSpeed-FastGen).
    """

    kind: Prefill = Prefill.splitfuse
    """Which component this is."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.splitfuse)


@dataclass(frozen=True)
class InterleavedPrefillConfig(PrefillConfig):
    """A step of prompt tokens alone, then steps of decodes alone, then the next chunk."""

    kind: Prefill = Prefill.interleaved
    """Which component this is."""
    chunk_tokens: int = 256
    """Prompt tokens in one step; short prompts share it."""
    decode_steps: int = 1
    """Steps of decodes after each chunk, as long as there are any."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.interleaved)
        at_least(f"{_SECTION}.chunk_tokens", self.chunk_tokens, 1, 256)
        at_least(f"{_SECTION}.decode_steps", self.decode_steps, 1, 1)


@dataclass(frozen=True)
class WholePrefillConfig(PrefillConfig):
    """Prompts first, each computed in one step; scheduler.max_step_tokens must hold the longest (vLLM V0, Orca, TGI).
    """

    kind: Prefill = Prefill.whole
    """Which component this is."""
    mix_decodes: bool = False
    """Decodes and whole prompts share a step (Orca); false: a step with prompts has no decodes."""
    waiting_served_ratio: float | None = None
    """New prompts start once at least this many wait for each running request, rounded down in total (TGI: 0.3).
    null: as soon as one waits."""
    max_decode_steps: int = 19
    """With waiting_served_ratio: steps of decodes in a row after which any number may start. TGI's max_waiting_tokens
    counts the step of prompts too and is one more."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.whole)
        at_least(f"{_SECTION}.waiting_served_ratio", self.waiting_served_ratio, 0, None)
        at_least(f"{_SECTION}.max_decode_steps", self.max_decode_steps, 1, 19)


@dataclass(frozen=True)
class SeparatePrefillConfig(PrefillConfig):
    """Steps of whole prompts of like length, then steps of decodes; scheduler.max_step_tokens must hold the longest.
    """

    kind: Prefill = Prefill.separate
    """Which component this is."""
    buckets_tokens: tuple[int, ...] = (128, 512, 2048)
    """Upper bounds of the buckets of length, in any order; longer prompts share one more."""
    decode_steps: int = 1
    """Least number of steps of decodes between two steps of prompts, as long as there are decodes."""

    def __post_init__(self) -> None:
        fixed_kind("prefill", self.kind, Prefill.separate)
        at_least(f"{_SECTION}.decode_steps", self.decode_steps, 0, 1)
        for bound in self.buckets_tokens:
            at_least(f"{_SECTION}.buckets_tokens", bound, 1, "[128,512,2048]")
