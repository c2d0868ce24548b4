"""Candidates on real engine processes: hot where weights can stay, cold where not, and whatever a candidate does."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import CACHE_DIR, dummy_model
from servekit.config.bench import BenchConfig, FixedWorkloadConfig, PoissonArrivalConfig
from servekit.config.compose import compose_serve
from servekit.config.resolve import config_hash
from servekit.tuner import executor as tuner_executor
from servekit.tuner import measure
from servekit.tuner.engine_host import EngineHost
from servekit.tuner.executor import EngineFailed, RunLength, TrialExecutor
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Measurement, Problem, Tolerance
from servekit.tuner.rate_search import Allowance
from servekit.tuner.run_log import read_run
from servekit.tuner.slo import Slo, parse_slo
from servekit.tuner.study import Origin, Trial
from servekit.tuner.trial import Candidate, Ending, Outcome
from servekit.tuner.verdict import Verdict

BASE = ("model.source=dummy:tiny", "model.max_model_len=256", "engine.threads=1", "memory.num_kv_blocks=256")
LOOSE, IMPOSSIBLE = parse_slo({"ttft": {"p50": "60s"}}), parse_slo({"ttft": {"p50": "1us"}, "tpot": {"p50": "60s"}})
BENCH = BenchConfig(workload=FixedWorkloadConfig(prompt_tokens=32, output_tokens=6), arrival=PoissonArrivalConfig())
QUIET_ENOUGH = Tolerance(busy_share=None, slowdown=None)


def make_executor(folder: Path, slo: Slo, host: EngineHost | None = None) -> TrialExecutor:
    executor = TrialExecutor(host or EngineHost(dummy_model(), CACHE_DIR), slo, LoadPlan(BENCH, 5, 1, 60.0),
                             RunLength(12, 0.0), folder, QUIET_ENOUGH)
    executor.start_per_s = 50.0
    return executor


@pytest.fixture
def host() -> EngineHost:
    return EngineHost(dummy_model(), CACHE_DIR)


@pytest.fixture
def executor(tmp_path: Path, host: EngineHost) -> Iterator[TrialExecutor]:
    executor = make_executor(tmp_path, LOOSE, host)
    yield executor
    executor.close()


def candidate(number: int, *overrides: str) -> Candidate:
    config = compose_serve([*BASE, *overrides]).config
    return Candidate(number, {}, overrides, config, config_hash(config))


def warmth(outcome: Outcome) -> str:
    assert outcome.ending is Ending.measured, outcome.facts
    return str(outcome.facts["warm"])


def engine_processes() -> list[int]:
    """Processes of engines that this one has started."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "servekit.engine.process"], capture_output=True,
                           text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def test_an_engine_lives_as_long_as_its_weights_can_stay(executor: TrialExecutor, host: EngineHost) -> None:
    assert warmth(executor.run(candidate(0))) == "cold"
    (first,) = engine_processes()
    assert warmth(executor.run(candidate(1, "scheduler.max_num_seqs=3", "memory.block_size_tokens=8"))) == "hot"
    assert engine_processes() == [first]
    assert warmth(executor.run(candidate(2, "engine.threads=2"))) == "cold"
    assert engine_processes() != [first]
    host.always_cold = lambda: frozenset({"scheduler.max_num_seqs"})
    assert warmth(executor.run(candidate(3, "engine.threads=2", "scheduler.max_num_seqs=3"))) == "cold"
    assert warmth(executor.run(candidate(4, "engine.threads=2", "scheduler.max_num_seqs=3",
                                         "scheduler.max_step_tokens=384"))) == "hot"


def test_the_log_of_every_run_is_kept(executor: TrialExecutor, tmp_path: Path) -> None:
    outcome = executor.run(candidate(7))
    runs = [read_run(tmp_path / run["log"]) for run in outcome.facts["runs"]]
    assert [run.stream for run in runs] == [f"trial 7 run {i}" for i in range(len(runs))]
    assert [run.rate_per_s for run in runs] == [run["rate_per_s"] for run in outcome.facts["runs"]]
    assert all(run.config_hash == candidate(7).config_hash for run in runs)
    held = [run.rate_per_s for run in runs if run.verdict == Verdict.holds.value]
    assert outcome.rate_per_s == max(held) == executor.incumbent_per_s
    assert sum(outcome.facts["bound"].values()) > 0


def test_the_incumbent_is_where_the_next_one_begins(executor: TrialExecutor) -> None:
    first, second = executor.run(candidate(0)), executor.run(candidate(1, "scheduler.max_num_seqs=3"))
    assert first.facts["runs"][0]["rate_per_s"] == 50.0
    assert second.facts["runs"][0]["rate_per_s"] == first.rate_per_s > 50.0


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the runs with these numbers, from 0, be measured on a busy machine."""
    def disturb(*numbers: int) -> None:
        count = itertools.count()

        async def measured(*arguments: Any, **named: Any) -> Measurement:
            found = await measure.measure(*arguments, **named)
            return replace(found, problems=(Problem.machine_busy,) if next(count) in numbers else ())

        monkeypatch.setattr(tuner_executor, "measure", measured)
    return disturb


def test_a_run_that_is_disturbed_is_made_again_on_new_arrivals(executor: TrialExecutor, disturb: Callable[..., None]
                                                               ) -> None:
    disturb(0, 2)
    outcome = executor.run(candidate(7))
    first, again, second, second_again = outcome.facts["runs"][:4]
    assert outcome.ending is Ending.measured and outcome.rate_per_s > 0
    assert first["rate_per_s"] == again["rate_per_s"] < second["rate_per_s"] == second_again["rate_per_s"]
    assert [bool(run["problems"]) for run in (first, again, second, second_again)] == [True, False] * 2
    streams = [read_run(executor.runs_folder / run["log"]).stream for run in outcome.facts["runs"]]
    assert len(set(streams)) == len(streams)


def test_a_run_that_is_disturbed_twice_makes_its_trial_invalid(executor: TrialExecutor, disturb: Callable[..., None]
                                                               ) -> None:
    disturb(0, 2, 3)
    outcome = executor.run(candidate(7))
    assert outcome.ending is Ending.invalid and outcome.rate_per_s == executor.incumbent_per_s == 0
    assert len(outcome.facts["runs"]) == 4 and outcome.facts["problems"] == [Problem.machine_busy.value]


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an objective of a microsecond a load generator counts as late soon, which it may be beside other tests."""
    monkeypatch.setattr(measure, "_LAG_LIMIT_S", 60.0)


@pytest.mark.usefixtures("unhurried")
def test_what_holds_nowhere_says_which_promise_is_broken(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, IMPOSSIBLE)
    try:
        outcome = executor.run(candidate(0))
        assert outcome.ending is Ending.measured and outcome.rate_per_s == 0 and executor.incumbent_per_s == 0
        assert outcome.violations["ttft.p50"] > 0 >= outcome.violations["tpot.p50"]
    finally:
        executor.close()


@pytest.mark.usefixtures("unhurried")
def test_until_something_holds_the_next_one_begins_lower_but_not_as_low_as_the_last_one_ended(tmp_path: Path) -> None:
    """Its share of the time allows two runs, of which the second is given up; the third would be too low anyway."""
    executor = make_executor(tmp_path, IMPOSSIBLE)
    executor.allowance = Allowance(losing_s=0.4, most_s=60.0, requests_to_fail=8, requests_to_hold=600)
    try:
        outcome = executor.run(candidate(0))
        rates = [run["rate_per_s"] for run in outcome.facts["runs"]]
        assert rates[0] == 50.0 and outcome.ending is Ending.measured and outcome.facts["is_out_of_time"]
        assert outcome.violations["ttft.p50"] > 0
        lower_per_s = max(10.0, outcome.facts["lower_per_s"])
        assert lower_per_s < min(rates)
        assert executor.start_per_s == pytest.approx(sqrt(50.0 * lower_per_s))
        expected = executor.start_per_s
        executor.begin(50.0, [trial_of(outcome)])
        assert executor.start_per_s == expected, "the same after an interruption"
        executor.begin(50.0, [trial_of(outcome), trial_of(replace(outcome, rate_per_s=20.0))])
        assert executor.rate_search().start_per_s == 20.0, "what holds is a better beginning than what fails"
        executor.begin(50.0, [trial_of(outcome), trial_of(replace(outcome, rate_per_s=2.0))])
        assert executor.rate_search().start_per_s == pytest.approx(sqrt(2.0 * executor.start_per_s)), "2 is very low"
    finally:
        executor.close()


def trial_of(outcome: Outcome) -> Trial:
    return Trial(0, Origin.base, outcome.ending, {}, "", outcome.rate_per_s, outcome.violations, None, outcome.facts)


def test_settings_that_the_engine_refuses_are_illegal_and_it_goes_on(executor: TrialExecutor) -> None:
    refused = candidate(1, "scheduler/prefill=whole", "scheduler.max_step_tokens=128")
    assert executor.run(refused).ending is Ending.illegal, "on a fresh engine"
    assert engine_processes() == []
    assert warmth(executor.run(candidate(2))) == "cold"
    outcome = executor.run(refused)
    assert outcome.ending is Ending.illegal and "scheduler.max_step_tokens" in outcome.facts["error"]
    assert warmth(executor.run(candidate(3))) == "hot"


def test_what_does_not_fit_the_memory_is_out_of_memory(executor: TrialExecutor) -> None:
    huge = candidate(1, "memory.num_kv_blocks=1000000000")
    for _ in range(2):
        outcome = executor.run(huge)
        assert outcome.ending is Ending.out_of_memory_at_start and "memory.num_kv_blocks" in outcome.facts["error"]
        assert executor.run(candidate(2)).ending is Ending.measured


def test_an_engine_that_dies_under_load_ends_its_trial_only(executor: TrialExecutor, tmp_path: Path) -> None:
    assert warmth(executor.run(candidate(0))) == "cold"
    num_logs = len(list(tmp_path.glob("*.json")))

    def kill_after_the_first_run() -> None:
        while len(list(tmp_path.glob("*.json"))) == num_logs:
            time.sleep(0.005)
        for process_id in engine_processes():
            os.kill(process_id, signal.SIGKILL)

    killer = threading.Thread(target=kill_after_the_first_run)
    killer.start()
    outcome = executor.run(candidate(1, "scheduler.max_num_seqs=3"))
    killer.join()
    assert outcome.ending is Ending.crashed and outcome.facts["error"]
    assert warmth(executor.run(candidate(2))) == "cold"


def test_an_engine_that_died_between_trials_is_started_again(executor: TrialExecutor) -> None:
    executor.run(candidate(0))
    for process_id in engine_processes():
        os.kill(process_id, signal.SIGKILL)
    assert warmth(executor.run(candidate(1))) == "cold"


def test_an_engine_that_takes_too_long_to_start_is_hung(executor: TrialExecutor) -> None:
    assert executor.run(candidate(0, "engine.startup_timeout_s=1")).ending is Ending.hung
    assert engine_processes() == []


def test_a_single_measurement_raises_what_a_trial_would_tell(executor: TrialExecutor) -> None:
    with pytest.raises(EngineFailed) as caught:
        executor.describe(candidate(0, "memory.num_kv_blocks=1000000000").config)
    assert caught.value.ending is Ending.out_of_memory_at_start
    measured, path = executor.measure_at(candidate(0).config, 40.0, 12, "alone", cold=True, stops_early=False)
    assert measured.holds and len(read_run(path).measured) == 12


def test_nothing_is_left_running(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, LOOSE)
    executor.describe(candidate(0).config)
    assert len(engine_processes()) == 1
    executor.close()
    assert engine_processes() == []


def test_a_run_lasts_but_not_longer_than_its_trace() -> None:
    assert [RunLength(100, 10.0).at(rate) for rate in (1.0, 10.0, 30.5)] == [100, 100, 305]
    assert [RunLength(100, 10.0, available=200).at(rate) for rate in (1.0, 15.0, 30.5)] == [100, 150, 200]
