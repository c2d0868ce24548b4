"""The adviser, on synthetic engines: a model of step times that it does not know, and the scheduler itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from servekit.config.bench import BenchConfig, FixedWorkloadConfig, PoissonArrivalConfig
from servekit.config.compose import compose_serve
from servekit.config.schema import Config
from servekit.engine.messages import EngineFacts
from servekit.load.driver import Limits
from servekit.load.metrics import RequestLatencies
from servekit.sim.engine_model import EngineModel
from servekit.sim.fitted import TimedStep
from servekit.sim.simulation import Simulation
from servekit.sim.step_time import StepShape, step_shape
from servekit.tuner.adviser import (
    FEWEST_TRIALS,
    MOST_SCREENED,
    NUM_SUGGESTIONS,
    SIMULATOR,
    SUGGEST_EVERY,
    Adviser,
    Comparison,
    TrackRecord,
    describe,
)
from servekit.tuner.executor import RunLength
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Load
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.slo import parse_slo
from servekit.tuner.space import Integers, Knob, Ladder, Options, Reals, Space, Value
from servekit.tuner.study import Origin, Trial
from servekit.tuner.trial import Ending, Outcome

SLO = parse_slo({"ttft": {"p90": "1s"}, "tpot": {"p90": "40ms"}})
BENCH = BenchConfig(workload=FixedWorkloadConfig(prompt_tokens=64, output_tokens=12), arrival=PoissonArrivalConfig())
NUM_REQUESTS, VOCAB_SIZE = 60, 4000
LENGTH = RunLength(NUM_REQUESTS, min_s=1.0)
BATCH = "scheduler.max_num_seqs"


@dataclass(frozen=True)
class TrueEngine:
    """A device whose steps take what this says, for as long as the test runs."""

    token_s: float = 0.0004

    def step_s(self, shape: StepShape) -> float:
        return 0.004 + self.token_s * shape.num_tokens + 1e-7 * shape.decode_context_tokens


def config_of(num_seqs: int, *overrides: str) -> Config:
    return compose_serve(["model.source=dummy:tiny", "model.max_model_len=256", f"{BATCH}={num_seqs}",
                          *overrides]).config


def facts_of(config: Config) -> EngineFacts:
    return EngineFacts("tiny", 256, VOCAB_SIZE, 2000, config.memory.block_size_tokens, "cpu", "float32", "none",
                       "float32", "reference", 1, 0, 0, 0.0)


class Device:
    """Measures as the executor does, but on a virtual clock: other arrivals than the adviser's, other step times than
    those it has fitted."""

    def __init__(self, adviser: Adviser, plan: LoadPlan, truth: TrueEngine | None = None) -> None:
        self._adviser, self._plan = adviser, plan
        self._truth = truth or TrueEngine()
        self.incumbent_per_s = 0.0

    def search(self) -> RateSearch:
        return RateSearch(self.incumbent_per_s) if self.incumbent_per_s else RateSearch(4.0, max_losing_runs=6)

    def run(self, number: int, config: Config) -> Outcome:
        search, run = self.search(), 0
        while (rate_per_s := search.next_rate()) is not None:
            search.tell(rate_per_s, self._holds(config, rate_per_s, f"trial {number} run {run}"))
            run += 1
        self.incumbent_per_s = max(self.incumbent_per_s, search.held_per_s)
        violations = dict.fromkeys(SLO.names, -0.1 if search.held_per_s else 0.5)
        return Outcome(Ending.measured, search.held_per_s, violations, {"runs": run})

    def _holds(self, config: Config, rate_per_s: float, stream: str) -> bool:
        load = self._plan.load(rate_per_s, NUM_REQUESTS, stream, VOCAB_SIZE)
        engine, steps = EngineModel("true", self._truth, 2000, 0, config.memory.block_size_tokens, 256), []
        noise = random.Random(stream)
        simulation = Simulation(
            load.requests, engine.scheduler(config.scheduler), self._truth,
            Limits(num_requests=NUM_REQUESTS, warmup_requests=load.warmup_requests),
            lambda plan, start_s, end_s: steps.append(
                TimedStep(step_shape(plan), (end_s - start_s) * noise.uniform(0.95, 1.05))))
        latencies = [RequestLatencies.of(record.timeline) for record in simulation.run() if not record.is_warmup]
        self._adviser.learn(config, facts_of(config), steps)
        return SLO.holds(latencies)


@dataclass(frozen=True)
class RecordingPlan(LoadPlan):
    """A plan that keeps the names of the streams it was asked for."""

    streams: tuple[list[str], ...] = ([],)

    def load(self, rate_per_s: float, num_requests: int, stream: str, vocab_size: int) -> Load:
        self.streams[0].append(stream)
        return super().load(rate_per_s, num_requests, stream, vocab_size)


PLAN = LoadPlan(BENCH, seed=3, warmup_requests=2, timeout_s=60.0)


SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


def trained(sizes: Sequence[int] = SIZES) -> tuple[Adviser, Device, list[Outcome]]:
    """An adviser that has seen a trial of each batch size."""
    adviser = Adviser(SLO, PLAN, LENGTH)
    device, outcomes = Device(adviser, PLAN), []
    for number, size in enumerate(sizes):
        prediction = adviser.predict(config_of(size), device.search())
        outcomes.append(adviser.compared(prediction, device.run(number, config_of(size))))
    return adviser, device, outcomes


def best_of(outcomes: Sequence[Outcome]) -> int:
    """The size of the incumbent."""
    return max(zip(SIZES, outcomes, strict=True), key=lambda found: found[1].rate_per_s)[0]


def record_of(*pairs: tuple[float, float]) -> TrackRecord:
    return TrackRecord([Comparison(predicted, measured) for predicted, measured in pairs])


def with_record(adviser: Adviser, record: TrackRecord) -> Adviser:
    adviser.record = record
    return adviser


ALIKE = record_of(*((rate, rate) for rate in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)))
OPPOSITE = record_of(*((rate, 7 - rate) for rate in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)))


# --- how good it has been ---------------------------------------------------------------------------------------------

def test_error_bias_and_rank_correlation() -> None:
    record = record_of((1.0, 2.0), (2.0, 4.0), (3.0, 6.0), (0.0, 1.0), (1.0, 0.0))
    assert record.median_error == pytest.approx(0.5) and record.bias == pytest.approx(2.0)
    assert ALIKE.rank_correlation == pytest.approx(1.0) and OPPOSITE.rank_correlation == pytest.approx(-1.0)


def test_it_is_trusted_from_six_trials_and_a_correlation_of_0_6() -> None:
    assert ALIKE.is_trusted and not OPPOSITE.is_trusted
    assert not TrackRecord(ALIKE.comparisons[:FEWEST_TRIALS - 1]).is_trusted
    assert record_of((1, 1), (2, 3), (3, 2), (4, 5), (5, 4), (6, 6)).is_trusted
    assert not record_of((1, 4), (2, 1), (3, 5), (4, 2), (5, 3), (6, 6)).is_trusted


def test_predictions_that_are_all_alike_rank_nothing() -> None:
    assert record_of(*[(1.0, float(i)) for i in range(8)]).rank_correlation == 0.0
    assert record_of().median_error is None and record_of().bias == 1.0


def test_it_says_whether_it_is_heard() -> None:
    assert "screens" in describe(ALIKE) and "rank correlation 1.00 over 6 trials" in describe(ALIKE)
    assert "switched off" in describe(OPPOSITE)
    assert "not heard before 6" in describe(TrackRecord(ALIKE.comparisons[:3]))


# --- predictions ------------------------------------------------------------------------------------------------------

def test_nothing_is_predicted_before_anything_was_measured() -> None:
    assert Adviser(SLO, PLAN, LENGTH).predict(config_of(4), RateSearch(4.0)) is None


def test_predictions_come_close_to_what_the_device_does() -> None:
    adviser, _, outcomes = trained()
    assert len({outcome.rate_per_s for outcome in outcomes}) > 3, "the sizes must matter for this to show anything"
    assert len(adviser.record.comparisons) == len(outcomes) - 1, "the first came before any step was seen"
    assert adviser.record.rank_correlation >= 0.6 and adviser.record.is_trusted
    assert adviser.record.median_error is not None and adviser.record.median_error < 0.25


def test_a_prediction_is_kept_beside_the_measurement_and_does_not_change_it() -> None:
    _, _, outcomes = trained()
    again, alone = Adviser(SLO, PLAN, LENGTH), Device(Adviser(SLO, PLAN, LENGTH), PLAN)
    assert not again.record.comparisons
    for number, (size, outcome) in enumerate(zip(SIZES, outcomes, strict=True)):
        plain = alone.run(number, config_of(size))
        assert (outcome.rate_per_s, outcome.violations) == (plain.rate_per_s, plain.violations)
        assert (SIMULATOR in outcome.facts) is (number > 0)


def test_simulated_runs_have_arrivals_of_their_own() -> None:
    plan = RecordingPlan(BENCH, seed=3, warmup_requests=2, timeout_s=60.0, streams=([],))
    adviser = Adviser(SLO, plan, LENGTH)
    Device(adviser, PLAN).run(0, config_of(4))
    adviser.predict(config_of(8), RateSearch(4.0))
    assert set(plan.streams[0]) == {"simulated"} and len(plan.streams[0]) > 1


def test_other_threads_are_another_device() -> None:
    adviser, device, _ = trained((4,))
    assert adviser.predict(config_of(4, "engine.threads=2"), device.search()) is None
    assert adviser.predict(config_of(4, "memory.block_size_tokens=32"), device.search()) is not None


def test_settings_that_do_not_go_together_have_no_prediction() -> None:
    adviser, device, _ = trained((4,))
    refused = config_of(4, "scheduler/prefill=whole", "scheduler.max_step_tokens=128")
    assert adviser.predict(refused, device.search()) is None


def test_a_cache_that_is_too_small_is_seen() -> None:
    adviser, device, _ = trained((4, 8))
    roomy, tight = (adviser.predict(config_of(8, *memory), device.search())
                    for memory in ((), ("memory.num_kv_blocks=16",)))
    assert roomy is not None and tight is not None and tight.rate_per_s < roomy.rate_per_s


def test_what_was_learnt_before_a_restart_is_recalled() -> None:
    facts = {SIMULATOR: {"predicted_per_s": 2.0, "breaks": []}}
    trial = Trial(3, Origin.sampler, Ending.measured, {}, "abc", 3.0, {}, None, facts)
    others = [replace(trial, repeats=1), replace(trial, ending=Ending.screened_out), replace(trial, facts={})]
    adviser = Adviser(SLO, PLAN, LENGTH)
    adviser.recall([trial, *others])
    assert adviser.record.comparisons == [Comparison(2.0, 3.0)]


# --- screening --------------------------------------------------------------------------------------------------------

def hopeless() -> tuple[Adviser, Device]:
    adviser, device, _ = trained((4, 8))
    device.incumbent_per_s *= 4
    return with_record(adviser, ALIKE), device


def screened(adviser: Adviser, device: Device, size: int = 1) -> Outcome | None:
    prediction = adviser.predict(config_of(size), device.search())
    return adviser.screened_out(prediction, device.incumbent_per_s)


def test_a_hopeless_candidate_is_not_measured() -> None:
    outcome = screened(*hopeless())
    assert outcome is not None and outcome.ending is Ending.screened_out and outcome.rate_per_s == 0.0
    assert set(outcome.violations) == set(SLO.names)
    broken = {name for name, value in outcome.violations.items() if value > 0}
    assert broken == set(outcome.facts[SIMULATOR]["breaks"]) != set()
    assert max(outcome.violations.values()) < 0.3, "no more than the one miss too many that it surely has"


def test_the_best_candidate_is_measured() -> None:
    adviser, device, outcomes = trained()
    with_record(adviser, ALIKE)
    assert screened(adviser, device, best_of(outcomes)) is None


def test_nobody_is_screened_while_it_is_not_trusted() -> None:
    adviser, device = hopeless()
    for record in (OPPOSITE, TrackRecord(ALIKE.comparisons[:5]), TrackRecord()):
        assert screened(with_record(adviser, record), device) is None


def test_one_that_it_cannot_predict_is_measured() -> None:
    adviser, device = hopeless()
    assert adviser.screened_out(None, device.incumbent_per_s) is None


def test_after_some_in_a_row_one_is_measured_all_the_same() -> None:
    adviser, device = hopeless()
    kinds = [screened(adviser, device) is None for _ in range(2 * MOST_SCREENED + 2)]
    assert kinds == ([False] * MOST_SCREENED + [True]) * 2


def test_a_simulator_that_is_off_by_a_constant_factor_screens_as_well_as_another() -> None:
    """It says half of what the device does: the incumbent itself must not be screened for that."""
    adviser, device, outcomes = trained()
    pessimistic = record_of(*((pair.predicted_per_s, 2 * pair.measured_per_s) for pair in ALIKE.comparisons))
    with_record(adviser, pessimistic)
    device.incumbent_per_s *= 2
    assert screened(adviser, device, best_of(outcomes)) is None


# --- suggestions ------------------------------------------------------------------------------------------------------

SPACE = Space((Knob(BATCH, Ladder((1, 2, 8, 16))),), {BATCH: 1})


@cache
def composed(overrides: tuple[str, ...]) -> Config:
    return config_of(1, *overrides)


def assemble(overrides: Sequence[str]) -> Config:
    return composed(tuple(overrides))


def test_the_best_of_random_points_are_proposed_in_order() -> None:
    adviser, device, _ = trained((1, 2, 3, 4))
    with_record(adviser, ALIKE)
    found = adviser.suggestions(SPACE, assemble, device.incumbent_per_s, clock=counting_clock(0.3))
    assert 0 < len(found) <= NUM_SUGGESTIONS
    assert found[0].scheduler.max_num_seqs > 4, "which beats all that was tried"
    assert len({config.scheduler.max_num_seqs for config in found}) == len(found)
    assert adviser.suggestions(SPACE, assemble, device.incumbent_per_s) == [], "not again before there is news"
    adviser.record.comparisons += ALIKE.comparisons[:SUGGEST_EVERY]
    assert adviser.suggestions(SPACE, assemble, device.incumbent_per_s, clock=counting_clock(0.3))


def test_nothing_is_proposed_while_it_is_not_trusted() -> None:
    adviser, device, _ = trained((1,))
    assert with_record(adviser, OPPOSITE).suggestions(SPACE, assemble, device.incumbent_per_s) == []
    assert with_record(adviser, ALIKE).suggestions(SPACE, assemble, 0.0) == []


def counting_clock(step_s: float) -> Callable[[], float]:
    """A clock that moves by so much whenever it is looked at."""
    looks = [0]

    def clock() -> float:
        looks[0] += 1
        return looks[0] * step_s

    return clock


def test_random_points_lie_in_the_space() -> None:
    space = Space((Knob("a", Options(("x", "y"))), Knob("b", Ladder((1, 2, None))), Knob("c", Integers(3, 5)),
                   Knob("d", Integers(1, 1000, is_log=True)), Knob("e", Reals(0.5, 2.0)),
                   Knob("f", Reals(0.001, 10.0, is_log=True))))
    seen: list[Mapping[str, Value]] = []

    class Watched(Space):
        def overrides(self, point: Mapping[str, Value]) -> list[str]:
            seen.append(point)
            return []

    config, adviser = config_of(1), with_record(Adviser(SLO, PLAN, LENGTH), ALIKE)
    adviser.suggestions(Watched(space.knobs), lambda overrides: config, 1.0, clock=lambda: 0.0)
    assert len(seen) == 200
    assert all(knob.domain.contains(point[knob.key]) for point in seen for knob in space.knobs)
    assert {point["c"] for point in seen} == {3, 4, 5} and {point["b"] for point in seen} == {1, 2, None}
