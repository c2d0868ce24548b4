"""What a person reads after a run, from records made by hand."""

from __future__ import annotations

import io

from rich.console import Console

from load.hand_made import failed, record
from servekit.config.bench import BenchConfig, SloConfig
from servekit.load.openai import ServerFacts
from servekit.load.records import RequestRecord
from servekit.load.report import Run, count_failures, print_report
from servekit.load.summary import summarise
from servekit.load.target import FailureKind


def printed(*records: RequestRecord, slo: SloConfig | None = None, is_interrupted: bool = False) -> str:
    config = BenchConfig(slo=slo or SloConfig())
    run = Run("m at somewhere", config, 7, "2026-01-01T00:00:00+00:00", is_interrupted, ServerFacts("m"),
              summarise(records, config.slo, is_open_loop=True), count_failures(records))
    output = io.StringIO()
    print_report(run, Console(file=output, width=80))
    return output.getvalue()


def steady(number: int, lag_s: float = 0.0) -> list[RequestRecord]:
    """A request a second, each with its first token after 1 s and its last after 2.5 s."""
    return [record(i, float(i), [i + 1.0, i + 2.5], sent_s=i + lag_s) for i in range(number)]


def test_a_good_run_has_figures_and_no_warning() -> None:
    output = printed(*steady(1000), slo=SloConfig(ttft_s=1.0))
    assert "1000 requests measured: 1000 succeeded, 0 failed" in output
    assert "mean prompt 10 tokens, mean output 2 tokens" in output
    assert "goodput: 100.0% of the requests meet the SLO" in output
    assert "Little's law: 2.50 requests in the system on average; 1.000 req/s x 2.500 s = 2.50" in output
    assert "1,000.0 " in output, "TTFT in milliseconds"
    assert "1,000.0*" in output, "p99.9 of 1,000 requests is marked"
    assert "p99.9 needs 10,000 samples" in output
    assert "warning" not in output


def test_figures_that_are_not_to_be_trusted_say_so() -> None:
    assert "the load generator was late: p99 20.0 ms exceeds 10.0 ms" in printed(*steady(50, lag_s=0.02))
    assert "ended by hand" in printed(*steady(50), is_interrupted=True)
    assert "1 answers were shorter than asked for" in printed(
        *steady(50), record(50, 50.0, [51.0], wanted_output_tokens=9))
    growing = [record(i, float(i), [3.0 * (i + 1)]) for i in range(50)]
    assert "Little's law does not hold within 20%" in printed(*growing)


def test_failures_are_counted_by_cause() -> None:
    output = printed(*steady(5), *(failed(i, 5.0, 6.0) for i in range(5, 8)),
                     failed(8, 5.0, 6.0, FailureKind.connection), failed(9, 5.0, 9.0, FailureKind.interrupted))
    assert "8 requests measured" not in output
    assert "9 requests measured: 5 succeeded, 4 failed; left out: 0 for warm-up, 1 interrupted" in output
    assert "failed 3 x status 503: no" in output
    assert "failed 1 x connection" in output


def test_a_run_in_which_nothing_succeeded_is_still_reported() -> None:
    output = printed(failed(0, 0.0, 1.0), slo=SloConfig(ttft_s=1.0))
    assert "1 requests measured: 0 succeeded, 1 failed" in output
    assert "goodput: 0.0%" in output


def test_tenants_and_classes_have_a_line_each() -> None:
    rows = [record(i, float(i), [i + 1.0 + i % 2, i + 2.5], tenant=f"tenant-{i % 2}", priority=i % 3)
            for i in range(30)]
    output = printed(*rows, slo=SloConfig(ttft_s=1.0))
    lines = [line.split() for line in output.splitlines()]
    assert ["tenant-0", "15", "0", "1,000.0*", "1,000.0*", "1,500.0*", "30", "100.0%"] in lines
    assert ["tenant-1", "15", "0", "2,000.0*", "2,000.0*", "500.0*", "30", "0.0%"] in lines
    assert ["0", "10", "0", "1,000.0*", "2,000.0*", "1,500.0*", "20", "50.0%"] in lines


def test_only_the_largest_tenants_are_shown() -> None:
    rows = [record(i, float(i), [i + 1.0] * (1 if i < 5 else 2), tenant=f"tenant-{i:02}") for i in range(25)]
    output = printed(*rows)
    assert "tenant-04" not in output and "tenant-05" in output and "tenant-24" in output
    assert "and 5 other tenants; out=FILE lists them all" in output
