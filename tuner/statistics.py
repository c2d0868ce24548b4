"""How far a measured percentile or share of misses may be from the true one.

The first part takes requests as independent. They are not: those of one busy period are slow together. The second
part therefore works with blocks of time. It measures how much the requests of a block resemble each other (the design
effect), and what their number is worth (the effective sample size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan, log

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, betaincinv, betaln

from servekit.load.percentiles import rank

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], float]


@dataclass(frozen=True)
class Interval:
    """Bounds between which the true value lies with at least the confidence that was asked for."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """Distance of the bounds."""
        return self.high - self.low

    def hull(self, other: Interval) -> Interval:
        """The more careful of two: what either allows."""
        return Interval(min(self.low, other.low), max(self.high, other.high))


# --- independent requests ---------------------------------------------------------------------------------------------

def percentile_interval(sample: Iterable[float], per_mille: int, confidence: float = 0.95) -> Interval:
    """Two-sided bounds on a percentile from order statistics; no distribution is assumed.

    The number of values below the true percentile is binomial, which says between which ranks it lies. A bound is
    infinite where the sample is too small to have one: p99 has no upper bound from fewer than 368 values at 95 %.
    """
    ordered = np.sort(np.asarray(list(sample), dtype=np.float64))
    below, above = percentile_ranks(len(ordered), per_mille, confidence)
    return Interval(-inf if below is None else float(ordered[below - 1]),
                    inf if above is None else float(ordered[above - 1]))


def percentile_ranks(count: int, per_mille: int, confidence: float = 0.95) -> tuple[int | None, int | None]:
    """Ranks, from 1, between whose values a percentile lies; None where no value of so many bounds it."""
    tail, share = (1 - confidence) / 2, per_mille / 1000
    below = _last(range(1, count + 1), lambda place: bdtr(place - 1, count, share) <= tail)
    above = _last(range(count, 0, -1), lambda place: bdtrc(place - 1, count, share) <= tail)
    return below, above


def _last(ranks: range, is_bound: Callable[[int], bool]) -> int | None:
    """The last of some ranks that bounds, given that those before it do and those after it do not."""
    low, high = 0, len(ranks)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_bound(ranks[middle]) else (low, middle)
    return ranks[low - 1] if low else None


def miss_share_interval(misses: float, requests: float, confidence: float = 0.95) -> Interval:
    """Two-sided bounds on the true share of misses (Clopper and Pearson, 1934).

    Counts need not be whole: with effective ones the bounds are those of Korn and Graubard (1998).
    """
    tail = (1 - confidence) / 2
    return Interval(float(betaincinv(misses, requests - misses + 1, tail)) if misses > 0 else 0.0,
                    _miss_share_above(misses, requests, tail))


def miss_share_bound(misses: float, requests: float, confidence: float = 0.95) -> float:
    """One-sided: the true share of misses is at most this."""
    return _miss_share_above(misses, requests, 1 - confidence)


def _miss_share_above(misses: float, requests: float, tail: float) -> float:
    return float(betaincinv(misses + 1, requests - misses, 1 - tail)) if misses < requests else 1.0


def requests_needed(per_mille: int, misses: int = 0, confidence: float = 0.95) -> int:
    """Fewest independent requests, `misses` of them bad, that prove that a share of `per_mille` keeps its limits."""
    allowed = 1 - per_mille / 1000
    low, high = misses, misses + 1
    while miss_share_bound(misses, high, confidence) > allowed:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if miss_share_bound(misses, middle, confidence) <= allowed else (middle, high)
    return high


def miss_share_interval_anytime(misses: int, requests: int, confidence: float = 0.95) -> Interval:
    """Two-sided bounds that hold at every moment of a run at once, so that one may look and stop when satisfied.

    The mixture of binomial likelihoods over a flat prior, divided by the likelihood of the true share, is a
    martingale; it exceeds 1 / (1 - confidence) with probability 1 - confidence at most (Robbins, 1970). Wider than
    `miss_share_interval`, and for independent requests as well.
    """
    mixture = float(betaln(misses + 1, requests - misses + 1))
    likeliest = misses / requests

    def is_excluded(share: float) -> bool:
        return mixture - _log_likelihood(misses, requests, share) >= -log(1 - confidence)

    return Interval(_boundary(is_excluded, 0.0, likeliest), _boundary(is_excluded, 1.0, likeliest))


def _log_likelihood(misses: int, requests: int, share: float) -> float:
    parts = ((misses, share), (requests - misses, 1 - share))
    return sum(count * (log(part) if part > 0 else -inf) for count, part in parts if count)


def _boundary(is_excluded: Callable[[float], bool], outside: float, inside: float) -> float:
    """Where exclusion ends between a share that may be excluded and one that is not, on the excluded side."""
    if not is_excluded(outside):
        return outside
    for _ in range(60):
        middle = (outside + inside) / 2
        outside, inside = (middle, inside) if is_excluded(middle) else (outside, middle)
    return outside


# --- requests of one busy period resemble each other ------------------------------------------------------------------

def blocks_by_time(arrivals_s: Sequence[float], values: npt.ArrayLike, block_s: float) -> list[Array]:
    """Values of requests in blocks of arrival time, empty ones left out; the last, if it is cut short, joins the one
    before it. `values` has one row for each request; a block should last several times as long as a request.
    """
    if not block_s > 0:
        raise ValueError(f"a block of {block_s} s has no length")
    arrivals, rows = np.asarray(arrivals_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(arrivals) != len(rows):
        raise ValueError(f"{len(arrivals)} arrivals and {len(rows)} values do not match")
    if len(arrivals) == 0:
        return []
    since_s = arrivals - arrivals.min()
    last = max(0, int(since_s.max() // block_s) - 1)
    numbers = np.minimum(since_s // block_s, last)
    return [rows[numbers == number] for number in np.unique(numbers)]


def design_effect(blocks: Sequence[Array]) -> float:
    """By which factor the variance of a mean exceeds that of independent values; never below 1.

    `blocks` hold the 0s and 1s of whether each request missed. The variance is that of a ratio between blocks
    (linearised, as for clusters in a survey). 1 if all values are equal, since then nothing can be told.
    """
    values = np.concatenate(blocks)
    share = float(values.mean())
    independent = share * (1 - share) / len(values)
    if len(blocks) < 2 or independent == 0:
        return 1.0
    residuals = np.array([block.sum() - share * len(block) for block in blocks])
    between = len(blocks) / (len(blocks) - 1) * float((residuals ** 2).sum()) / len(values) ** 2
    return max(1.0, between / independent)


@dataclass(frozen=True)
class MissShare:
    """The share of requests that broke a promise, with what is known of the true one."""

    num_requests: int
    num_missed: int
    effective_requests: float
    """Independent requests that would tell as much."""
    interval: Interval
    """Two-sided."""
    upper_bound: float
    """One-sided: the one that proves a promise."""


SLOW_PER_MILLE = 900
"""Whose clustering stands for that of the misses while there are too few of these to show their own."""


def miss_share(missed: Sequence[Array], slowness: Sequence[Array], confidence: float = 0.95) -> MissShare:
    """Bounds on the true share of misses from blocks of time.

    `missed` holds 0s and 1s, `slowness` the latency of the same requests in the same blocks. Misses are too rare to
    show alone how they cluster, so the design effect is the larger of theirs and that of the slowest tenth.
    """
    flags = np.concatenate(missed)
    latencies = np.concatenate(slowness)
    slow = float(np.quantile(latencies, SLOW_PER_MILLE / 1000, method="inverted_cdf"))
    effect = max(design_effect(missed), design_effect([(block > slow).astype(np.float64) for block in slowness]))
    requests, misses = len(flags), int(flags.sum())
    return MissShare(requests, misses, requests / effect,
                     miss_share_interval(misses / effect, requests / effect, confidence),
                     miss_share_bound(misses / effect, requests / effect, confidence))


def block_bootstrap(blocks: Sequence[Array], statistic: Statistic, draws: int = 2000, confidence: float = 0.95,
                    seed: int = 0) -> Interval:
    """Bounds on a statistic of all rows, by drawing whole blocks again with replacement (Künsch, 1989).

    Rows may hold two columns, such as the same request under two configurations; their statistic may then be a
    difference, and the bounds are those of a paired comparison.
    """
    if len(blocks) < 2:
        return Interval(-inf, inf)
    generator = np.random.default_rng(seed)
    drawn = np.array([statistic(np.concatenate([blocks[i] for i in generator.integers(len(blocks), size=len(blocks))]))
                      for _ in range(draws)])
    if any(map(isnan, drawn)):
        raise ValueError("the statistic is not a number for some of the blocks drawn")
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], method="inverted_cdf")
    return Interval(float(low), float(high))


def percentile_interval_by_blocks(blocks: Sequence[Array], per_mille: int, confidence: float = 0.95,
                                  seed: int = 0) -> Interval:
    """Bounds on a percentile of latencies in blocks of time: the hull of two that fail differently.

    Order statistics of as many values as the sample is worth, and the bootstrap over blocks, whose upper end cannot
    exceed the largest value seen.
    """
    values = np.sort(np.concatenate(blocks))
    point = values[rank(per_mille, len(values)) - 1]
    effect = design_effect([(block > point).astype(np.float64) for block in blocks])
    worth = max(1, int(len(values) / effect))
    below, above = percentile_ranks(worth, per_mille, confidence)
    ranked = Interval(-inf if below is None else float(values[max(1, below * len(values) // worth) - 1]),
                      inf if above is None else float(values[-(-above * len(values) // worth) - 1]))
    drawn = block_bootstrap(blocks, lambda rows: percentile(rows, per_mille), confidence=confidence, seed=seed)
    return ranked.hull(drawn)


def percentile(values: Array, per_mille: int) -> float:
    """The smallest value that `per_mille` thousandths of them do not exceed; found without sorting them all."""
    place = rank(per_mille, len(values)) - 1
    return float(np.partition(values, place)[place])

