"""The second measurement: what the search found is true only if it happens again, on arrivals it never used.

Every run starts a fresh process. Runs go in rounds: on the way there each entrant is measured once, on the way back in
the opposite order (A-B-B-A), so that a machine that slows down or recovers favours nobody. All runs of one way have the
same requests, and beside the leading candidate, unless it has just failed, the default is measured at the candidate's
rate: the two are a pair.

- A candidate that fails at its rate steps down, in a new round with new arrivals, until it holds or is given up; then
  up again, halfway to where it failed, until the two are a step apart. Steps in one direction become longer, and so
  they do when another candidate fails: what one has had too much of is luck, and the search chose them all for that.
- Only the candidate with the highest rate is measured: once it holds there, no other can be better. Until one has held,
  or is down where the default is, nobody else is measured at a rate of their own: what matters most comes first.
- The default also steps up while it holds. What the winner is compared with must not be too low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Protocol

from servekit.tuner.executor import EngineFailed, RunLength
from servekit.tuner.judgement import (
    RUNS_PER_RATE,
    Judgement,
    NamedRun,
    Role,
    holds,
    is_evidence,
    is_same_rate,
    judge,
)
from servekit.tuner.launch import Configuration
from servekit.tuner.measure import Measurement
from servekit.tuner.run_log import LoggedRun, read_run
from servekit.tuner.slo import Slo

_LONGEST_STEP = 0.4
"""Share of a rate by which a finalist goes down or up at most."""
STREAM = "confirm"
"""Names of the random streams of a confirmation begin with it, and no others do."""


class Measurer(Protocol):
    """Measures one configuration at one rate, as `executor.TrialExecutor` does."""

    def measure_at(self, config: Configuration, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                   stops_early: bool) -> tuple[Measurement, Path]:
        """One run; its raw log is the second value. Raises EngineFailed."""


@dataclass(frozen=True)
class Finalist:
    """A configuration that is measured again."""

    name: str
    """For people, and different for each: `default`, `trial 17`."""
    role: Role
    config: Configuration
    rate_per_s: float
    """Where the search says that it holds, or where it is to begin."""
    overrides: tuple[str, ...] = ()
    """What composes it on top of the base."""


@dataclass(frozen=True)
class Rules:
    """How long and how often."""

    length: RunLength
    """Of each run, by its rate."""
    step: float = 0.07
    """By which a rate is lowered where it first failed, as a share of it. The next step is twice as long."""
    max_rounds: int = 16
    max_attempts: int = 2
    """At one run, if its measurement is bad."""


@dataclass(frozen=True)
class Entrant:
    """A finalist in a round."""

    finalist: Finalist
    rate_per_s: float


@dataclass(frozen=True)
class TimePlan:
    """What a confirmation will take, in seconds."""

    num_runs: int
    """If every finalist holds at its rate, and the default does not at the leader's."""
    least_s: float
    """For these."""


def plan_time(finalists: Sequence[Finalist], rules: Rules, start_s: float, warmup_requests: int,
              drain_s: float) -> TimePlan:
    """How long a confirmation takes when an engine starts in `start_s` and its last answers take `drain_s`."""
    climbs = [Climb(finalist, rules.step) for finalist in finalists]
    first = entrants(climbs)
    for entrant in first:
        climb = next(climb for climb in climbs if climb.finalist is entrant.finalist)
        climb.note(entrant.rate_per_s, is_same_rate(entrant.rate_per_s, climb.finalist.rate_per_s))
    second = [entrant for entrant in entrants(climbs) if entrant.rate_per_s == entrant.finalist.rate_per_s]
    return TimePlan(RUNS_PER_RATE * len(first + second),
                    sum(round_s(entered, rules, start_s, warmup_requests, drain_s) for entered in (first, second)))


def round_s(entered: Sequence[Entrant], rules: Rules, start_s: float, warmup_requests: int, drain_s: float) -> float:
    """How long a round of these takes, in seconds, if nothing fails."""
    return RUNS_PER_RATE * sum(
        start_s + (rules.length.at(entrant.rate_per_s) + warmup_requests) / entrant.rate_per_s + drain_s
        for entrant in entered)


@dataclass
class Climb:
    """How far a finalist has come."""

    finalist: Finalist
    step: float
    held_per_s: float | None = None
    """Highest rate at which it was confirmed."""
    failed_per_s: float | None = None
    """Lowest rate at which it failed."""
    failure: str | None = None
    """Why it is out: its engine failed."""
    num_steps: int = 0
    """That it has gone, the first measurement at its own rate included; failures of other candidates count as well."""
    is_too_slow: bool = False
    """Whether there was no time for it once, so that nobody waits for it."""

    @property
    def next_per_s(self) -> float | None:
        """The rate to be measured next; None: nothing more is to be known."""
        if self.failure is not None:
            return None
        own_per_s = self.finalist.rate_per_s
        if self.held_per_s is None:
            if self.failed_per_s is None or self.failed_per_s > own_per_s:
                return own_per_s
            return self.failed_per_s * (1 - self._stride)
        if self.failed_per_s is None:
            return self.held_per_s / (1 - self._stride) if self.finalist.role is Role.default else None
        is_bracketed = self.failed_per_s * (1 - self.step) <= self.held_per_s * (1 + 1e-9)
        return None if is_bracketed else sqrt(self.held_per_s * self.failed_per_s)

    @property
    def _stride(self) -> float:
        """How far to go on in one direction, as a share of the higher rate."""
        return min(_LONGEST_STEP, self.step * 2.0 ** (self.num_steps - 1))

    def note(self, rate_per_s: float, holds: bool) -> None:
        """What became of a rate."""
        self.num_steps += holds or rate_per_s <= self.finalist.rate_per_s
        if holds:
            self.held_per_s = max(self.held_per_s or 0.0, rate_per_s)
        else:
            self.failed_per_s = min(self.failed_per_s or rate_per_s, rate_per_s)


def leader_of(climbs: Sequence[Climb]) -> Climb | None:
    """The tuned candidate to be measured next: the one whose rate is the highest, if that would be a new best."""
    best_per_s = max((climb.held_per_s or 0.0 for climb in climbs), default=0.0)
    open_ones = [climb for climb in climbs
                 if climb.finalist.role is Role.tuned and (climb.next_per_s or 0.0) > best_per_s]
    return max(open_ones, key=lambda climb: climb.next_per_s or 0.0, default=None)


def entrants(climbs: Sequence[Climb]) -> list[Entrant]:
    """Who is measured in the next round, in order: the leader, the default beside it, then those of other roles."""
    leader = leader_of(climbs)
    has_held = any(climb.held_per_s for climb in climbs)
    if leader is not None and has_held and any(map(_is_untried, climbs)):
        leader = None  # How much more it holds can wait until it is known what it is compared with.
    found = [] if leader is None else list(_pair(leader, climbs))
    if leader is not None and not has_held and _is_ahead(leader, climbs):
        return found
    for climb in climbs:
        rate_per_s = climb.next_per_s
        is_there = any(entrant.finalist is climb.finalist and rate_per_s is not None
                       and is_same_rate(entrant.rate_per_s, rate_per_s) for entrant in found)
        if climb.finalist.role is not Role.tuned and rate_per_s is not None and not is_there:
            found.append(Entrant(climb.finalist, rate_per_s))
    return found


def _is_untried(climb: Climb) -> bool:
    """Whether somebody to compare with is still to be measured at the rate that the search found."""
    return (climb.finalist.role is not Role.tuned and climb.held_per_s is None and not climb.is_too_slow
            and climb.next_per_s == climb.finalist.rate_per_s)


def _is_ahead(leader: Climb, climbs: Sequence[Climb]) -> bool:
    """Whether a candidate is to be measured at a higher rate than any default."""
    return all((leader.next_per_s or 0.0) > (climb.next_per_s or 0.0)
               for climb in climbs if climb.finalist.role is Role.default)


def _pair(leader: Climb, climbs: Sequence[Climb]) -> Iterator[Entrant]:
    assert leader.next_per_s is not None
    yield Entrant(leader.finalist, leader.next_per_s)
    for climb in climbs:
        if climb.finalist.role is Role.default and climb.failure is None:
            yield Entrant(climb.finalist, leader.next_per_s)


def _is_paired(entrant: Entrant, leader: Entrant) -> bool:
    """Whether an entrant is measured at the rate of a tuned leader."""
    return leader.finalist.role is Role.tuned and entrant.rate_per_s == leader.rate_per_s


@dataclass(frozen=True)
class Progress:
    """What a confirmation is doing; told before each run and after it."""

    round: int
    """From 1, and so is the next."""
    run: int
    """Of the round."""
    num_runs: int
    """Of the round, if nothing fails."""
    entrant: Entrant
    stream: str
    holds: bool | None
    """None: it is about to begin, or its measurement was bad."""


@dataclass(frozen=True)
class FinalistRun:
    """A run that was made, bad ones included."""

    finalist: str
    log: Path


@dataclass(frozen=True)
class Confirmed:
    """What came of it."""

    finalists: tuple[Finalist, ...]
    runs: tuple[FinalistRun, ...]
    """In the order in which they were made."""
    failures: Mapping[str, str]
    """Of finalists whose engine failed, or that could not be measured well: why."""
    judgement: Judgement
    is_out_of_time: bool = False
    """Whether there was no time for a round that would have told more."""

    def attacked(self, slo: Slo, survived: Mapping[str, bool]) -> Judgement:
        """The judgement with what a memory attack found: the best of those that survive."""
        return judge(slo, roles_of(self.finalists), read_all(self.runs), survived)


def roles_of(finalists: Sequence[Finalist]) -> dict[str, Role]:
    """The role of each by its name."""
    return {finalist.name: finalist.role for finalist in finalists}


def read_all(runs: Sequence[FinalistRun]) -> list[NamedRun]:
    """The runs as they were logged."""
    return [NamedRun(run.finalist, read_run(run.log)) for run in runs]


@dataclass
class Confirmation:
    """Measures finalists again. `may_begin_round` is asked before each round but the first: is there time for it?"""

    slo: Slo
    finalists: Sequence[Finalist]
    measurer: Measurer
    rules: Rules
    on_progress: Callable[[Progress], None] = lambda _: None
    may_begin_round: Callable[[Sequence[Entrant]], bool] = lambda _: True
    _climbs: list[Climb] = field(default_factory=list)
    _runs: list[FinalistRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len({finalist.name for finalist in self.finalists}) < len(self.finalists):
            raise ValueError("two finalists have one name")

        self._climbs = [Climb(finalist, self.rules.step) for finalist in self.finalists]

    def run(self) -> Confirmed:
        """Measure until the best candidate holds and the default is bracketed, or rounds or time are used up."""
        for number in range(1, self.rules.max_rounds + 1):
            entered = self._entrants_in_time() if number > 1 else entrants(self._climbs)
            if not entered:
                break
            self._round(number, entered)
        failures = {climb.finalist.name: climb.failure for climb in self._climbs if climb.failure is not None}
        return Confirmed(tuple(self.finalists), tuple(self._runs), failures,
                         judge(self.slo, roles_of(self.finalists), read_all(self._runs)),
                         is_out_of_time=any(climb.is_too_slow for climb in self._climbs))

    def _entrants_in_time(self) -> list[Entrant]:
        """Those of the next round for whom there is time; nobody waits any more for whoever is left out."""
        while True:
            wanted = entrants(self._climbs)
            entered = self._in_time(wanted)
            for entrant in wanted:
                if entrant not in entered:
                    self._climb(entrant).is_too_slow = True
            if entered or entrants(self._climbs) == wanted:
                return entered

    def _in_time(self, wanted: Sequence[Entrant]) -> list[Entrant]:
        """As many as there is time for: first the leader, without whom nothing is confirmed, then the default, then the
        faster of the others.
        """
        leader = leader_of(self._climbs)
        by_importance = sorted(wanted, key=lambda entrant: (
            leader is not None and entrant.finalist is leader.finalist, entrant.finalist.role is Role.default,
            entrant.rate_per_s), reverse=True)
        entered = list[Entrant]()
        for entrant in by_importance:
            if self.may_begin_round([*entered, entrant]):
                entered.append(entrant)
        return [entrant for entrant in wanted if entrant in entered]

    def _round(self, number: int, entered: Sequence[Entrant]) -> None:
        """There and back. Whoever failed on the way there is decided, and is measured again only as half of a pair."""
        there, back = (f"{STREAM} {RUNS_PER_RATE * (number - 1) + way}" for way in (1, 2))
        total = RUNS_PER_RATE * len(entered)
        measured: list[tuple[Entrant, list[LoggedRun]]] = []
        for place, entrant in enumerate(entered, 1):
            if self._is_beside_a_failure(entrant, measured):
                continue
            first = self._measure(entrant, there, Progress(number, place, total, entrant, there, None))
            measured.append((entrant, [] if first is None else [first]))
        for place, (entrant, runs) in enumerate(reversed(measured), len(entered) + 1):
            if runs and self._goes_back(entrant, runs[0], measured):
                second = self._measure(entrant, back, Progress(number, place, total, entrant, back, None))
                runs += [] if second is None else [second]
        for entrant, runs in measured:
            self._note(entrant, runs)
        self._warn_the_others(measured)

    def _is_beside_a_failure(self, entrant: Entrant, measured: Sequence[tuple[Entrant, Sequence[LoggedRun]]]) -> bool:
        """Whether the default is there only for the sake of a leader that has just failed at this rate."""
        if not measured or entrant.finalist.role is not Role.default:
            return False
        leader, runs = measured[0]
        own_per_s = self._climb(entrant).next_per_s
        is_its_own = own_per_s is not None and is_same_rate(entrant.rate_per_s, own_per_s)
        return _is_paired(entrant, leader) and not is_its_own and not (runs and holds(self.slo, runs))

    def _goes_back(self, entrant: Entrant, first: LoggedRun,
                   measured: Sequence[tuple[Entrant, Sequence[LoggedRun]]]) -> bool:
        if self._climb(entrant).failure is not None:
            return False
        leader, runs = measured[0]
        if _is_paired(entrant, leader) and runs and holds(self.slo, runs[:1]):
            return True
        return holds(self.slo, [first])

    def _note(self, entrant: Entrant, runs: Sequence[LoggedRun]) -> None:
        has_held = bool(runs) and holds(self.slo, runs)
        if runs and (len(runs) == RUNS_PER_RATE or not has_held):
            self._climb(entrant).note(entrant.rate_per_s, has_held)

    def _warn_the_others(self, measured: Sequence[tuple[Entrant, Sequence[LoggedRun]]]) -> None:
        """Of a candidate's failure, so that the next one to fail goes further down."""
        failed = [entrant.finalist for entrant, runs in measured
                  if entrant.finalist.role is Role.tuned and runs and not holds(self.slo, runs)]
        for climb in self._climbs:
            if climb.finalist.role is Role.tuned and failed and climb.finalist not in failed:
                climb.num_steps += 1

    def _measure(self, entrant: Entrant, stream: str, progress: Progress) -> LoggedRun | None:
        """A good run, or None: the finalist is out."""
        climb = self._climb(entrant)
        if climb.failure is not None:
            return None
        for _ in range(self.rules.max_attempts):
            self.on_progress(progress)
            try:
                _, path = self.measurer.measure_at(entrant.finalist.config, entrant.rate_per_s,
                                                   self.rules.length.at(entrant.rate_per_s), stream, cold=True,
                                                   stops_early=False)
            except EngineFailed as failed:
                climb.failure = f"{failed.ending.value}: {failed}"
                return None
            run = read_run(path)
            self._runs.append(FinalistRun(entrant.finalist.name, path))
            is_good = is_evidence(run)
            self.on_progress(replace(progress, holds=holds(self.slo, [run]) if is_good else None))
            if is_good:
                return run
        climb.failure = f"could not be measured well in {self.rules.max_attempts} attempts: {', '.join(run.problems)}"
        return None

    def _climb(self, entrant: Entrant) -> Climb:
        return next(climb for climb in self._climbs if climb.finalist is entrant.finalist)
