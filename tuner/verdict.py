"""Whether a running trial keeps its objective: known as soon as nothing that may still come can change it.

A verdict is a count. Of N requests at most N - ceil(q N) may miss, so a promise is broken once more have missed than
may, and is kept once so few remain that all of them may. A request in flight counts as a miss as soon as its best
possible ending would be one: every token that it still owes arriving at this moment or, where its length is not known,
nothing more arriving at all. Any other ending is worse, so no verdict is wrong; and either of these may come, so none
is later than it must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import log

from servekit.load.metrics import RequestLatencies
from servekit.tuner.slo import Promise, Slo

ROUNDING_S = 1e-9
"""More than the rounding of times may shorten a gap."""


class Verdict(Enum):
    """What is known of a run."""

    undecided = "undecided"
    holds = "holds"
    fails = "fails"


class AnswerLength(Enum):
    """What the wanted length of an answer says about its end."""

    exact = "exact"
    """It ends with that token. A shorter one is no measurement of the workload, and counts as failed."""
    at_most = "at_most"
    """It may end after any token up to that one."""


@dataclass(frozen=True)
class Tally:
    """How one promise stands."""

    promise: Promise
    num_requests: int
    """Of the whole run."""
    num_ended: int
    num_missed: int
    """Of those that have ended."""
    num_late: int
    """In flight, and certain to miss."""

    @property
    def num_open(self) -> int:
        """Requests that may still keep the promise or miss it, those not yet sent included."""
        return self.num_requests - self.num_ended - self.num_late

    @property
    def verdict(self) -> Verdict:
        """What these counts settle."""
        misses, allowed = self.num_missed + self.num_late, self.promise.misses_allowed(self.num_requests)
        if misses > allowed:
            return Verdict.fails
        return Verdict.holds if misses + self.num_open <= allowed else Verdict.undecided

    @property
    def is_losing(self) -> bool:
        """Whether it will be broken if the rest of the run goes on like this."""
        return self.projected_violation > 0

    @property
    def violation(self) -> float:
        """How far the promise is from holding, as an optimiser wants it: above 0 exactly when it is broken.

        The logarithm of the misses over those allowed, with half a request added to both. Those of a run that was
        stopped early are projected to its full length, so that worse configurations look worse.
        """
        is_broken = self.verdict is Verdict.fails
        return self.projected_violation if is_broken else self._violation_by(self.num_missed + self.num_late)

    @property
    def projected_violation(self) -> float:
        """The same of a run that goes on as it has begun."""
        judged, misses = self.num_ended + self.num_late, self.num_missed + self.num_late
        return self._violation_by(misses * self.num_requests / judged if judged else 0)

    def _violation_by(self, misses: float) -> float:
        return log((misses + 0.5) / (self.promise.misses_allowed(self.num_requests) + 0.5))


@dataclass
class _Answer:
    """One request in flight."""

    arrived_s: float
    wanted_tokens: int
    is_late: list[bool]
    """For each promise."""
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    def take(self, at_s: float) -> None:
        if self.num_tokens == 0:
            self.first_s = at_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, at_s - self.last_s)
        self.last_s = at_s
        self.num_tokens += 1

    def ended(self, at_s: float, more_tokens: int = 0) -> RequestLatencies:
        """Its latencies if it ends at `at_s`, where `more_tokens` arrive together, spread over the gap before them."""
        first_s = self.first_s if self.num_tokens else at_s
        last_s = at_s if more_tokens else self.last_s
        gap_s = (at_s - self.last_s) / more_tokens - ROUNDING_S if more_tokens and self.num_tokens else 0.0
        has_gaps = self.num_tokens + more_tokens > 1
        return RequestLatencies(
            ttft_s=first_s - self.arrived_s,
            tpot_s=(last_s - first_s) / (self.num_tokens + more_tokens - 1) if has_gaps else None,
            longest_itl_s=max(self.longest_gap_s, gap_s) if has_gaps else None,
            e2e_s=at_s - self.arrived_s)

    def best_endings(self, now_s: float, length: AnswerLength) -> tuple[RequestLatencies, ...]:
        owed_tokens = self.wanted_tokens - self.num_tokens
        whole = self.ended(now_s, owed_tokens)
        may_stop_here = self.num_tokens > 0 and owed_tokens > 0 and length is AnswerLength.at_most
        return (whole, self.ended(now_s)) if may_stop_here else (whole,)


@dataclass
class RunningVerdict:
    """The verdict on a run of `num_requests` measured requests while it goes on. Times in seconds on one clock.

    Events of one request come in order. Between two requests they may come out of order, but never later than an
    `at` that they precede, except that the tokens of one chunk may be spread over the gap before it.
    """

    slo: Slo
    num_requests: int
    length: AnswerLength = AnswerLength.exact
    _in_flight: dict[int, _Answer] = field(default_factory=dict)
    _num_sent: int = 0
    _num_ended: int = 0
    _num_missed: list[int] = field(default_factory=list)
    """For each promise, and so is the next."""
    _num_late: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"a run of {self.num_requests} requests has no verdict")
        self._num_missed = [0] * len(self.slo.promises)
        self._num_late = [0] * len(self.slo.promises)

    def sent(self, index: int, arrived_s: float, output_tokens: int) -> None:
        """A request is under way; its latencies count from `arrived_s`, when it was due."""
        if index in self._in_flight or self._num_sent == self.num_requests or output_tokens < 1:
            raise ValueError(f"request {index} of {output_tokens} tokens is sent twice, is one more than the "
                             f"{self.num_requests} of the run, or asks for nothing")
        self._num_sent += 1
        self._in_flight[index] = _Answer(arrived_s, output_tokens, [False] * len(self.slo.promises))

    def token(self, index: int, at_s: float) -> None:
        """One token of a request arrived."""
        answer = self._in_flight[index]
        if answer.num_tokens == answer.wanted_tokens:
            raise ValueError(f"request {index} has brought more than the {answer.wanted_tokens} tokens it asked for")
        answer.take(at_s)

    def finished(self, index: int, at_s: float) -> None:
        """A request ended well."""
        answer = self._in_flight[index]
        is_short = self.length is AnswerLength.exact and answer.num_tokens < answer.wanted_tokens
        self._end(index, None if is_short or answer.num_tokens == 0 else answer.ended(at_s))

    def failed(self, index: int) -> None:
        """A request was refused, or ended in an error."""
        self._end(index, None)

    def at(self, now_s: float) -> Verdict:
        """The verdict at this moment. Once it is decided it stays the same."""
        verdicts = [tally.verdict for tally in self.tallies(now_s)]
        if Verdict.fails in verdicts:
            return Verdict.fails
        return Verdict.undecided if Verdict.undecided in verdicts else Verdict.holds

    def tallies(self, now_s: float) -> tuple[Tally, ...]:
        """How each promise stands at this moment."""
        for answer in self._in_flight.values():
            self._note_lateness(answer, now_s)
        return tuple(Tally(promise, self.num_requests, self._num_ended, missed, late) for promise, missed, late
                     in zip(self.slo.promises, self._num_missed, self._num_late, strict=True))

    def _note_lateness(self, answer: _Answer, now_s: float) -> None:
        if all(answer.is_late):
            return
        endings = answer.best_endings(now_s, self.length)
        for i, promise in enumerate(self.slo.promises):
            if not answer.is_late[i] and all(promise.is_missed_by(ending) for ending in endings):
                answer.is_late[i] = True
                self._num_late[i] += 1

    def _end(self, index: int, latencies: RequestLatencies | None) -> None:
        answer = self._in_flight.pop(index)
        self._num_ended += 1
        for i, promise in enumerate(self.slo.promises):
            self._num_late[i] -= answer.is_late[i]
            self._num_missed[i] += promise.is_missed_by(latencies)
