"""Whether a knob may be changed in a live engine: some hot trials are measured again in a fresh process.

A warm engine may differ from a fresh one (memory already touched, code already compiled, caches of the machine), and
a search that only sees warm engines would not notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from servekit.tuner.space import Space, Value, Warmth

AUDITED_EVERY = 5
"""Of so many hot trials, at least one is repeated cold."""
LIMIT = 0.05
"""Relative difference from which a knob is not to be trusted hot."""
_FEWEST = 2


@dataclass(frozen=True)
class Repeat:
    """A hot measurement and the same one in a fresh process, at one rate and on equal arrivals."""

    changed: tuple[str, ...]
    """Knobs whose values the live engine had been given, different from those it started with."""
    hot_tpot_s: float
    cold_tpot_s: float

    @property
    def difference(self) -> float:
        """By how much the hot figure exceeds the cold one, as a share."""
        return self.hot_tpot_s / self.cold_tpot_s - 1.0


@dataclass
class HotAudit:
    """Decides which trials to repeat, and which knobs to demote."""

    space: Space
    seed: int
    repeats: list[Repeat] = field(default_factory=list)
    num_hot_trials: int = 0
    _owed: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def is_due(self) -> bool:
        """Told of a hot trial that has just ended: whether it is to be repeated. In random order, one in five."""
        self.num_hot_trials += 1
        wanted = -(-self.num_hot_trials // AUDITED_EVERY)
        if len(self.repeats) + self._owed >= wanted:
            return False
        left_of_five = AUDITED_EVERY - (self.num_hot_trials - 1) % AUDITED_EVERY
        if self._random.random() >= 1 / left_of_five:
            return False
        self._owed += 1
        return True

    def take(self, repeat: Repeat) -> None:
        """A repeat has been measured."""
        self._owed = max(0, self._owed - 1)
        self.repeats.append(repeat)

    def gave_up(self) -> None:
        """A repeat that was due could not be measured."""
        self._owed = max(0, self._owed - 1)

    def demoted(self) -> frozenset[str]:
        """Knobs whose changes go with a difference of more than `LIMIT`: they are changed cold from now on.

        A knob is judged by the median over the repeats in which it had been changed, at least two, and only if that
        is worse than over the repeats in which it had not.
        """
        return frozenset(knob.key for knob in self.space.knobs
                         if knob.warmth is Warmth.hot and self._is_suspicious(knob.key))

    def _is_suspicious(self, key: str) -> bool:
        changed = [abs(repeat.difference) for repeat in self.repeats if key in repeat.changed]
        others = [abs(repeat.difference) for repeat in self.repeats if key not in repeat.changed]
        if len(changed) < _FEWEST:
            return False
        return median(changed) > LIMIT and median(changed) > (median(others) if others else 0.0)


def changed_knobs(values: Mapping[str, Value], started_with: Mapping[str, Value]) -> tuple[str, ...]:
    """Knobs whose values differ between two points; one that does not matter in a point counts as absent."""
    keys: Sequence[str] = sorted(values.keys() | started_with.keys())
    return tuple(key for key in keys if values.get(key) != started_with.get(key))
