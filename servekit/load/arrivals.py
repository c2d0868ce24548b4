"""When requests are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat

from servekit.config.bench import (
    ArrivalConfig,
    ClosedArrivalConfig,
    FixedArrivalConfig,
    GammaArrivalConfig,
    PoissonArrivalConfig,
    TraceArrivalConfig,
)
from servekit.load.randomness import Stream, generator
from servekit.load.workload import WorkloadRequest


def schedule(requests: Iterable[WorkloadRequest], arrival: ArrivalConfig, seed: int) -> Iterator[WorkloadRequest]:
    """Give each request the offset, in seconds from the start, at which it is due; None in a closed loop.

    The first request of an open loop is due at once.
    """
    match arrival:
        case TraceArrivalConfig():
            return (_at(request, _own_time_s(request) / arrival.rate_scale) for request in requests)
        case ClosedArrivalConfig():
            return (replace(request, arrival_s=None) for request in requests)
        case _:
            return map(_at, requests, arrival_times_s(arrival, seed))


def arrival_times_s(arrival: ArrivalConfig, seed: int) -> Iterator[float]:
    """Endless arrival times of a synthetic process, from 0."""
    now_s = 0.0
    for gap_s in _gaps_s(arrival, seed):
        yield now_s
        now_s += gap_s


def _gaps_s(arrival: ArrivalConfig, seed: int) -> Iterator[float]:
    rng = generator(seed, Stream.arrivals)
    match arrival:
        case FixedArrivalConfig():
            return repeat(1.0 / arrival.rate_per_s)
        case PoissonArrivalConfig():
            return (rng.exponential(1.0 / arrival.rate_per_s) for _ in repeat(None))
        case GammaArrivalConfig():
            # A gamma distribution of shape k has the coefficient of variation 1 / sqrt(k) and the mean k * scale.
            shape = arrival.gap_cv ** -2
            return (rng.gamma(shape, 1.0 / (arrival.rate_per_s * shape)) for _ in repeat(None))
        case _:
            raise TypeError(f"{type(arrival).__name__} has no gaps of its own")


def _at(request: WorkloadRequest, arrival_s: float) -> WorkloadRequest:
    return replace(request, arrival_s=arrival_s)


def _own_time_s(request: WorkloadRequest) -> float:
    if request.arrival_s is None:
        raise TypeError("a workload without times cannot be replayed at its own times")
    return request.arrival_s
