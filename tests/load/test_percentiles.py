"""Nearest-rank percentiles against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.load.percentiles import Distribution, Percentile, nearest_rank

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(SAMPLES)
def test_equal_to_numpys_inverted_cdf(sample: list[float]) -> None:
    for percentile in Percentile:
        # A share of exact tenths of a percent: numpy's own rank suffers from rounding, so it is nudged down.
        expected = np.quantile(sample, percentile.per_mille / 1000 - 1e-12, method="inverted_cdf")
        assert nearest_rank(sorted(sample), percentile) == expected


@pytest.mark.parametrize(("percentile", "rank"), [
    (Percentile.p50, 500), (Percentile.p90, 900), (Percentile.p99, 990), (Percentile.p99_9, 999)])
def test_ranks_are_exact_where_they_are_whole(percentile: Percentile, rank: int) -> None:
    assert nearest_rank(range(1, 1001), percentile) == rank


def test_distribution_matches_numpy_and_knows_its_limits() -> None:
    sample = np.random.default_rng(1).lognormal(size=1000)
    distribution = Distribution.of(sample)
    assert distribution is not None
    assert distribution.count == 1000
    assert distribution.mean == pytest.approx(sample.mean())
    assert (distribution.minimum, distribution.maximum) == (sample.min(), sample.max())
    assert distribution.percentiles[Percentile.p99] == np.sort(sample)[989]
    assert distribution.too_few_samples_for == (Percentile.p99_9,)


@pytest.mark.parametrize(("percentile", "needed"), [
    (Percentile.p50, 20), (Percentile.p90, 100), (Percentile.p99, 1000), (Percentile.p99_9, 10_000)])
def test_ten_samples_must_lie_beyond_a_percentile(percentile: Percentile, needed: int) -> None:
    enough, too_few = Distribution.of([1.0] * needed), Distribution.of([1.0] * (needed - 1))
    assert enough is not None
    assert too_few is not None
    assert percentile not in enough.too_few_samples_for
    assert percentile in too_few.too_few_samples_for


def test_empty_sample_has_no_distribution() -> None:
    assert Distribution.of([]) is None
    with pytest.raises(ValueError, match="empty"):
        nearest_rank([], Percentile.p50)
