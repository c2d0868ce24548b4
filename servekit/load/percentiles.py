"""Percentiles of a sample by nearest rank: every reported value was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

SAMPLES_BEYOND = 10
"""Samples that must lie beyond a percentile before it says more than the luck of a few requests."""


class Percentile(Enum):
    """The percentiles that are reported."""

    p50 = "p50"
    p90 = "p90"
    p99 = "p99"
    p99_9 = "p99.9"

    @property
    def per_mille(self) -> int:
        """In parts per thousand, so that ranks are exact."""
        return round(float(self.value.removeprefix("p")) * 10)

    @property
    def samples_needed(self) -> int:
        """Samples from which on this percentile can be trusted."""
        return SAMPLES_BEYOND * 1000 // (1000 - self.per_mille)


def rank(per_mille: int, count: int) -> int:
    """Place, from 1, of the smallest of `count` values that `per_mille` thousandths of them do not exceed."""
    return -(-per_mille * count // 1000)


def nearest_rank(ordered: Sequence[float] | npt.NDArray[np.float64], percentile: Percentile) -> float:
    """The smallest value that at least that share of the sample does not exceed. `ordered` is ascending."""
    if len(ordered) == 0:
        raise ValueError("an empty sample has no percentile")
    return float(ordered[rank(percentile.per_mille, len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in a few numbers."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[Percentile, float]
    too_few_samples_for: tuple[Percentile, ...]
    """Percentiles that this sample is too small for: fewer than SAMPLES_BEYOND values lie beyond them."""

    @classmethod
    def of(cls, sample: Sequence[float] | npt.NDArray[np.float64]) -> Distribution | None:
        """Summarise a sample in any order; None if it is empty."""
        if len(sample) == 0:
            return None
        ordered = np.sort(np.asarray(sample, dtype=np.float64))
        return cls(len(ordered), float(ordered.mean()), float(ordered[0]), float(ordered[-1]),
                   {percentile: nearest_rank(ordered, percentile) for percentile in Percentile},
                   tuple(percentile for percentile in Percentile if len(ordered) < percentile.samples_needed))

    @classmethod
    def of_counts(cls, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> Distribution | None:
        """Summarise a sample in which each value occurs that many times; None if it is empty."""
        if len(values) == 0:
            return None
        order = np.argsort(values)
        ordered, up_to = values[order], np.cumsum(counts[order])
        count = int(up_to[-1])
        at = {p: float(ordered[np.searchsorted(up_to, rank(p.per_mille, count))]) for p in Percentile}
        return cls(count, float(np.average(values, weights=counts)), float(ordered[0]), float(ordered[-1]), at,
                   tuple(p for p in Percentile if count < p.samples_needed))
