"""Random runs of a load, small enough that their verdict is easily seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from servekit.config.bench import SloConfig
from servekit.load.metrics import Timeline, e2e_s, itl_s, meets, spread_tokens, tpot_s, ttft_s
from servekit.tuner.slo import Promise, Slo
from servekit.tuner.verdict import AnswerLength, RunningVerdict, Verdict

TICK_S = 1 / 8
"""All times are whole multiples, so that many of them meet limits and each other exactly."""


@dataclass(frozen=True)
class Request:
    """One request as it went."""

    arrived_s: float
    wanted_tokens: int
    chunk_times_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    ended_s: float
    is_failed: bool

    def timeline(self, length: AnswerLength) -> Timeline | None:
        """None if it counts as failed."""
        is_short = length is AnswerLength.exact and sum(self.chunk_tokens) < self.wanted_tokens
        if self.is_failed or is_short or not self.chunk_tokens:
            return None
        return Timeline(self.arrived_s, spread_tokens(self.chunk_times_s, self.chunk_tokens), self.ended_s)


@dataclass(frozen=True)
class Trace:
    """A run with its objective."""

    slo: Slo
    length: AnswerLength
    requests: tuple[Request, ...]

    def events(self) -> list[tuple[float, Callable[[RunningVerdict], None]]]:
        """What a verdict is told, and when, in the order of time."""
        return sorted((event for index, request in enumerate(self.requests) for event in _events(index, request)),
                      key=lambda event: event[0])

    def holds(self) -> bool:
        """The full verdict, from the definition of a percentile."""
        timelines = [request.timeline(self.length) for request in self.requests]
        return all(_holds(promise, timelines) for promise in self.slo.promises)


def _events(index: int, request: Request) -> Iterator[tuple[float, Callable[[RunningVerdict], None]]]:
    yield request.arrived_s, lambda verdict: verdict.sent(index, request.arrived_s, request.wanted_tokens)
    tokens = spread_tokens(request.chunk_times_s, request.chunk_tokens)
    for at_s, count in zip(request.chunk_times_s, request.chunk_tokens, strict=True):
        chunk, tokens = tokens[:count], tokens[count:]
        yield at_s, lambda verdict, chunk=chunk: [verdict.token(index, token_s) for token_s in chunk]  # type: ignore
    if request.is_failed:
        yield request.ended_s, lambda verdict: verdict.failed(index)
    else:
        yield request.ended_s, lambda verdict: verdict.finished(index, request.ended_s)


def _holds(promise: Promise, timelines: list[Timeline | None]) -> bool:
    """By sorting, where the code under test counts."""
    if promise.name == "goodput":
        good = sum(timeline is not None and meets(timeline, promise.limits) for timeline in timelines)
        return good * 1000 >= promise.per_mille * len(timelines)
    latency = promise.name.partition(".")[0]
    limit = getattr(promise.limits, f"{latency}_s")
    ordered = sorted(float("inf") if timeline is None else _latency(latency, timeline) for timeline in timelines)
    place = next(i for i in range(1, len(ordered) + 1) if i * 1000 >= promise.per_mille * len(ordered))
    return ordered[place - 1] <= limit


def _latency(name: str, timeline: Timeline) -> float:
    value = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s,
             "itl": lambda timeline: max(itl_s(timeline), default=None)}[name](timeline)  # type: ignore[operator]
    return -1.0 if value is None else float(value)


def random_trace(random: Random, largest: int = 6) -> Trace:
    """A run of up to `largest` requests."""
    length = random.choice(list(AnswerLength))
    return Trace(random.choice(SLOS), length,
                 tuple(_random_request(random, length) for _ in range(random.randint(1, largest))))


def _random_request(random: Random, length: AnswerLength) -> Request:
    uniform = random.random
    arrived_s = int(uniform() * 12) * TICK_S
    wanted = 1 + int(uniform() * 4)
    is_whole = uniform() < (0.9 if length is AnswerLength.exact else 0.4)
    brought = wanted if is_whole else int(uniform() * (wanted + 1))
    now_s, times, counts = arrived_s, [], []
    while brought:
        now_s += int(uniform() * 5) * TICK_S
        count = 1 if uniform() < 0.7 else 1 + int(uniform() * brought)
        times.append(now_s)
        counts.append(count)
        brought -= count
    ended_s = now_s + (int(uniform() * 8) * TICK_S if uniform() < 0.3 else 0.0)
    return Request(arrived_s, wanted, tuple(times), tuple(counts), ended_s, is_failed=uniform() < 0.08)


def _promise(name: str, per_mille: int, **limits: float) -> Promise:
    return Promise(name, per_mille, SloConfig(**limits))


SINGLE_SLOS = [Slo((promise,)) for promise in (
    _promise("ttft.p50", 500, ttft_s=0.25), _promise("ttft.p99", 990, ttft_s=0.5),
    _promise("tpot.p50", 500, tpot_s=0.25), _promise("tpot.p75", 750, tpot_s=0.375),
    _promise("tpot.p99.9", 999, tpot_s=0.5),
    _promise("itl.p60", 600, itl_s=0.375), _promise("itl.p90", 900, itl_s=0.5), _promise("e2e.p50", 500, e2e_s=1.0),
    _promise("e2e.p80", 800, e2e_s=1.5), _promise("goodput", 600, ttft_s=0.375, tpot_s=0.375),
    _promise("goodput", 750, ttft_s=0.5, itl_s=0.5, e2e_s=2.0), _promise("goodput", 500, tpot_s=0.25, itl_s=0.375))]
SLOS = [*SINGLE_SLOS, *(Slo(first.promises + second.promises) for first, second in
                        zip(SINGLE_SLOS, SINGLE_SLOS[1:] + SINGLE_SLOS[:1], strict=True)),
        Slo((*SINGLE_SLOS[0].promises, *SINGLE_SLOS[1].promises, *SINGLE_SLOS[3].promises, *SINGLE_SLOS[9].promises))]


@dataclass(frozen=True)
class Decision:
    """The early verdict on a trace."""

    verdict: Verdict
    at_event: int
    """How many events had passed."""


def decide(trace: Trace, look_at_every: int = 1) -> Decision:
    """Run a trace to its end, checking against the full verdict what is known before and after every so many events
    until it is decided, and what is known in the end.
    """
    running = RunningVerdict(trace.slo, len(trace.requests), trace.length)
    expected = Verdict.holds if trace.holds() else Verdict.fails
    events = trace.events()
    first: Decision | None = None
    for number, (at_s, tell) in enumerate(events):
        is_looked_at = first is None and number % look_at_every == 0
        if is_looked_at:
            first = _look(running, at_s, expected, number, trace)
        tell(running)
        if is_looked_at and first is None:
            first = _look(running, at_s, expected, number + 1, trace)
    last = _look(running, events[-1][0], expected, len(events), trace)
    assert last is not None, f"undecided in the end: {trace}"
    return first or last


def _look(running: RunningVerdict, at_s: float, expected: Verdict, number: int, trace: Trace) -> Decision | None:
    seen = running.at(at_s)
    assert seen in (Verdict.undecided, expected), f"early {seen.name}, in full {expected.name}: {trace}"
    return None if seen is Verdict.undecided else Decision(seen, number)
