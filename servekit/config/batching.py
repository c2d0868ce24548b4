"""When waiting requests may join the running batch: the components of scheduler.batching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servekit.config.checks import fixed_kind


class Batching(Enum):
    """When waiting requests may join the running batch."""

    continuous = "continuous"


@dataclass(frozen=True)
class BatchingConfig:
    """Base of the batching components."""

    kind: Batching = Batching.continuous
    """Which component this is."""


@dataclass(frozen=True)
class ContinuousBatchingConfig(BatchingConfig):
    """Requests join and leave between any two steps (Orca)."""

    def __post_init__(self) -> None:
        fixed_kind("batching", self.kind, Batching.continuous)
