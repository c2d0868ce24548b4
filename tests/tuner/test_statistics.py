"""Bounds against published figures, exact binomial arithmetic and simulated coverage."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from math import comb, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.tuner.statistics import (
    Array,
    Interval,
    block_bootstrap,
    blocks_by_time,
    design_effect,
    miss_share,
    miss_share_bound,
    miss_share_interval,
    miss_share_interval_anytime,
    percentile,
    percentile_interval,
    percentile_interval_by_blocks,
    percentile_ranks,
    requests_needed,
)


def binomial_at_most(successes: int, trials: int, share: Fraction) -> Fraction:
    """By whole numbers, without the functions under test."""
    return sum((comb(trials, k) * share ** k * (1 - share) ** (trials - k) for k in range(successes + 1)), Fraction(0))


@pytest.mark.parametrize(("misses", "needed"), [(0, 299), (1, 473), (2, 628), (5, 1049), (10, 1693)])
def test_requests_needed_for_99_percent_at_95(misses: int, needed: int) -> None:
    assert requests_needed(990, misses) == needed
    assert miss_share_bound(misses, needed) <= 0.01 < miss_share_bound(misses, needed - 1)


@pytest.mark.parametrize(("count", "ranks"), [(1000, (983, 997)), (300, (293, None)), (367, (359, None)),
                                              (368, (360, 368)), (1, (1, None))])
def test_ranks_that_bound_p99(count: int, ranks: tuple[int | None, int | None]) -> None:
    assert percentile_ranks(count, 990) == ranks


@settings(deadline=None)
@given(st.integers(1, 60), st.sampled_from([500, 900, 950, 990]), st.sampled_from([0.83, 0.95]))
def test_ranks_are_the_tightest_that_the_binomial_allows(count: int, per_mille: int, confidence: float) -> None:
    tail, share = Fraction(1 - confidence) / 2, Fraction(per_mille, 1000)
    below, above = percentile_ranks(count, per_mille, confidence)
    wrong_low = [binomial_at_most(rank - 1, count, share) for rank in range(1, count + 1)]
    wrong_high = [1 - chance for chance in wrong_low]
    assert below == max((rank for rank, chance in enumerate(wrong_low, 1) if chance <= tail), default=None)
    assert above == min((rank for rank, chance in enumerate(wrong_high, 1) if chance <= tail), default=None)


def test_percentile_interval_is_of_measured_values_or_open() -> None:
    sample = list(range(1000, 0, -1))
    assert percentile_interval(sample, 990) == Interval(983.0, 997.0)
    assert percentile_interval(sample[:100], 990).high == inf
    assert percentile_interval([], 990) == Interval(-inf, inf)


@settings(deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_clopper_pearson_is_where_the_binomial_tail_is_exhausted(counts: tuple[int, int]) -> None:
    requests, misses = counts
    interval = miss_share_interval(misses, requests)
    if misses < requests:
        assert float(binomial_at_most(misses, requests, Fraction(interval.high))) == pytest.approx(0.025)
    else:
        assert interval.high == 1.0
    if misses:
        assert float(1 - binomial_at_most(misses - 1, requests, Fraction(interval.low))) == pytest.approx(0.025)
    else:
        assert interval.low == 0.0


@pytest.mark.parametrize(("misses", "requests"), [(0, 10), (3, 100), (100, 100), (10, 1000)])
def test_anytime_bounds_contain_the_fixed_ones(misses: int, requests: int) -> None:
    fixed, anytime = miss_share_interval(misses, requests), miss_share_interval_anytime(misses, requests)
    assert anytime.low <= fixed.low <= misses / requests <= fixed.high <= anytime.high
    assert anytime.width > fixed.width


@pytest.mark.parametrize(("misses", "requests"), [(3, 100), (10, 1000), (1, 8)])
def test_anytime_bounds_lie_where_the_mixture_outweighs_the_likelihood_twentyfold(misses: int, requests: int) -> None:
    mixture = 1 / ((requests + 1) * comb(requests, misses))
    interval = miss_share_interval_anytime(misses, requests)
    for share in (interval.low, interval.high):
        assert mixture / (share ** misses * (1 - share) ** (requests - misses)) == pytest.approx(20)


def test_anytime_bounds_hold_under_peeking_and_fixed_ones_do_not() -> None:
    """500 runs of 400 requests with 5 % misses, looked at after every 25th request."""
    random = np.random.default_rng(1)
    share, runs, looks = 0.05, 500, range(25, 401, 25)
    counts = (random.random((runs, 400)) < share).cumsum(axis=1)[:, [n - 1 for n in looks]].tolist()

    def share_of_wrong_runs(interval: Callable[[int, int], Interval]) -> float:
        known = cache(interval)
        return sum(any(not known(k, n).low <= share <= known(k, n).high for k, n in zip(run, looks, strict=True))
                   for run in counts) / runs

    assert share_of_wrong_runs(miss_share_interval_anytime) < 0.05 < share_of_wrong_runs(miss_share_interval)


# --- blocks -----------------------------------------------------------------------------------------------------------

def test_blocks_are_stretches_of_arrival_time() -> None:
    blocks = blocks_by_time([7.0, 0.5, 1.0, 9.9, 25.0, 12.0, 30.5], [7, 0, 1, 9, 25, 12, 30], block_s=10.0)
    assert [block.tolist() for block in blocks] == [[7, 0, 1, 9], [12], [25, 30]], "30 s is no fourth block of its own"
    assert blocks_by_time([], [], block_s=1.0) == []
    with pytest.raises(ValueError, match="no length"):
        blocks_by_time([1.0], [1.0], block_s=0.0)
    with pytest.raises(ValueError, match="do not match"):
        blocks_by_time([1.0], [1.0, 2.0], block_s=1.0)


def busy_periods(random: np.random.Generator, num_blocks: int, size: int, share: float) -> list[Array]:
    """Blocks that miss altogether or not at all: `size` requests tell no more than one."""
    return [np.full(size, float(flag)) for flag in random.random(num_blocks) < share]


def test_design_effect_is_1_for_independent_requests_and_the_block_size_for_equal_ones() -> None:
    random = np.random.default_rng(2)
    independent = [(random.random(20) < 0.1).astype(np.float64) for _ in range(2000)]
    assert design_effect(independent) == pytest.approx(1.0, abs=0.08)
    assert design_effect(busy_periods(random, 2000, 20, 0.1)) == pytest.approx(20, rel=0.05)
    assert design_effect([np.zeros(20)] * 5) == 1.0


def test_miss_share_counts_what_the_requests_are_worth() -> None:
    random = np.random.default_rng(3)
    missed = busy_periods(random, 50, 20, 0.05)
    found = miss_share(missed, missed)
    assert (found.num_requests, found.num_missed) == (1000, int(np.concatenate(missed).sum()))
    assert 30 < found.effective_requests < 80
    naive = miss_share_interval(found.num_missed, found.num_requests)
    assert found.interval.width > 3 * naive.width
    assert found.upper_bound < found.interval.high


def test_without_a_miss_the_slowest_requests_show_the_clustering() -> None:
    slowness = busy_periods(np.random.default_rng(4), 200, 5, 0.08)
    found = miss_share([np.zeros(5)] * 200, slowness)
    assert found.num_missed == 0
    assert 120 < found.effective_requests < 300
    assert found.upper_bound > miss_share_bound(0, 1000) * 3


def test_coverage_in_busy_periods_needs_blocks() -> None:
    """400 runs of 1,000 requests in clusters of ten with a true share of 5 %: nominal 95 %."""
    random = np.random.default_rng(5)
    naive = blocked = 0
    for _ in range(400):
        missed = busy_periods(random, 100, 10, 0.05)
        misses = int(np.concatenate(missed).sum())
        inner, outer = miss_share_interval(misses, 1000), miss_share(missed, missed).interval
        naive += inner.low <= 0.05 <= inner.high
        blocked += outer.low <= 0.05 <= outer.high
    assert naive / 400 < 0.75
    assert blocked / 400 > 0.92


def test_bootstrap_matches_the_known_spread_of_a_mean() -> None:
    random = np.random.default_rng(6)
    blocks = [random.normal(10.0, 2.0, size=1) for _ in range(400)]
    interval = block_bootstrap(blocks, lambda rows: float(rows.mean()))
    assert interval.low < 10.0 < interval.high
    assert interval.width == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.1)
    assert block_bootstrap(blocks[:1], lambda rows: float(rows.mean())) == Interval(-inf, inf)
    with pytest.raises(ValueError, match="not a number"):
        block_bootstrap(blocks, lambda _: float("nan"), draws=2)


def test_paired_bootstrap_sees_a_difference_that_is_smaller_than_the_spread() -> None:
    random = np.random.default_rng(7)
    rows = random.normal(10.0, 3.0, size=(300, 1)) + np.array([[0.0, 0.2]]) + random.normal(0, 0.5, size=(300, 2))
    blocks = [rows[i:i + 10] for i in range(0, 300, 10)]
    paired = block_bootstrap(blocks, lambda rows: float((rows[:, 1] - rows[:, 0]).mean()), draws=500)
    unpaired = [block_bootstrap([block[:, [i]] for block in blocks], lambda rows: float(rows.mean()), draws=500)
                for i in range(2)]
    assert 0 < paired.low < (rows[:, 1] - rows[:, 0]).mean() < paired.high
    assert unpaired[0].high > unpaired[1].low, "without pairs there is no difference to be seen"


def test_percentile_bounds_by_blocks_are_never_narrower_than_order_statistics() -> None:
    random = np.random.default_rng(8)
    for _ in range(4):
        blocks = [random.exponential(size=20) + random.exponential() for _ in range(30)]
        plain = percentile_interval(np.concatenate(blocks), 900)
        by_blocks = percentile_interval_by_blocks(blocks, 900)
        assert by_blocks.low <= plain.low
        assert by_blocks.high >= plain.high
    independent = [random.exponential(size=1) for _ in range(1000)]
    assert percentile_interval_by_blocks(independent, 900).width < 2 * percentile_interval(
        np.concatenate(independent), 900).width


@given(st.lists(st.floats(0, 10) | st.just(inf), min_size=1, max_size=60), st.integers(1, 1000))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[float], per_mille: int) -> None:
    found = percentile(np.array(values), per_mille)
    assert sum(value <= found for value in values) * 1000 >= per_mille * len(values)
    assert sum(value < found for value in values) * 1000 < per_mille * len(values)


def test_a_percentile_has_an_exact_rank_where_the_product_of_share_and_count_is_rounded() -> None:
    """0.535 times 3,800 is 2,033, and a little more in binary."""
    assert percentile(np.arange(3800.0), 535) == 2032.0 < np.quantile(np.arange(3800.0), 0.535, method="inverted_cdf")
