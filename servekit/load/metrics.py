"""The latencies of one request, defined once for the server, the load client and the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from servekit.config.bench import SloConfig


@dataclass(frozen=True, slots=True)
class Timeline:
    """When things happened to one request that ended well. All times in seconds on one clock."""

    arrived_s: float
    """When it was due: the intended send time of an open-loop client, the arrival at a server."""
    token_times_s: Sequence[float]
    """One time for each output token, in order; at least one."""
    finished_s: float

    def __post_init__(self) -> None:
        if not self.token_times_s:
            raise ValueError("a timeline needs at least one output token")


def ttft_s(timeline: Timeline) -> float:
    """Time to the first token."""
    return timeline.token_times_s[0] - timeline.arrived_s


def tpot_s(timeline: Timeline) -> float | None:
    """Time per output token after the first, (last - first) / (n - 1). None for a single token."""
    times = timeline.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def itl_s(timeline: Timeline) -> list[float]:
    """Inter-token latencies: the n - 1 gaps between neighbouring tokens."""
    return [later - earlier for earlier, later in pairwise(timeline.token_times_s)]


def e2e_s(timeline: Timeline) -> float:
    """End to end: from arrival to the end of the answer."""
    return timeline.finished_s - timeline.arrived_s


class RequestLatencies(NamedTuple):
    """Everything that an objective may judge of one request, in seconds."""

    ttft_s: float
    tpot_s: float | None
    """None for a single token, and so is the next."""
    longest_itl_s: float | None
    e2e_s: float

    @classmethod
    def of(cls, timeline: Timeline) -> RequestLatencies:
        """Those of a request that ended well."""
        return cls(ttft_s(timeline), tpot_s(timeline), max(itl_s(timeline), default=None), e2e_s(timeline))

    def keep(self, slo: SloConfig) -> bool:
        """Whether they keep every limit of the objective. A single token has no TPOT or ITL to break."""
        return (_within(self.ttft_s, slo.ttft_s) and _within(self.tpot_s, slo.tpot_s)
                and _within(self.longest_itl_s, slo.itl_s) and _within(self.e2e_s, slo.e2e_s))


def meets(timeline: Timeline, slo: SloConfig) -> bool:
    """Whether a request keeps every limit of the objective."""
    return RequestLatencies.of(timeline).keep(slo)


def _within(measured: float | None, limit: float | None) -> bool:
    return measured is None or limit is None or measured <= limit


def spread_tokens(chunk_times_s: Sequence[float], chunk_tokens: Sequence[int]) -> list[float]:
    """One time for each token, from a stream whose chunks carry several.

    The tokens of a chunk were made since the chunk before, so they are spaced evenly over that gap, the last of
    them at the chunk's own time. Those of the first chunk all get its time, since when they began is not known.
    """
    times: list[float] = []
    previous_s = chunk_times_s[0] if chunk_times_s else 0.0
    for at_s, count in zip(chunk_times_s, chunk_tokens, strict=True):
        times.extend(at_s - (at_s - previous_s) * (left / count) for left in reversed(range(count)))
        previous_s = at_s
    return times
