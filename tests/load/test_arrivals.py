"""When requests are due: rate, burstiness, reproducibility."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from servekit.config.bench import (
    ArrivalConfig,
    ClosedArrivalConfig,
    FixedArrivalConfig,
    GammaArrivalConfig,
    PoissonArrivalConfig,
    TraceArrivalConfig,
)
from servekit.load.arrivals import arrival_times_s, schedule
from servekit.load.workload import WorkloadRequest


def times(arrival: ArrivalConfig, number: int = 20_000, seed: int = 1) -> list[float]:
    return list(islice(arrival_times_s(arrival, seed), number))


def requests(*arrivals_s: float | None) -> list[WorkloadRequest]:
    return [WorkloadRequest(i, [1], 1, at_s) for i, at_s in enumerate(arrivals_s)]


@pytest.mark.parametrize(("arrival", "cv"), [
    (PoissonArrivalConfig(rate_per_s=4.0), 1.0),
    (GammaArrivalConfig(rate_per_s=4.0, gap_cv=0.3), 0.3),
    (GammaArrivalConfig(rate_per_s=4.0, gap_cv=1.0), 1.0),
    (GammaArrivalConfig(rate_per_s=4.0, gap_cv=2.5), 2.5),
])
def test_mean_and_variation_of_the_gaps(arrival: ArrivalConfig, cv: float) -> None:
    gaps = np.diff(times(arrival))
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    assert (gaps >= 0).all()


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(times(PoissonArrivalConfig(rate_per_s=4.0)))
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_fixed_gaps_are_equal_and_start_at_once() -> None:
    assert times(FixedArrivalConfig(rate_per_s=4.0), 4) == [0.0, 0.25, 0.5, 0.75]


def test_seed_decides_the_times() -> None:
    arrival = GammaArrivalConfig(rate_per_s=4.0)
    assert times(arrival, 100, seed=1) == times(arrival, 100, seed=1)
    assert times(arrival, 100, seed=1) != times(arrival, 100, seed=2)


def test_trace_times_are_scaled_and_kept_in_order() -> None:
    scheduled = schedule(requests(0.0, 1.0, 1.0, 5.0), TraceArrivalConfig(rate_scale=2.0), seed=0)
    assert [(r.index, r.arrival_s) for r in scheduled] == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 2.5)]


def test_trace_times_need_a_trace() -> None:
    with pytest.raises(TypeError, match="without times"):
        list(schedule(requests(None), TraceArrivalConfig(), seed=0))


def test_synthetic_times_replace_those_of_a_trace() -> None:
    scheduled = schedule(requests(0.0, 100.0, 200.0), FixedArrivalConfig(rate_per_s=2.0), seed=0)
    assert [r.arrival_s for r in scheduled] == [0.0, 0.5, 1.0]


def test_closed_loop_has_no_times() -> None:
    assert [r.arrival_s for r in schedule(requests(0.0, 1.0), ClosedArrivalConfig(), seed=0)] == [None, None]
