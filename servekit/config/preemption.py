"""What a request gives up when another needs its place: the components of scheduler.preemption."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.bounds import at_least, fixed_kind


class Preemption(Enum):
    """What happens to a running request whose next token has no KV block."""

    none = "none"
    recompute = "recompute"
    swap = "swap"


class VictimRule(Enum):
    """Which running request gives way when KV blocks run out."""

    policy = "policy"
    """Whom the policy would serve last."""
    newest = "newest"
    """Who was admitted last."""
    fewest_output = "fewest_output"
    """Who has produced the fewest tokens; the one that arrived first is spared."""
    largest = "largest"
    """Who holds the most KV blocks; the one that arrived first is spared."""


@dataclass(frozen=True)
class PreemptionConfig:
    """Base of the preemption components."""

    kind: Preemption = Preemption.recompute
    """Which component this is."""


@dataclass(frozen=True)
class NoPreemptionConfig(PreemptionConfig):
    """Nobody gives way: admission has reserved all that a request can need."""

    kind: Preemption = Preemption.none
    """Which component this is."""

    def __post_init__(self) -> None:
        fixed_kind("preemption", self.kind, Preemption.none)


@dataclass(frozen=True)
class RecomputePreemptionConfig(PreemptionConfig):
    """A running request gives its blocks back and is computed again later."""

    victim: VictimRule = VictimRule.policy
    """Who gives way: whom the policy serves last, the newest, the one with the fewest output tokens, or the largest."""
    only_on_deadlock: bool = False
    """A request without a block waits for one, and somebody gives way only when no running request can go on."""

    def __post_init__(self) -> None:
        fixed_kind("preemption", self.kind, Preemption.recompute)


@dataclass(frozen=True)
class SwapPreemptionConfig(PreemptionConfig):
    """A running request's blocks are copied to the host's memory, and recomputed when there is no room for them."""

    kind: Preemption = Preemption.swap
    """Which component this is."""
    victim: VictimRule = VictimRule.policy
    """Who gives way: whom the policy serves last, the newest, the one with the fewest output tokens, or the largest."""
    only_on_deadlock: bool = False
    """A request without a block waits for one, and somebody gives way only when no running request can go on."""
    swap_space_bytes: int | None = None
    """Host memory for KV blocks; null: room for as many as the device has, but at most a tenth of what is free."""

    def __post_init__(self) -> None:
        fixed_kind("preemption", self.kind, Preemption.swap)
        at_least("scheduler.preemption.swap_space_bytes", self.swap_space_bytes, 1, None)
