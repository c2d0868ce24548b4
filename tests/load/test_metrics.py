"""The definitions of the latencies, on timelines made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config.bench import SloConfig
from servekit.load.metrics import Timeline, e2e_s, itl_s, meets, spread_tokens, tpot_s, ttft_s

TIMELINE = Timeline(arrived_s=10.0, token_times_s=[12.0, 12.5, 13.5, 14.0], finished_s=14.25)


def test_definitions() -> None:
    assert ttft_s(TIMELINE) == 2.0
    assert tpot_s(TIMELINE) == pytest.approx((14.0 - 12.0) / 3)
    assert itl_s(TIMELINE) == [0.5, 1.0, 0.5]
    assert e2e_s(TIMELINE) == 4.25


def test_single_token_has_no_tpot_and_no_itl() -> None:
    single = Timeline(0.0, [1.0], 1.5)
    assert tpot_s(single) is None
    assert itl_s(single) == []
    assert meets(single, SloConfig(tpot_s=0.001, itl_s=0.001))


def test_timeline_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one output token"):
        Timeline(0.0, [], 1.0)


@pytest.mark.parametrize(("slo", "met"), [
    (SloConfig(), True),
    (SloConfig(ttft_s=2.0), True), (SloConfig(ttft_s=1.99), False),
    (SloConfig(tpot_s=0.67), True), (SloConfig(tpot_s=0.66), False),
    (SloConfig(itl_s=1.0), True), (SloConfig(itl_s=0.99), False),
    (SloConfig(e2e_s=4.25), True), (SloConfig(e2e_s=4.24), False),
    (SloConfig(ttft_s=2.0, e2e_s=4.24), False),
])
def test_slo_is_met_when_every_limit_is(slo: SloConfig, met: bool) -> None:
    assert meets(TIMELINE, slo) is met


def test_tokens_of_a_chunk_are_spread_over_the_gap_before_it() -> None:
    assert spread_tokens([1.0, 1.04, 1.08], [4, 4, 1]) == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 1.01, 1.02, 1.03, 1.04, 1.08])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=20))
def test_spreading_keeps_count_order_first_and_last(chunks: list[tuple[float, int]]) -> None:
    times, counts = sorted(at for at, _ in chunks), [count for _, count in chunks]
    tokens = spread_tokens(times, counts)
    assert len(tokens) == sum(counts)
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (times[0], times[-1])
    timeline = Timeline(0.0, tokens, times[-1])
    if len(tokens) > 1:
        assert sum(itl_s(timeline)) == pytest.approx((tpot_s(timeline) or 0.0) * (len(tokens) - 1))
