"""The highest request rate that a configuration holds: the incumbent's rate first, then bracketing and bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt


@dataclass
class RateSearch:
    """Proposes rates and is told of each whether the objective held there.

    Holding is taken to be monotone: what held at a rate holds below it, what failed fails above it. A later
    contradiction (a failure below a rate that held) moves the bracket down, since failing is the rarer luck.
    """

    start_per_s: float
    """The first rate to try: where the incumbent holds, so that one short run rules out most of what is worse."""
    factor: float = 1.3
    """Step while only one side of the bracket is known."""
    tolerance: float = 0.08
    """The search ends when the bracket is this narrow, as a share."""
    max_runs: int = 8
    max_losing_runs: int = 3
    """Runs for a configuration that fails where it starts: how bad it is need not be known exactly."""
    held_per_s: float = 0.0
    """Highest rate that held; 0: none yet."""
    failed_per_s: float | None = None
    """Lowest rate that failed."""
    _rates: list[float] = field(default_factory=list)

    @property
    def lowest_tried_per_s(self) -> float:
        """Where a configuration that held nowhere came closest."""
        return min(self._rates, default=self.start_per_s)

    def next_rate(self) -> float | None:
        """The rate to try next, in requests per second; None: it is known well enough."""
        if not self._rates:
            return self.start_per_s
        if len(self._rates) >= self._run_limit:
            return None
        if self.failed_per_s is None:
            return self.held_per_s * self.factor
        if self.held_per_s == 0:
            return self.failed_per_s / self.factor ** 2
        if self.failed_per_s / self.held_per_s <= 1 + self.tolerance:
            return None
        return sqrt(self.held_per_s * self.failed_per_s)

    def tell(self, rate_per_s: float, holds: bool) -> None:
        """What became of a rate."""
        self._rates.append(rate_per_s)
        if not holds:
            self.failed_per_s = rate_per_s if self.failed_per_s is None else min(self.failed_per_s, rate_per_s)
            if self.held_per_s >= rate_per_s:
                self.held_per_s = 0.0
        elif self.failed_per_s is None or rate_per_s < self.failed_per_s:
            self.held_per_s = max(self.held_per_s, rate_per_s)

    @property
    def _run_limit(self) -> int:
        starts_badly = self.failed_per_s is not None and self.failed_per_s <= self.start_per_s
        return self.max_losing_runs if starts_badly else self.max_runs
