"""How equal prefixes are found again: the components of scheduler.prefix_cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.bounds import at_least, fixed_kind


class PrefixCache(Enum):
    """How KV blocks of equal prefixes are found again."""

    none = "none"
    hash = "hash"
    radix = "radix"


class CacheNamespace(Enum):
    """Who may share cached prefixes with whom."""

    salt = "salt"
    """Requests with equal cache_salt."""
    tenant = "tenant"
    """Requests of one tenant with equal cache_salt."""


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
class SharingConfig:
    """What all prefix caches that share have in common."""

    share_in_batch_tokens: int | None = 32
    """Under continuous batching, a request waits for a prefix of at least this many tokens that another is computing
    now; null: never."""
    namespace: CacheNamespace = CacheNamespace.salt
    """Who shares: requests with equal cache_salt, or only those of one tenant among them."""

    def __post_init__(self) -> None:
        at_least("scheduler.prefix_cache.share_in_batch_tokens", self.share_in_batch_tokens, 1, 32)


@dataclass(frozen=True)
class HashPrefixCacheConfig(SharingConfig, PrefixCacheConfig):
    """Full blocks are found by a hash chain over their tokens, evicted least recently used first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("prefix_cache", self.kind, PrefixCache.hash)


@dataclass(frozen=True)
class RadixPrefixCacheConfig(SharingConfig, PrefixCacheConfig):
    """Full blocks are found in a tree of their tokens, whose least recently used leaf is evicted first."""

    kind: PrefixCache = PrefixCache.radix
    """Which component this is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("prefix_cache", self.kind, PrefixCache.radix)
