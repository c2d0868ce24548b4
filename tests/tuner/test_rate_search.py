"""The search for the highest rate that holds, against configurations whose true threshold is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.tuner.rate_search import HOLDING_SHARE, LOSING_SHARE, NARROWING_SHARE, Allowance, RateSearch
from servekit.tuner.slo import parse_slo

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


@given(incumbent_per_s=RATES, usual_per_s=RATES, threshold_per_s=RATES)
def test_a_low_incumbent_is_a_floor_and_not_the_start(incumbent_per_s: float, usual_per_s: float,
                                                      threshold_per_s: float) -> None:
    """Whatever holds more than the incumbent is found to; whatever holds less is told after a few runs."""
    search = RateSearch.against(incumbent_per_s, usual_per_s, Allowance())
    tried = run(search, lambda rate: rate <= threshold_per_s)
    is_far = usual_per_s > incumbent_per_s * search.factor ** 4
    assert tried[0] == (pytest.approx((incumbent_per_s * usual_per_s) ** 0.5) if is_far else incumbent_per_s)
    assert search.held_per_s <= threshold_per_s
    if threshold_per_s >= incumbent_per_s and usual_per_s < 1000 * incumbent_per_s:
        assert search.held_per_s >= incumbent_per_s
    if threshold_per_s < incumbent_per_s:
        assert len(tried) <= search.max_runs and all(rate <= search.start_per_s for rate in tried)
    for count, (before, after) in enumerate(pairwise(tried), 1):
        assert after <= before or min(tried[:count]) <= threshold_per_s, "it goes up without having held"
        assert not before > incumbent_per_s > after, "the incumbent's rate is passed by"


def test_what_beats_a_low_incumbent_is_known_as_well_as_ever() -> None:
    search = RateSearch.against(0.25, 4.0, Allowance())
    tried = run(search, lambda rate: rate <= 0.6)
    assert tried[:3] == pytest.approx([1.0, 1 / 1.69, 0.7692307692307692]) and len(tried) > search.max_losing_runs
    assert search.held_per_s <= 0.6 < search.held_per_s * (1 + search.tolerance)


def test_a_new_best_counts_only_if_it_holds_again() -> None:
    """2.6 held once by luck. What is found below it is tried again as well."""
    search = RateSearch(2.0, incumbent_per_s=2.0, proves_best=True)
    luck = iter((True, True, False, False, False, False, False, True, True))
    tried = run(search, lambda rate: next(luck))
    assert tried[:3] == pytest.approx([2.0, 2.6, 2.6 * 1.69])
    assert tried[6] == tried[1] == search.failed_per_s, "narrowed down first"
    assert tried[7:] == pytest.approx([(2.0 * 2.6) ** 0.5] * 2) and search.held_per_s == tried[7]


@given(incumbent_per_s=RATES, usual_per_s=RATES, answers=st.lists(st.booleans(), max_size=30))
def test_whatever_beats_the_incumbent_has_held_twice_and_failed_nowhere_below(
        incumbent_per_s: float, usual_per_s: float, answers: list[bool]) -> None:
    search, told = RateSearch.against(incumbent_per_s, usual_per_s, Allowance()), Counter[float]()
    luck = iter(answers)
    failed = []

    def holds(rate_per_s: float) -> bool:
        does = next(luck, True)
        told[rate_per_s] += does
        failed.extend([] if does else [rate_per_s])
        return does

    run(search, holds)
    assert all(rate > search.held_per_s for rate in failed)
    if search.held_per_s > incumbent_per_s:
        assert told[search.held_per_s] == 2


def test_there_is_no_proof_without_time_for_it() -> None:
    """30 s for a run that holds at 2.0, 23 for one at 2.6 and one that fails soon; another at 2.6 fits into 100 s."""
    tried, _ = run_in_time(proving(most_s=100.0), 3.0, 1.0)
    assert tried == pytest.approx([2.0, 2.6, 2.6 * 1.69, 2.6])
    tried, _ = run_in_time(proving(most_s=70.0), 3.0, 1.0)
    assert tried == pytest.approx([2.0, 2.6, 2.6 * 1.69])


def proving(most_s: float) -> RateSearch:
    allowance = Allowance(losing_s=10.0, narrowing_s=40.0, most_s=most_s, requests_to_fail=4, requests_to_hold=60)
    return RateSearch(2.0, proves_best=True, allowance=allowance)


def test_where_a_proof_fails_lower_rates_are_tried_in_the_time_of_one_that_holds() -> None:
    """2.0 held, and took more than what one that loses may take; then it failed."""
    search = proving(most_s=300.0)
    for expected, holds, took_s in ((2.0, True, 30.0), (2.6, False, 20.0), (2.0, False, 25.0)):
        assert search.next_rate() == pytest.approx(expected)
        search.tell(expected, holds, took_s)
    assert search.held_per_s == 0 and search.losing_left_s == inf and not search.is_out_of_time
    assert search.next_rate() == pytest.approx(2.0 / 1.69)
    search.tell(2.0 / 1.69, True, 50.0)
    assert search.held_per_s == pytest.approx(2.0 / 1.69) and search.next_rate() == search.held_per_s


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


# --- what it may take -------------------------------------------------------------------------------------------------

SLO = parse_slo({"ttft": {"p90": "1s"}, "tpot": {"p95": "50ms"}})
NUM_REQUESTS, WARMUP_REQUESTS = 100, 3
TO_FAIL, TO_HOLD = WARMUP_REQUESTS + 6, WARMUP_REQUESTS + 95
"""Of a hundred requests five may miss at p95, the stricter of the two."""


def allowance_of(search_s: float) -> Allowance:
    return Allowance.of(search_s, SLO, NUM_REQUESTS, WARMUP_REQUESTS)


def run_in_time(search: RateSearch, threshold_per_s: float, slowness: float) -> tuple[list[float], list[float]]:
    """Rates and the times they took: as short as a run can be, times `slowness`; those given up were cut in time."""
    tried, took = list[float](), list[float]()
    while (rate_per_s := search.next_rate()) is not None:
        holds = rate_per_s <= threshold_per_s
        needed_s = search.allowance.shortest_s(rate_per_s, holds) * slowness
        took.append(needed_s if holds else min(needed_s, max(0.0, search.losing_left_s)))
        tried.append(rate_per_s)
        search.tell(rate_per_s, holds, took[-1])
    return tried, took


def test_an_allowance_is_a_share_of_the_search_and_knows_the_stricter_promise() -> None:
    allowance = allowance_of(720.0)
    assert (allowance.losing_s, allowance.narrowing_s, allowance.most_s) == (
        720 * LOSING_SHARE, 720 * NARROWING_SHARE, 720 * HOLDING_SHARE)
    assert (allowance.requests_to_fail, allowance.requests_to_hold) == (TO_FAIL, TO_HOLD)
    assert allowance.shortest_s(2.0, holds=False) == TO_FAIL / 2 < allowance.shortest_s(2.0, holds=True) == TO_HOLD / 2
    assert allowance.lowest_per_s == TO_HOLD / 360


@given(start_per_s=RATES, search_s=st.floats(1.0, 1e4), slowness=st.floats(1.0, 20.0))
def test_what_holds_nowhere_takes_no_more_than_its_share(start_per_s: float, search_s: float, slowness: float) -> None:
    """The slower its runs, the fewer of them there are; a run that looks like a failure is given up in time."""
    search = RateSearch(start_per_s, max_losing_runs=60, max_runs=60, allowance=allowance_of(search_s))
    tried, took = run_in_time(search, 0.0, slowness)
    assert tried[0] == start_per_s and sum(took) <= search.allowance.losing_s * (1 + 1e-9)
    assert all(rate >= search.allowance.lowest_per_s for rate in tried[1:])
    begun_s = accumulate(took[:-1])
    assert all(before_s + TO_FAIL / rate <= search.allowance.losing_s
               for before_s, rate in zip(begun_s, tried[1:], strict=True)), "none is begun that cannot end in time"
    assert search.held_per_s == 0 and search.is_out_of_time
    assert sum(took) + TO_FAIL / search.lower_per_s > search.allowance.losing_s \
        or search.lower_per_s < search.allowance.lowest_per_s * (1 + 1e-9) \
        or sum(took) + TO_HOLD / search.lower_per_s > search.allowance.most_s, "one more would have been allowed"


@given(start_per_s=RATES, threshold_per_s=RATES, search_s=st.floats(1.0, 1e4))
def test_nobody_takes_more_than_the_most_but_for_the_first_run(start_per_s: float, threshold_per_s: float,
                                                               search_s: float) -> None:
    search = RateSearch(start_per_s, allowance=allowance_of(search_s))
    tried, took = run_in_time(search, threshold_per_s, 1.0)
    assert tried[0] == start_per_s and sum(took[1:]) <= search.allowance.most_s
    assert len(tried) == 1 or sum(took) <= search.allowance.most_s * (1 + 1e-9)
    assert search.held_per_s <= threshold_per_s


@given(start_per_s=st.floats(1.0, 1000.0), ratio=st.floats(1.0, 5.0))
def test_time_enough_changes_nothing(start_per_s: float, ratio: float) -> None:
    """Eight runs at the first rate fit into the time for narrowing."""
    allowance = allowance_of(8 * TO_HOLD / NARROWING_SHARE)
    unlimited, limited = RateSearch(start_per_s), RateSearch(start_per_s, allowance=allowance)
    assert run_in_time(limited, start_per_s * ratio, 1.0)[0] == run(
        unlimited, lambda rate: rate <= start_per_s * ratio)
    assert not limited.is_out_of_time


def test_a_hopeless_configuration_of_a_short_budget() -> None:
    """Twelve minutes, two fifths of them for the confirmation; each run twice as long as it must be to fail."""
    search = RateSearch(2.9, max_losing_runs=6, allowance=allowance_of(12 * 60 * 0.6))
    tried, took = run_in_time(search, 0.0, 2.0)
    assert len(tried) == 3 and sum(took) <= 43.2 and search.is_out_of_time
    assert search.lowest_tried_per_s == min(tried) > search.allowance.lowest_per_s


def test_having_lost_within_the_runs_allowed_is_no_want_of_time() -> None:
    """There is time for three runs, and not for a fourth."""
    three, four = (RateSearch(100.0, max_losing_runs=count, allowance=allowance_of(10.0)) for count in (3, 4))
    assert len(run_in_time(three, 0.0, 1.0)[0]) == len(run_in_time(four, 0.0, 1.0)[0]) == 3
    assert not three.is_out_of_time and four.is_out_of_time


def test_the_way_up_takes_longer_steps_after_the_first() -> None:
    assert run(RateSearch(1.0), lambda rate: rate < 5.0)[:5] == pytest.approx([1, 1.3, 1.3 ** 3, 1.3 ** 5, 1.3 ** 7])


@given(start_per_s=RATES, ratio=st.floats(1.0, 20.0), search_s=st.floats(1.0, 1e4))
def test_the_way_up_may_take_longer_than_the_narrowing(start_per_s: float, ratio: float, search_s: float) -> None:
    search = RateSearch(start_per_s, allowance=allowance_of(search_s))
    tried, took = run_in_time(search, start_per_s * ratio, 1.0)
    num_up = next((place + 1 for place, rate in enumerate(tried) if rate > start_per_s * ratio), len(tried))
    assert num_up == len(tried) or sum(took) <= search.allowance.narrowing_s
    assert num_up == 1 or sum(took[:num_up]) <= search.allowance.most_s
    if search.failed_per_s is None and len(tried) < search.max_runs:
        assert sum(took) + TO_HOLD / (search.held_per_s * search.factor ** min(len(tried), 2)) > search.allowance.most_s
