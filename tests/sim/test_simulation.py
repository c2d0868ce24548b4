"""The virtual clock: exact times on small cases, laws that hold whatever the case."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.config.admission import OnDemandAdmissionConfig, Reserve, WorstCaseAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig, StaticBatchingConfig
from servekit.config.bench import LognormalWorkloadConfig, PoissonArrivalConfig, SloConfig
from servekit.config.policy import LpmPolicyConfig
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig, WholePrefillConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan
from servekit.load.arrivals import schedule
from servekit.load.driver import Limits
from servekit.load.records import RequestRecord
from servekit.load.summary import ExactSample, RoundedSample, Tally, summarise
from servekit.load.workload import ConfiguredWorkload, Vocabulary, WorkloadRequest
from servekit.sim.simulation import Simulation
from servekit.sim.step_time import StepShape


@dataclass(frozen=True)
class LinearStepTime:
    """A step costs a constant and so much a token."""

    step_cost_s: float = 0.01
    token_cost_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        return self.step_cost_s + shape.num_tokens * self.token_cost_s


def config(**settings: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 16, "max_step_tokens": 128,  # type: ignore[arg-type]
                              "prefill": ChunkedPrefillConfig(chunk_tokens=None)} | settings)


def run(requests: Iterator[WorkloadRequest] | Sequence[WorkloadRequest], *, scheduler: SchedulerConfig | None = None,
        step_time: LinearStepTime | None = None, num_blocks: int = 4096, **limits: object) -> list[RequestRecord]:
    engine = build_scheduler(scheduler or config(), num_blocks, 16, 4096)
    simulation = Simulation(requests, engine, step_time or LinearStepTime(), Limits(**limits))  # type: ignore[arg-type]
    records = list(simulation.run())
    engine.check()
    assert not engine.has_requests
    return records


def request(index: int, prompt: int, output: int, arrival_s: float | None = 0.0) -> WorkloadRequest:
    return WorkloadRequest(index, [index * 100_000 + i for i in range(prompt)], output, arrival_s)


def poisson(rate_per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    workload = ConfiguredWorkload(LognormalWorkloadConfig(), Vocabulary(100, 30000), seed)
    return schedule(workload, PoissonArrivalConfig(rate_per_s=rate_per_s), seed)


def test_the_times_of_a_lone_request() -> None:
    """300 prompt tokens are three steps of at most 128; the last samples the first of five tokens."""
    (record,) = run([request(0, 300, 5, arrival_s=2.0)])
    assert list(record.chunk_times_s) == pytest.approx([2.03, 2.04, 2.05, 2.06, 2.07])
    assert record.intended_s == 2.0
    assert record.ended_s == pytest.approx(2.07)
    assert record.failure is None


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    first, second = run([request(0, 10, 3, 0.0), request(1, 10, 1, 0.011)])
    assert (first.index, second.index) == (0, 1)
    assert list(second.chunk_times_s) == pytest.approx([0.03])


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    records = run((request(i, 10, 4, None) for i in range(20)), concurrency=3)
    assert len(records) == 20
    edges = sorted([(r.intended_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    in_flight = highest = 0
    for _, change in edges:
        in_flight += change
        highest = max(highest, in_flight)
    assert highest == 3
    assert {round(r.ended_s - r.intended_s, 6) for r in records} == {0.04}


def test_limits_on_number_and_duration_and_warm_up() -> None:
    every_second = [request(i, 10, 2, float(i)) for i in range(10)]
    assert len(run(iter(every_second), num_requests=4, warmup_requests=2)) == 6
    assert [r.is_warmup for r in run(iter(every_second), num_requests=2, warmup_requests=1)] == [True, False, False]
    assert len(run(iter(every_second), duration_s=4.5)) == 5


def test_a_request_out_of_time_is_a_failure() -> None:
    (record,) = run([request(0, 10, 1000)], timeout_s=0.5)
    assert record.failure is not None
    assert record.finish_reason == "request_timeout"
    assert 0 < record.num_output_tokens < 1000


@given(seed=st.integers(0, 2**32), factor=st.sampled_from([0.25, 2.0, 8.0]))
@settings(max_examples=10, deadline=None)
def test_slower_time_scales_every_latency(seed: int, factor: float) -> None:
    """Powers of two, so that floating point scales exactly."""
    def latencies(scale: float) -> list[float]:
        requests = (replace(r, arrival_s=(r.arrival_s or 0.0) * scale) for r in poisson(40.0, seed))
        records = run(requests, step_time=LinearStepTime(0.01 * scale, 0.0001 * scale), num_requests=60)
        return [time_s for r in records for time_s in (r.intended_s, *r.chunk_times_s, r.ended_s)]

    assert latencies(factor) == [time_s * factor for time_s in latencies(1.0)]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_a_larger_cache_never_lowers_throughput(seed: int) -> None:
    def duration_s(num_blocks: int) -> float:
        records = run((request(r.index, len(r.prompt_token_ids), r.output_tokens) for r in poisson(1.0, seed)),
                      scheduler=config(max_num_seqs=64), num_blocks=num_blocks, num_requests=80)
        return max(r.ended_s for r in records)

    small, large = duration_s(400), duration_s(800)
    assert large <= small * 1.02


def plan_sizes(prefill: PrefillConfig, requests: Sequence[WorkloadRequest], **settings: object) -> list[list[int]]:
    plans: list[list[int]] = []
    scheduler = config(prefill=prefill, max_step_tokens=4096, **settings)
    engine = build_scheduler(scheduler, 4096, 16, 4096)
    observer: Callable[..., None] = lambda plan, *_: plans.append([item.num_tokens for item in plan.items])  # noqa: E731
    list(Simulation(iter(requests), engine, LinearStepTime(), Limits(), observer).run())
    return plans


def test_chunks_without_a_limit_are_whole_prompts_beside_decodes() -> None:
    requests = [r for _, r in zip(range(40), poisson(50.0, 3), strict=False)]
    assert (plan_sizes(ChunkedPrefillConfig(chunk_tokens=None), requests)
            == plan_sizes(WholePrefillConfig(mix_decodes=True), requests))


def test_longest_prefix_match_without_hits_is_first_come_first_served() -> None:
    requests = [r for _, r in zip(range(40), poisson(200.0, 4), strict=False)]
    chunked = ChunkedPrefillConfig()
    assert plan_sizes(chunked, requests, policy=LpmPolicyConfig()) == plan_sizes(chunked, requests)


@pytest.mark.parametrize("rate_per_s", [2.0, 10.0, 18.0])
def test_littles_law_holds_where_the_load_is_stationary(rate_per_s: float) -> None:
    records = run(poisson(rate_per_s, 11), scheduler=config(max_num_seqs=64), num_requests=3000, warmup_requests=200)
    law = summarise(records, SloConfig(), is_open_loop=True).littles_law
    assert law is not None
    assert law.mean_in_system == pytest.approx(law.predicted, rel=0.02)


def test_memory_does_not_grow_with_the_run() -> None:
    def peak_bytes(num_requests: int) -> int:
        tally = Tally(SloConfig(), is_open_loop=True, gaps=RoundedSample())
        no_timeouts = OnDemandAdmissionConfig(queue_timeout_s=None, request_timeout_s=None)
        engine = build_scheduler(config(admission=no_timeouts), 256, 16, 4096)
        limits = Limits(num_requests=num_requests, timeout_s=10.0)
        tracemalloc.start()
        for record in Simulation(poisson(10.0, 5), engine, LinearStepTime(), limits).run():
            tally.add(record)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = peak_bytes(200), peak_bytes(1000)
    a_few_numbers_each = 800 * 150
    assert many < few * 1.25 + a_few_numbers_each


def test_a_rounded_sample_is_a_sample_to_four_digits() -> None:
    exact, rounded = ExactSample(), RoundedSample()
    for record in run(poisson(30.0, 6), step_time=LinearStepTime(0.007, 0.00013), num_requests=300):
        gaps = [later - earlier for earlier, later in zip(record.chunk_times_s, record.chunk_times_s[1:], strict=False)]
        exact.extend(gaps)
        rounded.extend(gaps)
    ours, truth = rounded.distribution(), exact.distribution()
    assert ours is not None and truth is not None
    assert ours.count == truth.count
    assert ours.mean == pytest.approx(truth.mean, rel=1e-3)
    assert ours.percentiles == pytest.approx(truth.percentiles, rel=6e-4)


@pytest.mark.parametrize("batching", [ContinuousBatchingConfig(), StaticBatchingConfig(max_batch_delay_ms=0)])
def test_a_stated_limit_is_not_the_length(batching: BatchingConfig) -> None:
    """Answers end by themselves where they want to, and the scheduler knows no more of them than the limit."""
    lengths = [3, 40, 1, 17]
    scheduler = config(batching=batching, admission=WorstCaseAdmissionConfig(reserve=Reserve.max_tokens))
    engine = build_scheduler(scheduler, 4096, 16, 4096)
    held: list[int] = []

    def watch(plan: Plan, start_s: float, end_s: float) -> None:
        held.extend(len(item.request.block_ids) for item in plan.items if item.request.block_ids)

    requests = [request(i, 16, length) for i, length in enumerate(lengths)]
    records = list(Simulation(requests, engine, LinearStepTime(), Limits(), watch, max_tokens=64).run())
    by_index = sorted(records, key=lambda record: record.index)
    assert [record.num_output_tokens for record in by_index] == lengths
    assert {record.finish_reason for record in records} == {"stop"}
    assert all(record.failure is None for record in records)
    assert set(held) == {(16 + 64) // 16}
