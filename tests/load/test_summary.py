"""The figures of a run, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load.hand_made import failed, record
from servekit.config.bench import SloConfig
from servekit.load.percentiles import Percentile
from servekit.load.records import RequestRecord
from servekit.load.summary import LAG_LIMIT_S, Summary, summarise
from servekit.load.target import FailureKind


def summary(*records: RequestRecord, is_open_loop: bool = True, **slo: float) -> Summary:
    return summarise(records, SloConfig(**slo), is_open_loop)


def test_latencies_leave_out_failures_and_warmup() -> None:
    result = summary(record(0, 0.0, [50.0, 60.0], is_warmup=True), record(1, 1.0, [2.0, 2.5, 4.0]), failed(2, 1.0, 1.1),
                     record(3, 2.0, [5.0]))
    latencies = result.latencies
    assert latencies.ttft_s is not None
    assert (latencies.ttft_s.count, latencies.ttft_s.minimum, latencies.ttft_s.maximum) == (2, 1.0, 3.0)
    assert latencies.tpot_s is not None
    assert (latencies.tpot_s.count, latencies.tpot_s.mean) == (1, 1.0), "a single token has no TPOT"
    assert latencies.itl_s is not None
    assert (latencies.itl_s.count, latencies.itl_s.maximum) == (2, 1.5)
    assert latencies.max_itl_s is not None
    assert latencies.max_itl_s.percentiles[Percentile.p50] == 1.5
    counts = result.counts
    assert (counts.warmup, counts.succeeded, counts.failed, counts.interrupted) == (1, 2, 1, 0)
    assert counts.failures == {FailureKind.status: 1}


def test_throughput_is_over_the_window_from_first_intended_send_to_last_end() -> None:
    result = summary(record(0, 1.0, [2.0, 3.0]), record(1, 2.0, [10.0, 11.0, 12.0]), failed(2, 3.0, 21.0))
    assert result.throughput is not None
    assert result.throughput.window_s == 20.0
    assert result.throughput.requests_per_s == 2 / 20
    assert result.throughput.output_tokens_per_s == 5 / 20
    assert result.throughput.total_tokens_per_s == 25 / 20


def test_goodput_counts_a_failure_as_a_miss() -> None:
    result = summary(record(0, 0.0, [1.0]), record(1, 0.0, [2.0]), failed(2, 0.0, 4.0), ttft_s=1.0)
    assert result.goodput is not None
    assert result.goodput.share == pytest.approx(1 / 3)
    assert result.goodput.requests_per_s == 1 / 4


def test_goodput_needs_an_objective() -> None:
    assert summary(record(0, 0.0, [1.0])).goodput is None


def test_interrupted_requests_count_for_nothing() -> None:
    result = summary(record(0, 0.0, [1.0]), failed(1, 0.5, 9.0, FailureKind.interrupted), ttft_s=1.0)
    assert (result.counts.measured, result.counts.failed, result.counts.interrupted) == (1, 0, 1)
    assert result.goodput is not None
    assert result.goodput.share == 1.0


def test_littles_law_holds_in_a_steady_state() -> None:
    # A request every second that takes 2.5 s: 2.5 in the system on average, but for the start.
    result = summary(*(record(i, float(i), [i + 2.5]) for i in range(1000)))
    law = result.littles_law
    assert law is not None
    assert (law.rate_per_s, law.mean_time_s, law.predicted) == (1.0, 2.5, 2.5)
    assert law.mean_in_system == pytest.approx(2.5, rel=0.01)


def test_littles_law_fails_when_the_queue_grows() -> None:
    result = summary(*(record(i, float(i), [3.0 * (i + 1)]) for i in range(1000)))
    law = result.littles_law
    assert law is not None
    assert law.mean_in_system < 0.8 * law.predicted


def test_littles_law_says_nothing_of_a_run_shorter_than_its_requests() -> None:
    assert summary(record(0, 0.0, [5.0]), record(1, 0.1, [5.0])).littles_law is None


def test_lag_is_judged_in_an_open_loop_only() -> None:
    late = [record(i, float(i), [i + 1.0], sent_s=i + 2 * LAG_LIMIT_S) for i in range(10)]
    assert summary(*late).is_generator_late
    assert not summary(*late, is_open_loop=False).is_generator_late
    assert not summary(*(record(i, float(i), [i + 1.0]) for i in range(10))).is_generator_late


def test_short_answers_and_cached_tokens_are_counted() -> None:
    result = summary(record(0, 0.0, [1.0, 2.0], wanted_output_tokens=5, cached_tokens=8), record(1, 0.0, [1.0]))
    assert result.counts.short == 1
    assert result.lengths is not None
    assert (result.lengths.prompt_tokens, result.lengths.output_tokens) == (10.0, 1.5)
    assert result.lengths.cached_share == 8 / 20


def test_figures_by_tenant_and_by_class() -> None:
    result = summary(record(0, 0.0, [1.0, 2.0], tenant="a", priority=0), record(1, 0.0, [3.0, 5.0], tenant="b"),
                     record(2, 0.0, [4.0], tenant="a", priority=1, is_warmup=True),
                     replace(failed(3, 0.0, 1.0), tenant="a", priority=0), record(4, 0.0, [1.0]), ttft_s=1.0)
    assert list(result.tenants) == ["a", "b"]
    assert list(result.classes) == [0]
    a, b = result.tenants["a"], result.tenants["b"]
    assert (a.succeeded, a.failed, a.prompt_tokens, a.output_tokens, a.good_share) == (1, 1, 10, 2, 0.5)
    assert a.ttft_s is not None and a.tpot_s is not None and a.e2e_s is not None
    assert (a.ttft_s.mean, a.tpot_s.mean, a.e2e_s.mean) == (1.0, 1.0, 2.0)
    assert (b.succeeded, b.failed, b.good_share) == (1, 0, 0.0)
    assert summary(record(0, 0.0, [1.0], tenant="a")).tenants["a"].good_share is None
    assert summary(record(0, 0.0, [1.0])).tenants == {}


def test_a_run_without_a_success_has_no_figures() -> None:
    result = summary(failed(0, 0.0, 2.0), ttft_s=1.0)
    assert result.latencies.ttft_s is None
    assert result.goodput is not None
    assert result.goodput.share == 0.0
    assert result.lengths is None
    assert result.counts.failed == 1
    nothing = summary()
    assert (nothing.throughput, nothing.goodput, nothing.littles_law, nothing.lag_s) == (None, None, None, None)
