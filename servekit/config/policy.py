"""In which order requests are served: the components of scheduler.policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.checks import fixed_kind


class Policy(Enum):
    """In which order waiting requests are admitted."""

    fifo = "fifo"


@dataclass(frozen=True)
class PolicyConfig:
    """Base of the ordering policies."""

    kind: Policy = Policy.fifo
    """Which component this is."""


@dataclass(frozen=True)
class FifoPolicyConfig(PolicyConfig):
    """First come, first served."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.fifo)
