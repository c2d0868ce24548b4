"""The highest request rate that a configuration holds: the incumbent's rate first, or one between it and what is
expected, then bracketing and bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

from servekit.tuner.slo import Slo

LOSING_SHARE = 0.1
"""Of the time for the search, what a configuration may take that holds nothing: no further run begins that would fail
later, and one that looks like failing is cut there. A tenth: even where nothing holds, as many are tried as a sampler
sees before it learns."""
NARROWING_SHARE = 0.15
"""Of the time for the search, up to where a bracket is narrowed: no further run begins that would hold later. How much
exactly a configuration holds is worth less than a look at another one; the confirmation finds out for the best. A proof
of what was found may come after it."""
HOLDING_SHARE = 0.5
"""Of the time for the search, what any configuration may take: no further run begins that would hold later. A half:
there is time for another that may be better."""
_STEPS_DOWN = 2
"""Factors from a rate that failed to the next one, while none has held."""
_MOST_STEPS_UP = 2
"""Factors from a rate that held to the next one, while none has failed; the first step is one."""


@dataclass(frozen=True)
class Allowance:
    """What the search for one configuration's rate may take."""

    losing_s: float = inf
    """Time for its runs as long as none of them has held."""
    narrowing_s: float = inf
    """Time for its runs once it is known between which rates it fails."""
    most_s: float = inf
    """Time for all its runs."""
    requests_to_fail: int = 0
    """Requests of a run, the warm-up included, before which it cannot fail."""
    requests_to_hold: int = 0
    """The same, before which it cannot hold."""

    @classmethod
    def of(cls, search_s: float, slo: Slo, num_requests: int, warmup_requests: int) -> Allowance:
        """For runs of `num_requests` that are judged, when there are `search_s` for the whole search."""
        misses = min(promise.misses_allowed(num_requests) for promise in slo.promises)
        return cls(LOSING_SHARE * search_s, NARROWING_SHARE * search_s, HOLDING_SHARE * search_s,
                   warmup_requests + misses + 1, warmup_requests + num_requests - misses)

    @property
    def lowest_per_s(self) -> float:
        """The lowest rate worth trying: below it, a run that holds takes more time than there is."""
        return self.requests_to_hold / self.most_s

    def shortest_s(self, rate_per_s: float, holds: bool) -> float:
        """The least that a run at this rate takes until it is known to hold, or to fail."""
        return (self.requests_to_hold if holds else self.requests_to_fail) / rate_per_s

    def allows(self, rate_per_s: float, taken_s: float, has_held: bool, is_bracketed: bool) -> bool:
        """Whether a run at this rate may begin after others that took `taken_s`."""
        until_it_holds_s = taken_s + self.shortest_s(rate_per_s, holds=True)
        return (until_it_holds_s <= (self.narrowing_s if is_bracketed else self.most_s)
                and (has_held or taken_s + self.shortest_s(rate_per_s, holds=False) <= self.losing_s))


@dataclass
class RateSearch:
    """Proposes rates and is told of each whether the objective held there.

    Holding is taken to be monotone: what held at a rate holds below it, what failed fails above it. A later
    contradiction (a failure at a rate that held, or below it) moves the bracket down, since failing is the rarer luck.
    """

    start_per_s: float
    """The first rate to try."""
    factor: float = 1.3
    """Step while only one side of the bracket is known."""
    tolerance: float = 0.08
    """The search ends when the bracket is this narrow, as a share."""
    max_runs: int = 8
    """After so many, only proofs are still to come, and lower rates where one has failed."""
    max_losing_runs: int = 3
    """Runs for a configuration that fails where the incumbent holds, or where it starts if there is none: how bad it is
    need not be known exactly."""
    allowance: Allowance = Allowance()
    """What the runs may take. The first one is made in any case: without one nothing is known."""
    incumbent_per_s: float = 0.0
    """What another configuration holds: the way down from the start does not pass it by. 0: nobody's."""
    proves_best: bool = False
    """Whether a rate above the incumbent's must hold in a second run, on other arrivals, if there is time for one: the
    best of many short runs has been lucky."""
    failed_per_s: float | None = field(default=None, init=False)
    """Lowest rate that failed."""
    _rates: list[float] = field(default_factory=list, init=False)
    _held: list[float] = field(default_factory=list, init=False)
    """Rates by the runs that held."""
    _taken_s: float = field(default=0.0, init=False)

    @classmethod
    def against(cls, incumbent_per_s: float, usual_per_s: float, allowance: Allowance) -> RateSearch:
        """A search that begins where the incumbent holds, so that one short run rules out most of what is worse.

        Where that is far below the rate that a configuration is expected to hold, it begins halfway, by factors: a run
        that fails is short, and one that holds at a very low rate would be long and say little.
        """
        halfway_per_s = sqrt(incumbent_per_s * usual_per_s)
        is_far = halfway_per_s > incumbent_per_s * cls.factor ** _STEPS_DOWN
        return cls(halfway_per_s if is_far else incumbent_per_s, allowance=allowance, incumbent_per_s=incumbent_per_s,
                   proves_best=True)

    @property
    def held_per_s(self) -> float:
        """Highest rate that held, and below which none failed; 0: none yet."""
        return max((held for held in self._held if held < (self.failed_per_s or inf)), default=0.0)

    @property
    def lowest_tried_per_s(self) -> float:
        """Where a configuration that held nowhere came closest."""
        return min(self._rates, default=self.start_per_s)

    @property
    def lower_per_s(self) -> float:
        """The next rate below those that were tried."""
        lower_per_s = self.lowest_tried_per_s / self.factor ** _STEPS_DOWN
        return max(lower_per_s, self.incumbent_per_s) if self.lowest_tried_per_s > self.incumbent_per_s else lower_per_s

    @property
    def losing_left_s(self) -> float:
        """How long the next run may last while it looks like another failure."""
        return inf if self._held else self.allowance.losing_s - self._taken_s

    @property
    def is_out_of_time(self) -> bool:
        """Whether nothing has held, and only for want of time no lower rate is tried."""
        return (self.held_per_s == 0 and 0 < len(self._rates) < self._run_limit
                and not self._allows(self.lower_per_s))

    def next_rate(self) -> float | None:
        """The rate to try next, in requests per second; None: it is known well enough, or the time is used up."""
        if not self._rates:
            return self.start_per_s
        wanted = self._wanted_rate() if len(self._rates) < self._run_limit else None
        if wanted is not None and self._allows(wanted):
            return wanted
        return self.held_per_s if self._is_to_be_proven else None

    def tell(self, rate_per_s: float, holds: bool, took_s: float = 0.0) -> None:
        """What became of a rate, and how long that took."""
        self._rates.append(rate_per_s)
        self._taken_s += took_s
        if holds:
            self._held.append(rate_per_s)
        else:
            self.failed_per_s = min(self.failed_per_s or inf, rate_per_s)

    def _wanted_rate(self) -> float | None:
        """What would be tried if there were any amount of time."""
        if self.failed_per_s is None:
            return self.held_per_s * self.factor ** min(len(self._rates), _MOST_STEPS_UP)
        if self.held_per_s == 0:
            return self.lower_per_s
        if self.failed_per_s / self.held_per_s <= 1 + self.tolerance:
            return None
        return sqrt(self.held_per_s * self.failed_per_s)

    @property
    def _is_to_be_proven(self) -> bool:
        """Whether a new best has held only once, and there is time for another run of it."""
        if not self.proves_best or self.held_per_s <= self.incumbent_per_s or self._held.count(self.held_per_s) > 1:
            return False
        return self._taken_s + self.allowance.shortest_s(self.held_per_s, holds=True) <= self.allowance.most_s

    def _allows(self, rate_per_s: float) -> bool:
        # What has held once is worth the time of one that holds, even if its proof has failed.
        is_bracketed = self.held_per_s > 0 and self.failed_per_s is not None
        return self.allowance.allows(rate_per_s, self._taken_s, bool(self._held), is_bracketed)

    @property
    def _run_limit(self) -> int:
        if self._held and self.held_per_s == 0:
            return self.max_runs + self.max_losing_runs
        is_losing = self.failed_per_s is not None and self.failed_per_s <= (self.incumbent_per_s or self.start_per_s)
        return self.max_losing_runs if is_losing else self.max_runs
