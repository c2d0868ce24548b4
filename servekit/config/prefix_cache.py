"""How equal prefixes are found again: the components of scheduler.prefix_cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.checks import at_least, fixed_kind


class PrefixCache(Enum):
    """How KV blocks of equal prefixes are found again."""

    none = "none"
    hash = "hash"


@dataclass(frozen=True)
class PrefixCacheConfig:
    """Base of the prefix caches."""

    kind: PrefixCache = PrefixCache.hash
    """Which component this is."""


@dataclass(frozen=True)
class NoPrefixCacheConfig(PrefixCacheConfig):
    """Every prompt is computed from its first token."""

    kind: PrefixCache = PrefixCache.none
    """Which component this is."""

    def __post_init__(self) -> None:
        fixed_kind("prefix_cache", self.kind, PrefixCache.none)


@dataclass(frozen=True)
class HashPrefixCacheConfig(PrefixCacheConfig):
    """Full blocks are found by a hash chain over their tokens, evicted least recently used first."""

    share_in_batch_tokens: int | None = 32
    """A request waits for a prefix of at least this many tokens that another is computing now; null: never."""

    def __post_init__(self) -> None:
        fixed_kind("prefix_cache", self.kind, PrefixCache.hash)
        at_least("scheduler.prefix_cache", "share_in_batch_tokens", self.share_in_batch_tokens, 1, 32)
