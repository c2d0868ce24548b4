"""The search for the highest rate that holds, against configurations whose true threshold is known."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from servekit.tuner.rate_search import RateSearch

RATES = st.floats(0.01, 1000.0)


def run(search: RateSearch, holds: Callable[[float], bool]) -> list[float]:
    """The rates that were tried."""
    tried = []
    while (rate_per_s := search.next_rate()) is not None:
        assert len(tried) < 100, "it does not end"
        tried.append(rate_per_s)
        search.tell(rate_per_s, holds(rate_per_s))
    return tried


def with_runs_enough(start_per_s: float) -> RateSearch:
    return RateSearch(start_per_s, max_runs=60, max_losing_runs=60)


@given(start_per_s=RATES, threshold_per_s=RATES)
def test_the_threshold_is_found_within_the_tolerance(start_per_s: float, threshold_per_s: float) -> None:
    search = with_runs_enough(start_per_s)
    run(search, lambda rate: rate <= threshold_per_s)
    assert 0 < search.held_per_s <= threshold_per_s < search.held_per_s * (1 + search.tolerance)
    assert search.failed_per_s is not None and search.failed_per_s > threshold_per_s


@given(start_per_s=RATES, ratio=st.floats(1.0, 5.0))
def test_what_beats_the_incumbent_is_known_within_the_runs_allowed(start_per_s: float, ratio: float) -> None:
    """A threshold of up to five times the incumbent's rate; a longer way costs precision, never a wrong answer."""
    search = RateSearch(start_per_s)
    tried = run(search, lambda rate: rate <= start_per_s * ratio)
    assert len(tried) <= search.max_runs and tried[0] == start_per_s
    assert start_per_s <= search.held_per_s <= start_per_s * ratio < search.held_per_s * search.factor


@given(start_per_s=RATES, share=st.floats(0.0, 0.999))
def test_a_loser_ends_early(start_per_s: float, share: float) -> None:
    search = RateSearch(start_per_s)
    tried = run(search, lambda rate: rate <= start_per_s * share)
    assert len(tried) <= search.max_losing_runs
    assert search.held_per_s <= start_per_s * share
    assert search.lowest_tried_per_s == min(tried)


def test_what_holds_nowhere_has_rate_0_and_the_lowest_rate_is_remembered() -> None:
    search = RateSearch(8.0)
    tried = run(search, lambda rate: False)
    assert search.held_per_s == 0.0 and tried == sorted(tried, reverse=True)
    assert search.lowest_tried_per_s == tried[-1] < 8.0


def test_what_never_fails_ends_with_its_runs() -> None:
    search = RateSearch(1.0)
    tried = run(search, lambda rate: True)
    assert len(tried) == search.max_runs
    assert search.failed_per_s is None and search.held_per_s == tried[-1]


def test_the_bracket_is_left_when_a_failure_contradicts_it() -> None:
    search = RateSearch(10.0)
    search.tell(10.0, holds=True)
    search.tell(10.0, holds=False)
    assert search.held_per_s == 0.0 and search.failed_per_s == 10.0
    following = search.next_rate()
    assert following is not None and following < 10.0


def test_a_success_above_a_failure_is_not_believed() -> None:
    search = RateSearch(10.0)
    search.tell(10.0, holds=False)
    search.tell(12.0, holds=True)
    assert search.held_per_s == 0.0


@given(start_per_s=RATES, answers=st.lists(st.booleans(), min_size=20, max_size=20))
def test_whatever_it_is_told_it_ends_and_never_claims_a_rate_at_which_something_failed(
        start_per_s: float, answers: list[bool]) -> None:
    search, told = RateSearch(start_per_s), list[tuple[float, bool]]()
    for holds in answers:
        rate_per_s = search.next_rate()
        if rate_per_s is None:
            break
        told.append((rate_per_s, holds))
        search.tell(rate_per_s, holds)
    assert search.next_rate() is None and len(told) <= search.max_runs
    failed = [rate for rate, holds in told if not holds]
    assert search.held_per_s == 0 or (search.held_per_s, True) in told
    assert all(rate > search.held_per_s for rate in failed)
