"""The first look at the base configuration: what the device can do at best, before anything is searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from servekit.config.errors import require
from servekit.engine.client import StartError
from servekit.load.metrics import RequestLatencies
from servekit.tuner.executor import Description, EngineFailed, TrialExecutor
from servekit.tuner.run_log import read_run
from servekit.tuner.settings import Settings
from servekit.tuner.slo import Promise, Slo

T = TypeVar("T")

START_SHARE = 0.6
"""Of the capacity, where the search for a rate begins."""
_ALONE_REQUESTS = 3
_ALONE_RATE_PER_S = 1.0
_PROBE_REQUESTS = 24
_PROBE_RATE_PER_S = 1000.0
"""All requests of the probe at once: what comes out is what the engine can do at most."""


@dataclass(frozen=True)
class Baseline:
    """What the first look at the base configuration found."""

    description: Description
    single: RequestLatencies
    """The best of a few requests alone, each figure by itself: nothing can be faster."""
    capacity_per_s: float
    """Requests per second when many wait."""


def look_at_base(settings: Settings, executor: TrialExecutor, console: Console) -> Baseline:
    """Start the base configuration, and see what one request takes and how many per second come through."""
    with console.status("starting the base configuration"):
        description = _running(lambda: executor.describe(settings.base))
    longest, held = executor.plan.longest_tokens(2000), description.max_model_len
    require(held is None or longest <= held, "workload", longest,
            f"has a request of {longest} tokens, and the engine holds {held}",
            "set workload.length_scale lower, or base.model.max_model_len and base.memory higher"
            if settings.server is None else "set workload.length_scale lower, or the length in start_command higher")
    with console.status("one request alone, then as many as come"):
        _, alone = _running(lambda: executor.measure_at(settings.base, _ALONE_RATE_PER_S, _ALONE_REQUESTS, "alone",
                                                        cold=False, stops_early=False))
        _, crowd = _running(lambda: executor.measure_at(settings.base, _PROBE_RATE_PER_S, _PROBE_REQUESTS, "crowd",
                                                        cold=False, stops_early=False))
    single = [request.latencies for request in read_run(alone).measured if request.latencies]
    crowded = [request for request in read_run(crowd).measured if request.latencies]
    if not single or not crowded:
        failed = next((request.failure_text for request in read_run(crowd).measured if request.failure_text), None)
        raise StartError("the base configuration answers no request of the workload"
                         f"{'' if failed is None else f': {failed}'}")
    span_s = max(request.ended_s for request in crowded) - min(request.intended_s for request in crowded)
    return Baseline(description, _best_of(single), len(crowded) / span_s)


def _best_of(requests: Sequence[RequestLatencies]) -> RequestLatencies:
    tpots_s = [request.tpot_s for request in requests if request.tpot_s is not None]
    gaps_s = [request.longest_itl_s for request in requests if request.longest_itl_s is not None]
    return RequestLatencies(
        min(request.ttft_s for request in requests), min(tpots_s, default=None), min(gaps_s, default=None),
        min(request.e2e_s for request in requests))


def _running(look: Callable[[], T]) -> T:
    try:
        return look()
    except EngineFailed as failure:
        raise StartError(f"the base configuration does not run: {failure}") from failure


def refuse_impossible(slo: Slo, single: RequestLatencies) -> None:
    """Raise ConfigError for a promise that not even a request alone keeps."""
    for promise in slo.promises:
        for name, have_s, limit_s in _compared(promise, single):
            require(have_s is None or limit_s is None or have_s <= limit_s, f"slo.{promise.name}",
                    f"{(limit_s or 0.0) * 1e3:g}ms",
                    f"a request alone on this device has a {name} of {(have_s or 0.0) * 1e3:.1f} ms",
                    f"promise more than {(have_s or 0.0) * 1e3:.0f}ms, or take a faster device or a smaller model")


def _compared(promise: Promise, single: RequestLatencies) -> list[tuple[str, float | None, float | None]]:
    """Each latency with what one request has and what it may have."""
    limits = promise.limits
    return [("ttft", single.ttft_s, limits.ttft_s), ("tpot", single.tpot_s, limits.tpot_s),
            ("itl", single.longest_itl_s, limits.itl_s), ("e2e", single.e2e_s, limits.e2e_s)]
