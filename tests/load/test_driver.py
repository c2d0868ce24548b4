"""Sending: open and closed loop, limits, lateness, stopping. Targets are in-process, so nothing waits on a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import count

import pytest

from servekit.load.driver import READ_AHEAD_REQUESTS, Limits, LoadRun, run_load
from servekit.load.metrics import ttft_s
from servekit.load.records import RequestRecord
from servekit.load.target import Failure, FailureKind, Observation, RequestFailed
from servekit.load.workload import WorkloadRequest


class FakeTarget:
    """Answers every request with as many tokens as it wants, one each `gap_s`."""

    def __init__(self, gap_s: float = 0.0) -> None:
        self.gap_s = gap_s
        self.sent: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        self.sent.append(request.index)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for i in range(request.output_tokens):
                await asyncio.sleep(self.gap_s)
                is_last = i == request.output_tokens - 1
                yield Observation(time.monotonic(), True, i + 1, 1, 0, "length" if is_last else None)
        finally:
            self.in_flight -= 1


class StallingTarget(FakeTarget):
    """Blocks the whole client for a while when it sends its first request."""

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        if request.index == 0:
            time.sleep(0.3)  # blocks the event loop, which is the point
        async for seen in super().send(request):
            yield seen


class SerialTarget(FakeTarget):
    """A server that works on one request at a time."""

    def __init__(self, gap_s: float) -> None:
        super().__init__(gap_s)
        self._turn = asyncio.Lock()

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        async with self._turn:
            async for seen in super().send(request):
                yield seen


class FailingTarget(FakeTarget):
    """Refuses every other request."""

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        if request.index % 2:
            raise RequestFailed(Failure(FailureKind.status, "queue full", 503))
        async for seen in super().send(request):
            yield seen


class BrokenTarget(FakeTarget):
    """Has a bug."""

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        raise AssertionError("a bug")
        yield


def requests(gap_s: float | None, output_tokens: int = 2) -> Iterator[WorkloadRequest]:
    """Endless requests, due every `gap_s`."""
    for i in count():
        yield WorkloadRequest(i, [1], output_tokens, None if gap_s is None else i * gap_s)


def run(target: FakeTarget, limits: Limits, gap_s: float | None = None, output_tokens: int = 2) -> list[RequestRecord]:
    return asyncio.run(run_load(requests(gap_s, output_tokens), target, limits))


def test_open_loop_sends_each_at_its_time_and_in_order() -> None:
    target = FakeTarget()
    records = run(target, Limits(num_requests=20), gap_s=0.005)
    assert target.sent == list(range(20))
    assert [r.intended_s for r in sorted(records, key=lambda r: r.index)] == pytest.approx(
        [i * 0.005 for i in range(20)])
    assert all(r.lag_s >= 0 for r in records)


def test_open_loop_reads_a_long_workload_a_little_ahead() -> None:
    made: list[int] = []

    def counted() -> Iterator[WorkloadRequest]:
        for request in requests(gap_s=0.001):
            made.append(request.index)
            yield request

    records = asyncio.run(run_load(counted(), FakeTarget(), Limits(duration_s=0.1)))
    assert sorted(r.index for r in records) == list(range(100))
    assert len(made) <= 101 + READ_AHEAD_REQUESTS


def test_open_loop_does_not_wait_for_answers() -> None:
    target = SerialTarget(gap_s=0.05)
    records = run(target, Limits(num_requests=8), gap_s=0.01, output_tokens=1)
    for record in records:
        served_before = record.index + 1
        assert ttft_s(record.timeline) >= served_before * 0.05 - record.index * 0.01 - 1e-3


def test_a_late_generator_shows_in_the_latency_and_in_the_lag() -> None:
    records = run(StallingTarget(), Limits(num_requests=10), gap_s=0.01)
    held_up = [r for r in records if 0 < r.index < 10]
    for record in held_up:
        wait_s = 0.3 - record.intended_s
        assert record.lag_s >= wait_s - 1e-3
        assert ttft_s(record.timeline) >= wait_s - 1e-3


def test_closed_loop_keeps_the_concurrency() -> None:
    target = FakeTarget(gap_s=0.001)
    records = run(target, Limits(concurrency=3, num_requests=20))
    assert target.most_in_flight == 3
    assert sorted(r.index for r in records) == list(range(20))
    assert all(r.intended_s == r.sent_s for r in records)


@pytest.mark.parametrize(("gap_s", "concurrency"), [(0.001, None), (None, 2)])
def test_warmup_comes_first_and_on_top(gap_s: float | None, concurrency: int | None) -> None:
    records = run(FakeTarget(), Limits(concurrency, num_requests=5, warmup_requests=3), gap_s)
    assert sorted((r.index, r.is_warmup) for r in records) == [(i, i < 3) for i in range(8)]


def test_open_loop_ends_before_the_first_request_due_too_late() -> None:
    records = run(FakeTarget(), Limits(duration_s=0.1), gap_s=0.02)
    assert sorted(r.index for r in records) == [0, 1, 2, 3, 4]


def test_closed_loop_ends_after_its_duration() -> None:
    records = run(FakeTarget(gap_s=0.01), Limits(concurrency=1, duration_s=0.05), output_tokens=1)
    assert 1 <= len(records) <= 6, "each takes 0.01 s or more"


def test_an_open_loop_needs_arrival_times() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(FakeTarget(), Limits(num_requests=1), gap_s=None)
    assert caught.group_contains(ValueError, match="no arrival time")


def test_failures_are_records_and_end_nothing() -> None:
    records = run(FailingTarget(), Limits(num_requests=6), gap_s=0.0)
    assert [r.failure and r.failure.status for r in sorted(records, key=lambda r: r.index)] == [
        None, 503, None, 503, None, 503]


def test_a_bug_in_a_target_is_not_a_failed_request() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(BrokenTarget(), Limits(num_requests=1), gap_s=0.0)
    assert caught.group_contains(AssertionError)


def test_a_request_that_takes_too_long_is_abandoned() -> None:
    target = FakeTarget(gap_s=30)
    (record,) = run(target, Limits(num_requests=1, timeout_s=0.05), gap_s=0.0)
    assert record.failure is not None
    assert record.failure.kind is FailureKind.timeout
    assert target.in_flight == 0


def test_stop_sends_nothing_more_and_waits_for_what_is_in_flight() -> None:
    async def scenario() -> LoadRun:
        load = LoadRun(requests(0.02, output_tokens=5), FakeTarget(gap_s=0.02), Limits())
        asyncio.get_running_loop().call_later(0.07, load.stop)
        await load.run()
        return load

    load = asyncio.run(scenario())
    assert load.num_in_flight == 0
    assert load.num_sent == len(load.records) >= 1
    assert all(r.failure is None and r.num_output_tokens == 5 for r in load.records)


@pytest.mark.parametrize(("gap_s", "concurrency"), [(0.0, None), (None, 4)])
def test_cut_abandons_what_is_in_flight(gap_s: float | None, concurrency: int | None) -> None:
    target = FakeTarget(gap_s=30)

    async def scenario() -> list[RequestRecord]:
        load = LoadRun(requests(gap_s), target, Limits(concurrency, num_requests=4))
        asyncio.get_running_loop().call_later(0.05, load.cut)
        return await load.run()

    records = asyncio.run(scenario())
    assert [r.failure and r.failure.kind for r in records] == [FailureKind.interrupted] * 4
    assert target.in_flight == 0


def test_cancelling_the_run_from_outside_cancels_it() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(0.05):
            await run_load(requests(0.0), FakeTarget(gap_s=30), Limits(num_requests=2))

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
