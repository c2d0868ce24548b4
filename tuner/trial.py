"""What goes into a trial, a `Candidate`, and what comes out, an `Outcome`: the contract between search and measurement.

The search (study.py) knows nothing of engines, and the measurement nothing of samplers. Whatever implements `Executor`
can be tuned: the engine itself, another server, a simulator, or the hand-made functions of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import Any, Protocol

from servekit.tuner.launch import Configuration
from servekit.tuner.space import Value
from servekit.tuner.verdict import Tally

NEVER_RAN = 2.0
"""Violation of every promise by a configuration that could not be measured."""


class Ending(Enum):
    """How a trial ended."""

    measured = "measured"
    """To the end of its load."""
    stopped_early = "stopped_early"
    """As soon as the verdict was certain."""
    illegal = "illegal"
    """The settings do not go together; nothing was started."""
    out_of_memory_at_start = "out_of_memory_at_start"
    out_of_memory = "out_of_memory"
    """Under load."""
    hung = "hung"
    """It started too slowly, or brought no token for too long."""
    crashed = "crashed"
    invalid = "invalid"
    """The measurement was bad, not the configuration: the generator was late, the cache polluted, the machine busy."""
    screened_out = "screened_out"
    """The simulator found it hopeless; nothing was measured."""
    abandoned = "abandoned"
    """The user or the machine ended the tuner first."""

    @property
    def has_verdict(self) -> bool:
        """Whether each promise was judged."""
        return self in (Ending.measured, Ending.stopped_early, Ending.screened_out)


@dataclass(frozen=True)
class Candidate:
    """A configuration to be measured."""

    number: int
    """Of the trial in the study."""
    values: Mapping[str, Value]
    """Of the knobs that matter in it."""
    overrides: Sequence[str]
    """What composes it on top of the base configuration."""
    config: Configuration
    config_hash: str


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate."""

    ending: Ending
    rate_per_s: float = 0.0
    """Highest request rate at which every promise held; 0 if it held at none."""
    violations: Mapping[str, float] = field(default_factory=dict)
    """For each promise by name, how far it is from holding at the lowest rate: above 0 is broken. Empty without a
    verdict: a configuration that does not run breaks all."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is to be kept of it, as JSON has it: counts, times by phase, the path of the raw log."""

    def __post_init__(self) -> None:
        if self.ending.has_verdict is not bool(self.violations):
            raise ValueError(f"an ending of {self.ending.value} and violations {dict(self.violations)} contradict")
        if not all(map(isfinite, (self.rate_per_s, *self.violations.values()))) or self.rate_per_s < 0:
            raise ValueError(f"rate {self.rate_per_s} or violations {dict(self.violations)} are not finite numbers")


def violations(tallies: Sequence[Tally], is_given_up: bool = False) -> dict[str, float]:
    """How far each promise is from holding; of a run that was given up, if it had gone on as it began."""
    return {tally.promise.name: tally.projected_violation if is_given_up else tally.violation for tally in tallies}


class Executor(Protocol):
    """Measures candidates. Nothing that a configuration does to an engine raises: it is an `Ending`."""

    def run(self, candidate: Candidate) -> Outcome:
        """Measure one, for as long as it takes."""
