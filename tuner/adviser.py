"""The simulator as adviser: it predicts what a configuration will hold, and is heard as long as it has been right.

Step times are fitted to the steps of the runs measured so far (`FittedStepTime`). What a candidate holds is then found
as in a measurement, by `RateSearch`, but over simulated runs, on arrivals of the adviser's own. Each prediction is made
before the measurement and compared with it afterwards. While the two rank the trials alike, candidates that are
predicted to be far below the incumbent are not measured, and the best of many random ones are proposed. Predictions
are kept beside measurements and never take their place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from random import Random
from statistics import median

from scipy.stats import spearmanr

from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.config.schema import Config
from servekit.engine.messages import EngineFacts
from servekit.load.driver import Limits
from servekit.load.metrics import RequestLatencies
from servekit.sim.engine_model import EngineModel
from servekit.sim.fitted import FittedStepTime, TimedStep
from servekit.sim.simulation import Simulation
from servekit.tuner.executor import RunLength
from servekit.tuner.launch import Configuration
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.slo import Promise, Slo
from servekit.tuner.space import Domain, Integers, Ladder, Options, Reals, Space, Value
from servekit.tuner.study import Assemble, Trial
from servekit.tuner.trial import Ending, Outcome

SIMULATOR = "simulator"
"""Where the facts of a trial keep what was predicted."""
FEWEST_TRIALS = 6
"""Comparisons before the adviser is heard."""
LEAST_CORRELATION = 0.6
"""Spearman's rank correlation of predicted and measured rates, below which it is not."""
HOPELESS_SHARE = 0.7
"""A candidate whose predicted rate is below this share of the incumbent's is not measured."""
MOST_SCREENED = 5
"""Candidates in a row that are not measured: the next one is, so that the adviser is put to the test."""
SUGGEST_EVERY = 6
"""Trials between two times that the adviser proposes something."""
NUM_RANDOM_POINTS = 200
NUM_SUGGESTIONS = 3
"""Of the random points, how many are proposed."""
_RANKING_S = 15.0
"""Time that ranking random points may take; what is not looked at by then is left out."""
_STREAM = "simulated"
"""The random stream of every simulated run: equal arrivals make predictions comparable, and no run on the device uses
it."""
_STEPS_KEPT = 4000
_STEPS_OF_A_RUN = 500


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of a configuration."""

    rate_per_s: float
    """Highest rate at which it holds; 0: at none that was tried."""
    broken: tuple[str, ...]
    """Promises that it breaks at the first rate that was tried."""


@dataclass(frozen=True)
class Comparison:
    """A trial as predicted and as measured, in requests per second."""

    predicted_per_s: float
    measured_per_s: float


@dataclass
class TrackRecord:
    """How good the predictions have been."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def median_error(self) -> float | None:
        """Of the predicted rates, relative to the measured ones; None before any trial has held anything."""
        return median(abs(pair.predicted_per_s / pair.measured_per_s - 1) for pair in self._with_rates) \
            if self._with_rates else None

    @property
    def bias(self) -> float:
        """By which factor measured rates exceed predicted ones."""
        both = [pair.measured_per_s / pair.predicted_per_s for pair in self._with_rates if pair.predicted_per_s > 0]
        return median(both) if both else 1.0

    @property
    def rank_correlation(self) -> float:
        """Spearman's, from -1 to 1; 0 if all predictions, or all measurements, are alike."""
        predicted = [pair.predicted_per_s for pair in self.comparisons]
        measured = [pair.measured_per_s for pair in self.comparisons]
        if len(set(predicted)) < 2 or len(set(measured)) < 2:
            return 0.0
        return float(spearmanr(predicted, measured).statistic)

    @property
    def is_trusted(self) -> bool:
        """Whether the adviser is to be heard."""
        return len(self.comparisons) >= FEWEST_TRIALS and self.rank_correlation >= LEAST_CORRELATION

    @property
    def _with_rates(self) -> list[Comparison]:
        return [pair for pair in self.comparisons if pair.measured_per_s > 0]


@dataclass
class _Observed:
    """What runs have shown of engines that differ in nothing but scheduler and memory."""

    facts: EngineFacts
    steps: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    model: FittedStepTime | None = None
    """Of the steps; None: to be fitted."""


class Adviser:
    """Predicts, remembers how well, and says what is not worth a measurement."""

    def __init__(self, slo: Slo, plan: LoadPlan, length: RunLength, seed: int = 0) -> None:
        """`plan` and `length`: of the runs on the device, which the simulated ones are like."""
        self.record = TrackRecord()
        self._slo = slo
        self._plan = plan
        self._length = length
        self._random = Random(seed)
        self._observed: dict[str, _Observed] = {}
        self._num_screened = 0
        """In a row."""
        self._num_at_last_suggestions = 0

    # --- what it learns from ---

    def learn(self, config: Config, facts: EngineFacts, steps: Sequence[TimedStep]) -> None:
        """Take in the steps of a run that nothing disturbed."""
        if not steps:
            return
        observed = self._observed.setdefault(_hardware_of(config), _Observed(facts))
        observed.facts = max(observed.facts, facts, key=_kv_tokens)
        observed.steps.extend(steps[::-(-len(steps) // _STEPS_OF_A_RUN)])
        observed.model = None

    def recall(self, trials: Iterable[Trial]) -> None:
        """Take in how good it was before the study was resumed."""
        for trial in trials:
            if trial.ending is Ending.measured and trial.repeats is None and SIMULATOR in trial.facts:
                predicted_per_s = trial.facts[SIMULATOR]["predicted_per_s"]
                self.record.comparisons.append(Comparison(predicted_per_s, trial.rate_per_s))

    # --- what it says ---

    def predict(self, config: Configuration, search: RateSearch) -> Prediction | None:
        """What a search for the highest rate would find. None: nothing like it has run, it is no
        configuration, or that of another server."""
        if not isinstance(config, Config):
            return None
        try:
            engine = self._engine(config)
        except ConfigError:
            return None
        if engine is None:
            return None
        search = replace(search, start_per_s=search.start_per_s / self.record.bias,
                         incumbent_per_s=search.incumbent_per_s / self.record.bias, proves_best=False)
        broken_first: tuple[str, ...] | None = None
        while (rate_per_s := search.next_rate()) is not None:
            broken = self._broken_at(rate_per_s, config, engine)
            broken_first = broken if broken_first is None else broken_first
            search.tell(rate_per_s, not broken, search.allowance.shortest_s(rate_per_s, not broken))
        return Prediction(search.held_per_s, broken_first or ())

    def screened_out(self, prediction: Prediction | None, incumbent_per_s: float) -> Outcome | None:
        """The outcome of a candidate that is not worth a measurement; None: it is. Asked once for each candidate.

        Of every promise that it is predicted to break, the outcome has the least violation that a count can show.
        """
        if not self.record.is_trusted or self._num_screened == MOST_SCREENED or prediction is None \
                or prediction.rate_per_s * self.record.bias >= HOPELESS_SHARE * incumbent_per_s:
            self._num_screened = 0
            return None
        self._num_screened += 1
        violations = {promise.name: self._least_violation(promise, promise.name in prediction.broken)
                      for promise in self._slo.promises}
        return Outcome(Ending.screened_out, violations=violations, facts=_described(prediction))

    def compared(self, prediction: Prediction | None, outcome: Outcome) -> Outcome:
        """The outcome of a measurement with the prediction beside it, which is remembered."""
        if prediction is None or outcome.ending is not Ending.measured:
            return outcome
        self.record.comparisons.append(Comparison(prediction.rate_per_s, outcome.rate_per_s))
        return replace(outcome, facts={**outcome.facts, **_described(prediction)})

    def suggestions(self, space: Space, assemble: Assemble, incumbent_per_s: float,
                    clock: Callable[[], float] = time.monotonic) -> list[Configuration]:
        """From time to time, while the adviser is trusted: of many random points those that should beat the incumbent.

        The best come first. What cannot be looked at in a few seconds is left out.
        """
        num_new = len(self.record.comparisons) - self._num_at_last_suggestions
        if not self.record.is_trusted or incumbent_per_s == 0 or num_new < SUGGEST_EVERY:
            return []
        self._num_at_last_suggestions = len(self.record.comparisons)
        predicted = sorted(self._ranked(space, assemble, incumbent_per_s, clock() + _RANKING_S, clock),
                           key=lambda found: -found[0])
        different = {config_hash(config): config for _, config in predicted}
        return list(different.values())[:NUM_SUGGESTIONS]

    def _ranked(self, space: Space, assemble: Assemble, incumbent_per_s: float, until_s: float,
                clock: Callable[[], float]) -> Iterator[tuple[float, Configuration]]:
        """Predicted rates of random points that hold at the incumbent's."""
        for _ in range(NUM_RANDOM_POINTS):
            if clock() > until_s:
                return
            point = {knob.key: _drawn(knob.domain, self._random) for knob in space.knobs}
            try:
                config = assemble(space.overrides(point))
            except ConfigError:
                continue
            prediction = self.predict(config, RateSearch(incumbent_per_s, max_losing_runs=1))
            if prediction is not None and prediction.rate_per_s > 0:
                yield prediction.rate_per_s, config

    # --- one simulated run ---

    def _broken_at(self, rate_per_s: float, config: Config, engine: EngineModel) -> tuple[str, ...]:
        """Promises that a run at this rate breaks; it ends with the first."""
        load = self._plan.load(rate_per_s, self._length.at(rate_per_s), _STREAM,
                               self._observed[_hardware_of(config)].facts.vocab_size)
        limits = Limits(num_requests=load.num_requests, warmup_requests=load.warmup_requests, timeout_s=load.timeout_s)
        simulation = Simulation(load.requests, engine.scheduler(config.scheduler), engine.step_time, limits)
        misses = [0] * len(self._slo.promises)
        for record in simulation.run():
            if record.is_warmup:
                continue
            latencies = None if record.failure else RequestLatencies.of(record.timeline)
            for i, promise in enumerate(self._slo.promises):
                misses[i] += promise.is_missed_by(latencies)
            if broken := self._broken(misses, load.num_requests):
                return broken
        return ()

    def _broken(self, misses: Sequence[int], num_requests: int) -> tuple[str, ...]:
        return tuple(promise.name for promise, missed in zip(self._slo.promises, misses, strict=True)
                     if missed > promise.misses_allowed(num_requests))

    def _engine(self, config: Config) -> EngineModel | None:
        """The engine of a configuration, with the memory of the largest one like it that has run. Raises ConfigError
        for settings that do not go together."""
        observed = self._observed.get(_hardware_of(config))
        if observed is None:
            return None
        observed.model = observed.model or FittedStepTime.fit(observed.steps)
        block_size_tokens = config.memory.block_size_tokens
        num_blocks = config.memory.num_kv_blocks or _kv_tokens(observed.facts) // block_size_tokens
        engine = EngineModel("fitted to the trials so far", observed.model, num_blocks, num_blocks, block_size_tokens,
                             min(observed.facts.max_model_len, num_blocks * block_size_tokens))
        engine.scheduler(config.scheduler)  # Said here, and not in the middle of a search.
        return engine

    def _least_violation(self, promise: Promise, is_broken: bool) -> float:
        """As `Tally.violation` has it, with one miss too many or none at all."""
        allowed = promise.misses_allowed(self._length.num_requests)
        return log((allowed + 1.5 if is_broken else 0.5) / (allowed + 0.5))


def describe(record: TrackRecord) -> str:
    """How good the predictions have been, in one line."""
    error = "nothing measured to compare with" if record.median_error is None else \
        f"median error {record.median_error:.0%}"
    told = f"{error}, rank correlation {record.rank_correlation:.2f} over {len(record.comparisons)} trials"
    if record.is_trusted:
        return f"{told}: it screens and proposes"
    if len(record.comparisons) < FEWEST_TRIALS:
        return f"{told}: not heard before {FEWEST_TRIALS}"
    return f"{told}, which is below {LEAST_CORRELATION:g}: switched off"


def _described(prediction: Prediction) -> dict[str, object]:
    return {SIMULATOR: {"predicted_per_s": prediction.rate_per_s, "breaks": list(prediction.broken)}}


def _hardware_of(config: Config) -> str:
    """What a step's time depends on beside its shape."""
    return repr((config.model, config.engine, config.memory.kv_dtype))


def _kv_tokens(facts: EngineFacts) -> int:
    return facts.num_kv_blocks * facts.block_size_tokens


def _drawn(domain: Domain, random: Random) -> Value:
    match domain:
        case Options(values) | Ladder(values):
            return random.choice(values)
        case Integers(low, high, is_log):
            return min(high, int(_between(low, high + 1, is_log, random)))
        case Reals(low, high, is_log):
            return min(high, max(low, _between(low, high, is_log, random)))


def _between(low: float, high: float, is_log: bool, random: Random) -> float:
    drawn = exp(random.uniform(log(low), log(high))) if is_log else random.uniform(low, high)
    assert isfinite(drawn)
    return drawn
