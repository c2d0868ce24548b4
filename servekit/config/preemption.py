"""What a request gives up when another needs its place: the components of scheduler.preemption."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.checks import fixed_kind


class Preemption(Enum):
    """What happens to a running request whose next token has no KV block."""

    recompute = "recompute"


@dataclass(frozen=True)
class PreemptionConfig:
    """Base of the preemption components."""

    kind: Preemption = Preemption.recompute
    """Which component this is."""


@dataclass(frozen=True)
class RecomputePreemptionConfig(PreemptionConfig):
    """The newest running request gives its blocks back and is computed again later."""

    def __post_init__(self) -> None:
        fixed_kind("preemption", self.kind, Preemption.recompute)
