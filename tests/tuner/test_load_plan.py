"""The load of a run: its rate, its seed, and that no two runs have a prompt in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from servekit.config.bench import (
    ArrivalConfig,
    AzureWorkloadConfig,
    BenchConfig,
    ClosedArrivalConfig,
    FixedArrivalConfig,
    FixedWorkloadConfig,
    GammaArrivalConfig,
    LognormalWorkloadConfig,
    PoissonArrivalConfig,
    SharedPrefixWorkloadConfig,
    TraceArrivalConfig,
    WorkloadConfig,
)
from servekit.config.errors import ConfigError
from servekit.load.workload import WorkloadRequest
from servekit.tuner.load_plan import LoadPlan

VOCAB_SIZE = 5000
FIXED = FixedWorkloadConfig(prompt_tokens=32, output_tokens=4)


def plan_of(workload: WorkloadConfig = FIXED, arrival: ArrivalConfig | None = None, seed: int = 1) -> LoadPlan:
    bench = BenchConfig(workload=workload, arrival=arrival or PoissonArrivalConfig())
    return LoadPlan(bench, seed, warmup_requests=3, timeout_s=60.0)


def requests_of(plan: LoadPlan, rate_per_s: float = 2.0, num_requests: int = 20, stream: str = "a"
                ) -> list[WorkloadRequest]:
    return list(plan.load(rate_per_s, num_requests, stream, VOCAB_SIZE).requests)


def span_s(requests: list[WorkloadRequest]) -> float:
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    assert first_s is not None and last_s is not None
    return last_s - first_s


def write_trace(path: Path, count: int) -> AzureWorkloadConfig:
    rows = (f"2024-05-10 00:00:{i // 2:02}.{5 * (i % 2)}00000,{20 + i},{3 + i % 4}" for i in range(count))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return AzureWorkloadConfig(path=str(path))


@pytest.mark.parametrize("arrival", [PoissonArrivalConfig(), GammaArrivalConfig(), FixedArrivalConfig()])
def test_the_rate_is_the_one_that_was_asked_for(arrival: ArrivalConfig) -> None:
    requests = requests_of(plan_of(arrival=arrival), rate_per_s=5.0, num_requests=4000)
    assert (len(requests) - 1) / span_s(requests) == pytest.approx(5.0, rel=0.15)


def test_a_run_has_its_requests_and_the_warm_up() -> None:
    load = plan_of().load(2.0, 20, "a", VOCAB_SIZE)
    assert (load.num_requests, load.warmup_requests, len(list(load.requests))) == (20, 3, 23)


def test_equal_streams_are_equal_and_a_rate_only_stretches_the_times() -> None:
    plan = plan_of(LognormalWorkloadConfig())
    slow, fast = requests_of(plan, rate_per_s=1.0), requests_of(plan, rate_per_s=4.0)
    assert slow == requests_of(plan, rate_per_s=1.0)
    for before, after in zip(slow, fast, strict=True):
        assert before.arrival_s is not None and after.arrival_s is not None
        assert after.arrival_s == pytest.approx(before.arrival_s / 4)
        assert replace(before, arrival_s=after.arrival_s) == after


@pytest.mark.parametrize("workload", [
    FIXED, SharedPrefixWorkloadConfig(num_prefixes=2, prefix_tokens=32, suffix_tokens=16, output_tokens=4)])
def test_different_streams_share_no_beginning_of_a_prompt(workload: WorkloadConfig) -> None:
    plan = plan_of(workload)
    beginnings = [{tuple(request.prompt_token_ids[:8]) for request in requests_of(plan, stream=stream)}
                  for stream in ("trial 1 run 0", "trial 1 run 1", "trial 11 run 0", "held out 1")]
    beginnings.append({tuple(request.prompt_token_ids[:8]) for request in requests_of(replace(plan, seed=2))})
    assert len(set().union(*beginnings)) == sum(map(len, beginnings))


def test_a_trace_is_replayed_at_another_rate(tmp_path: Path) -> None:
    plan = plan_of(write_trace(tmp_path / "trace.csv", 41), TraceArrivalConfig())
    assert plan.trace_rate_per_s() == pytest.approx(2.0)
    requests = requests_of(plan, rate_per_s=8.0, num_requests=38)
    assert span_s(requests) == pytest.approx(40 / 8.0)
    assert [len(request.prompt_token_ids) for request in requests[:3]] == [20, 21, 22]


def test_only_a_trace_has_an_end(tmp_path: Path) -> None:
    assert plan_of().available is None
    assert plan_of(write_trace(tmp_path / "trace.csv", 41), TraceArrivalConfig()).available == 41 - 3


def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two requests at different times"):
        plan_of(write_trace(tmp_path / "trace.csv", 1), TraceArrivalConfig()).at_rate(1.0)


def test_a_closed_loop_has_no_rate() -> None:
    with pytest.raises(ConfigError, match=r"workload\.arrival=closed: has no rate"):
        plan_of(arrival=ClosedArrivalConfig(concurrency=4)).at_rate(1.0)


def test_only_workloads_with_prefixes_share_them() -> None:
    assert not plan_of().load(1.0, 1, "a", VOCAB_SIZE).shares_prefixes
    assert plan_of(SharedPrefixWorkloadConfig()).load(1.0, 1, "a", VOCAB_SIZE).shares_prefixes


def test_the_longest_request_counts_prompt_and_output(tmp_path: Path) -> None:
    assert plan_of().longest_tokens(10) == 36
    trace = write_trace(tmp_path / "trace.csv", 12)
    assert plan_of(trace, TraceArrivalConfig()).longest_tokens(100) == max(20 + i + 3 + i % 4 for i in range(12))


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload\.vocab_low"):
        plan_of().load(1.0, 1, "a", vocab_size=1)
