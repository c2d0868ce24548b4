"""Sends requests when they are due and records what comes back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

from servekit.load.records import ObservationLog, RequestRecord
from servekit.load.target import Failure, FailureKind, RequestFailed, Target
from servekit.load.workload import WorkloadRequest

READ_AHEAD_REQUESTS = 64
"""Requests of an open loop that are made before they are due."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends, and how many clients a closed loop has."""

    concurrency: int | None = None
    """Clients of a closed loop; None: an open loop, in which each request is sent at its own arrival_s."""
    num_requests: int | None = None
    """Requests to measure, after the warm-up; None: until the requests run out."""
    duration_s: float | None = None
    """Seconds during which requests are sent; None: no limit."""
    warmup_requests: int = 0
    """Requests at the start that are marked as warm-up."""
    timeout_s: float = 600.0
    """Longest time for one request from sending to its end, in seconds."""

    @property
    def total_requests(self) -> int | None:
        """Requests to send at most, the warm-up included."""
        return None if self.num_requests is None else self.num_requests + self.warmup_requests


async def run_load(requests: Iterable[WorkloadRequest], target: Target, limits: Limits) -> list[RequestRecord]:
    """Send the requests and return one record each, in the order in which they ended.

    A request that fails is a record with a failure; nothing that a server does ends the run.
    """
    return await LoadRun(requests, target, limits).run()


class LoadRun:
    """One run, whose state can be watched and which can be stopped while it goes on. Not to be run twice."""

    def __init__(self, requests: Iterable[WorkloadRequest], target: Target, limits: Limits) -> None:
        self.records: list[RequestRecord] = []
        """The requests that have ended, in that order."""
        self.num_sent = 0
        self.num_failed = 0
        self._requests = iter(islice(requests, limits.total_requests))
        self._target = target
        self._limits = limits
        self._start_s = 0.0
        self._stopped = asyncio.Event()
        self._is_cut = False
        self._in_flight: set[asyncio.Task[object]] = set()

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not ended."""
        return self.num_sent - len(self.records)

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stopped.is_set()

    @property
    def started_s(self) -> float:
        """When it started, on the clock of time.monotonic; arrival times count from then."""
        return self._start_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    async def run(self) -> list[RequestRecord]:
        """Send everything, wait for every answer, return the records."""
        concurrency = self._limits.concurrency
        ahead = deque(islice(self._requests, READ_AHEAD_REQUESTS if concurrency is None else 0))
        self._start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            if concurrency is None:
                await self._send_when_due(ahead, tasks)
            else:
                for _ in range(concurrency):
                    tasks.create_task(self._send_one_after_another())
        return self.records

    def stop(self) -> None:
        """Send nothing more; requests in flight may end."""
        self._stopped.set()

    def cut(self) -> None:
        """Send nothing more and abandon the requests in flight; their records say that they were interrupted."""
        self.stop()
        self._is_cut = True
        for task in self._in_flight:
            task.cancel()

    async def _send_when_due(self, ahead: deque[WorkloadRequest], tasks: asyncio.TaskGroup) -> None:
        while ahead:
            request = ahead.popleft()
            if request.arrival_s is None:
                raise ValueError(f"request {request.index} has no arrival time, which an open loop needs")
            if self._limits.duration_s is not None and request.arrival_s >= self._limits.duration_s:
                return
            due_s = self._start_s + request.arrival_s
            await self._read_ahead(ahead, due_s)
            if await self._is_stopped_before(due_s):
                return
            tasks.create_task(self._measure(request, due_s))
            await asyncio.sleep(0)

    async def _read_ahead(self, ahead: deque[WorkloadRequest], until_s: float) -> None:
        """Make the next requests while there is time, so that those of a burst need not be made within it."""
        while len(ahead) < READ_AHEAD_REQUESTS and (not ahead or time.monotonic() < until_s):
            request = next(self._requests, None)
            if request is None:
                return
            ahead.append(request)
            await asyncio.sleep(0)

    async def _send_one_after_another(self) -> None:
        for request in self._requests:
            is_over = self._limits.duration_s is not None and self.elapsed_s >= self._limits.duration_s
            if is_over or self.is_stopped:
                return
            await self._measure(request, due_s=None)

    async def _is_stopped_before(self, due_s: float) -> bool:
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopped.wait()
            except TimeoutError:
                pass
        return self.is_stopped

    async def _measure(self, request: WorkloadRequest, due_s: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        is_warmup = self.num_sent < self._limits.warmup_requests
        self.num_sent += 1
        log, sent_s = ObservationLog(), time.monotonic()
        failure = await self._observe(request, log)
        ended_s = time.monotonic()
        self._in_flight.discard(task)
        self.num_failed += failure is not None
        intended_s = sent_s if due_s is None else due_s
        self.records.append(log.record(request, self._start_s, intended_s, sent_s, ended_s, is_warmup, failure))

    async def _observe(self, request: WorkloadRequest, log: ObservationLog) -> Failure | None:
        timeout_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._target.send(request)) as observations:
                async for seen in observations:
                    log.note(seen)
        except RequestFailed as failed:
            return failed.failure
        except TimeoutError:
            return Failure(FailureKind.timeout, f"it did not end within timeout_s={timeout_s:g}")
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            return Failure(FailureKind.interrupted, "the run was ended while it was in flight")
        return log.missing
