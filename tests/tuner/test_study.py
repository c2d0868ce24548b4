"""The search on made-up objectives: nothing here starts an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from math import inf, log2, nan
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from servekit.config.errors import ConfigError
from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig
from servekit.config.resolve import config_hash
from servekit.config.schema import Config, ModelConfig, SchedulerConfig
from servekit.tuner.space import Condition, Integers, Knob, Ladder, Options, Reals, Space, Value
from servekit.tuner.study import (
    JOURNAL,
    NO_ANSWERS,
    RAN,
    Identity,
    Origin,
    SamplerKind,
    StudyOptions,
    TrialLost,
    TuningStudy,
    open_study,
    startup_trials,
    suggest,
    to_param,
)
from servekit.tuner.trial import Candidate, Ending, Outcome

SEQS, CHUNK = "scheduler.max_num_seqs", "scheduler.prefill.chunk_tokens"
CACHE, SHARE = "scheduler.prefix_cache.kind", "scheduler.prefix_cache.share_in_batch_tokens"
BASE = Config(ModelConfig("dummy:tiny"), scheduler=SchedulerConfig(max_num_seqs=64, max_step_tokens=1024))
START: dict[str, Value] = {SEQS: 64, CHUNK: 256, CACHE: "hash", SHARE: 32}
SPACE = Space((Knob(SEQS, Ladder((8, 16, 32, 64, 128, 256, 512, 1024))), Knob(CHUNK, Ladder((64, 128, 256, 512, None))),
               Knob(CACHE, Options(("none", "hash"))), Knob(SHARE, Ladder((16, 32, 64)), Condition(CACHE, ("hash",)))),
              START)
SMALL = Space((Knob(SEQS, Ladder((32, 64))), *SPACE.knobs[2:]), {key: START[key] for key in (SEQS, CACHE, SHARE)})
NUM_SMALL = 2 * (1 + 3)
PROMISES = ("ttft.p99", "tpot.p99")
IDENTITY = Identity(space="s", slo="o", workload="w", model="m", device="d")


def assemble(overrides: Sequence[str]) -> Config:
    """What compose would make of them, in less time."""
    values = dict(text.split("=") for text in overrides)
    scheduler = replace(BASE.scheduler, max_num_seqs=int(values[SEQS]))
    if CHUNK in values:
        chunk = None if values[CHUNK] == "null" else int(values[CHUNK])
        scheduler = replace(scheduler, prefill=ChunkedPrefillConfig(chunk_tokens=chunk))
    cache = (NoPrefixCacheConfig() if values["scheduler/prefix_cache"] == "none"
             else HashPrefixCacheConfig(share_in_batch_tokens=int(values[SHARE])))
    return replace(BASE, scheduler=replace(scheduler, prefix_cache=cache))


def measure(candidate: Candidate) -> Outcome:
    """A hill with its top at 128 requests and chunks of 256, and no memory for 1,024 requests."""
    scheduler = candidate.config.scheduler
    assert isinstance(scheduler.prefill, ChunkedPrefillConfig)
    if scheduler.max_num_seqs == 1024:
        return Outcome(Ending.out_of_memory_at_start)
    chunk = scheduler.prefill.chunk_tokens or 1024
    rate = 10 - (log2(scheduler.max_num_seqs) - 7) ** 2 / 4 - (log2(chunk) - 8) ** 2 / 4
    return Outcome(Ending.measured, max(0.0, rate), kept() if rate > 0 else broken())


def kept() -> dict[str, float]:
    return dict.fromkeys(PROMISES, -0.5)


def broken() -> dict[str, float]:
    return {PROMISES[0]: -0.5, PROMISES[1]: 0.7}


def opened(folder: Path, space: Space = SPACE, identity: Identity = IDENTITY,
           **options: Any) -> AbstractContextManager[TuningStudy]:
    return open_study(folder, StudyOptions(**options), identity, space, PROMISES, assemble)


def search(study: TuningStudy, count: int) -> list[Candidate]:
    """Measure up to so many candidates."""
    measured: list[Candidate] = []
    while len(measured) < count and (candidate := study.ask()):
        study.tell(candidate, measure(candidate))
        measured.append(candidate)
    return measured


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal need not survive a power cut here, and the GP's matrices are too small for threads."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    torch.set_num_threads(1)


def raw_trials(storage: BaseStorage | Path) -> list[optuna.trial.FrozenTrial]:
    """As Optuna has them."""
    if isinstance(storage, Path):
        storage = JournalStorage(JournalFileBackend(str(storage / JOURNAL)))
    return optuna.load_study(study_name="tune", storage=storage).trials


# --- what is asked for ------------------------------------------------------------------------------------------------

def test_the_base_and_the_rule_of_thumb_come_first(tmp_path: Path) -> None:
    thumb = assemble([f"{SEQS}=256", f"{CHUNK}=null", "scheduler/prefix_cache=none"])
    with opened(tmp_path) as study:
        assert study.enqueue(BASE, Origin.base)
        assert study.enqueue(thumb, Origin.rule_of_thumb)
        assert not study.enqueue(BASE, Origin.base), "it is queued"
        first, second, _third = search(study, 3)
        assert not study.enqueue(BASE, Origin.base), "it is measured"
        assert (first.config, second.config) == (BASE, thumb)
        assert (first.config_hash, first.values) == (config_hash(BASE), START)
        assert [trial.origin for trial in study.trials] == [Origin.base, Origin.rule_of_thumb, Origin.sampler]
        with pytest.raises(ConfigError, match="outside the search space"):
            study.enqueue(assemble([f"{SEQS}=65", f"{CHUNK}=64", "scheduler/prefix_cache=none"]), Origin.base)


@pytest.mark.parametrize("sampler", list(SamplerKind))
def test_nothing_is_measured_twice_and_everything_once(tmp_path: Path, sampler: SamplerKind) -> None:
    with opened(tmp_path, SMALL, sampler=sampler, num_startup_trials=4) as study:
        measured = search(study, 100)
        hashes = [candidate.config_hash for candidate in measured]
        assert len(set(hashes)) == len(hashes)
        assert len(hashes) == NUM_SMALL
        assert all(SHARE in candidate.values or candidate.values[CACHE] == "none" for candidate in measured)
        repeats = [trial for trial in study.trials if trial.repeats is not None]
        outcomes = {trial.number: trial for trial in study.trials}
        assert repeats
        for trial in repeats:
            twin = outcomes[trial.repeats]  # type: ignore[index]
            assert (trial.rate_per_s, trial.constraints, trial.config_hash, trial.ending) == (
                twin.rate_per_s, twin.constraints, twin.config_hash, twin.ending)
        assert not {trial.number for trial in repeats} & {trial.number for trial in study.shortlist(100)}


@pytest.mark.parametrize("sampler", list(SamplerKind))
def test_every_sampler_finds_the_top_region_and_suggests_every_knob(tmp_path: Path, sampler: SamplerKind) -> None:
    with opened(tmp_path, sampler=sampler, num_startup_trials=6, seed=3) as study:
        study.enqueue(BASE, Origin.base)
        search(study, 16)
        assert study.shortlist(1)[0].rate_per_s > 9.0
    for trial in raw_trials(tmp_path):
        assert list(trial.params) == [knob.key for knob in SPACE.knobs]


def test_settings_that_do_not_go_together_are_never_handed_out(tmp_path: Path) -> None:
    """max_step_tokens is 1,024, so 2,048 running requests are too many."""
    space = Space((Knob(SEQS, Ladder((64, 2048))), *SMALL.knobs[1:]), SMALL.start)
    with opened(tmp_path, space, sampler=SamplerKind.random) as study:
        assert {candidate.config.scheduler.max_num_seqs for candidate in search(study, 100)} == {64}
        illegal = [trial for trial in study.trials if trial.ending is Ending.illegal]
        assert illegal
        assert not any(trial.is_feasible for trial in illegal)
        assert "scheduler.max_step_tokens=1024" in illegal[0].facts["error"]


# --- what is told -----------------------------------------------------------------------------------------------------

ENDINGS = [Outcome(Ending.measured, 2.0, kept()), Outcome(Ending.stopped_early, 0.0, broken()),
           *(Outcome(ending) for ending in Ending if not ending.has_verdict and ending not in NO_ANSWERS)]


@pytest.mark.parametrize("outcome", ENDINGS, ids=lambda outcome: outcome.ending.name)
def test_every_answer_is_complete_with_all_constraints(tmp_path: Path, outcome: Outcome) -> None:
    with opened(tmp_path) as study:
        candidate = study.ask()
        assert candidate is not None
        study.tell(candidate, outcome)
        assert [trial.is_feasible for trial in study.trials] == [outcome.ending is Ending.measured]
    (trial,) = raw_trials(tmp_path)
    assert trial.state is TrialState.COMPLETE
    assert list(trial.constraints) == [RAN, *PROMISES]
    assert (min(trial.constraints.values()) > 0) is not outcome.ending.has_verdict
    assert trial.value == outcome.rate_per_s


def test_a_crash_never_wins(tmp_path: Path) -> None:
    """Optuna calls feasible, and takes for best, a trial that has a value and no constraint."""
    with opened(tmp_path) as study:
        for outcome in (Outcome(Ending.crashed), Outcome(Ending.measured, 1.0, kept()),
                        Outcome(Ending.measured, 5.0, broken())):
            candidate = study.ask()
            assert candidate is not None
            study.tell(candidate, outcome)
        assert [trial.rate_per_s for trial in study.shortlist(5)] == [1.0]
        assert study._study.best_trial.value == 1.0


def test_a_bad_measurement_is_repeated_once(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        study.enqueue(BASE, Origin.base)
        for _ in range(2):
            candidate = study.ask()
            assert candidate is not None
            assert candidate.config == BASE
            study.tell(candidate, Outcome(Ending.invalid, facts={"reason": "generator late"}))
        after = study.ask()
        assert after is not None
        assert (after.number, after.config == BASE) == (2, False)
        assert [(trial.ending, trial.origin, trial.is_feasible) for trial in study.trials] == [
            (Ending.invalid, Origin.base, False)] * 2
    assert [trial.state for trial in raw_trials(tmp_path)] == [TrialState.FAIL, TrialState.FAIL, TrialState.RUNNING]
    assert not any(trial.constraints for trial in raw_trials(tmp_path))


def test_what_was_abandoned_is_tried_again_as_often_as_it_takes(tmp_path: Path) -> None:
    for _ in range(3):
        with opened(tmp_path) as study:
            study.enqueue(BASE, Origin.base)
            candidate = study.ask()
            assert candidate is not None
            assert candidate.config == BASE
            study.tell(candidate, Outcome(Ending.abandoned))
    with opened(tmp_path) as study:
        assert [candidate.config == BASE for candidate in search(study, 2)] == [True, False]


def test_what_the_simulator_rules_out_is_learnt_from_and_is_no_measurement(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        candidate = study.ask()
        assert candidate is not None
        study.tell(candidate, Outcome(Ending.screened_out, 0.0, broken()))
        assert study.shortlist(5) == []
    (trial,) = raw_trials(tmp_path)
    assert (trial.state, trial.value, list(trial.constraints)) == (TrialState.PRUNED, None, [RAN, *PROMISES])


@pytest.mark.parametrize(("ending", "rate", "violations"), [
    (Ending.measured, nan, {"a": 0.0}), (Ending.measured, inf, {"a": 0.0}), (Ending.measured, 1.0, {"a": nan}),
    (Ending.measured, -1.0, {"a": 0.0}), (Ending.measured, 1.0, {}), (Ending.crashed, 0.0, {"a": 0.0})])
def test_an_outcome_that_would_poison_the_sampler_cannot_be_made(ending: Ending, rate: float,
                                                                 violations: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"finite|contradict"):
        Outcome(ending, rate, violations)


def test_an_outcome_of_other_promises_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        candidate = study.ask()
        assert candidate is not None
        with pytest.raises(ValueError, match="are not those of"):
            study.tell(candidate, Outcome(Ending.measured, 1.0, {"ttft.p99": 0.0}))
        study.tell(candidate, measure(candidate))


# --- ending and going on ----------------------------------------------------------------------------------------------

def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """The child dies with one trial measured, one running and one queued."""
    child = tmp_path / "child.py"
    child.write_text(f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_study import *
with opened(Path({str(tmp_path)!r})) as study:
    study.enqueue(BASE, Origin.base)
    search(study, 1)
    study.enqueue(assemble(["{SEQS}=32", "{CHUNK}=64", "scheduler/prefix_cache=none"]), Origin.rule_of_thumb)
    print(study.ask().config_hash)
    study.enqueue(assemble(["{SEQS}=16", "{CHUNK}=64", "scheduler/prefix_cache=none"]), Origin.simulator)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
""")
    killed = subprocess.run([sys.executable, child], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [trial.state for trial in raw_trials(tmp_path)] == [TrialState.COMPLETE, TrialState.RUNNING,
                                                               TrialState.WAITING]
    with opened(tmp_path) as study:
        assert not study.enqueue(BASE, Origin.base)
        queued, lost = search(study, 2)
        assert lost.config_hash == killed.stdout.strip()
        assert queued.config.scheduler.max_num_seqs == 16
        assert [trial.origin for trial in study.trials] == [Origin.base, Origin.simulator, Origin.rule_of_thumb]
    assert TrialState.RUNNING not in [trial.state for trial in raw_trials(tmp_path)]


def test_a_trial_killed_before_its_first_knob_is_tried_again_if_it_was_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        study.enqueue(BASE, Origin.base)
        study._study.ask()
    with opened(tmp_path) as study:
        study._study.ask()
    with opened(tmp_path) as study:
        candidate = study.ask()
        assert candidate is not None
        assert candidate.config == BASE


def test_a_trial_killed_while_it_is_told_is_measured_again(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        study.enqueue(BASE, Origin.base)
        candidate = study.ask()
        assert candidate is not None
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(optuna.Study, "tell", lambda *_, **__: sys.exit())
            with pytest.raises(SystemExit):
                study.tell(candidate, measure(candidate))
    with opened(tmp_path) as study:
        assert study.trials == []
        assert study.shortlist(5) == []
        assert [candidate.config == BASE for candidate in search(study, 1)] == [True]


def test_a_new_start_does_not_repeat_the_first_ones_draws(tmp_path: Path) -> None:
    wide = Space((Knob(SEQS, Integers(1, 1000)), *SPACE.knobs[2:]), SMALL.start)
    drawn = []
    for _ in range(3):
        with opened(tmp_path, wide, sampler=SamplerKind.random) as study:
            drawn.append([candidate.config.scheduler.max_num_seqs for candidate in search(study, 5)])
            assert not any(trial.repeats is not None for trial in study.trials)
    assert len({tuple(draws) for draws in drawn}) == 3
    with opened(tmp_path / "again", wide, sampler=SamplerKind.random) as study:
        assert [candidate.config.scheduler.max_num_seqs for candidate in search(study, 5)] == drawn[0], "same seed"


def test_one_process_at_a_time_in_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another process is tuning there"), opened(tmp_path):
        pass
    with opened(tmp_path) as study:
        assert search(study, 1)


@pytest.mark.parametrize("part", [part.name for part in fields(Identity)])
def test_a_study_of_something_else_is_refused_and_left_alone(tmp_path: Path, part: str) -> None:
    with opened(tmp_path) as study:
        search(study, 2)
    before = (tmp_path / JOURNAL).read_bytes()
    other = Identity(**{**asdict(IDENTITY), part: "else"})
    own = asdict(IDENTITY)[part]
    with (pytest.raises(ConfigError, match=f"study.name=tune: was made for another {part}: {own}, not else; choose"),
          opened(tmp_path, identity=other)):
        pass
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_a_study_that_is_not_the_tuners_is_refused(tmp_path: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / JOURNAL)))
    optuna.create_study(study_name="tune", storage=storage, direction="maximize").add_trial(
        optuna.trial.create_trial(value=1.0))
    with pytest.raises(ConfigError, match="was made for another space: None"), opened(tmp_path):
        pass


# --- several processes that share a database --------------------------------------------------------------------------

def test_two_processes_share_a_study(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    with opened(tmp_path, SMALL, storage=url) as one, opened(tmp_path, SMALL, storage=url) as two:
        ours, theirs = one.ask(), two.ask()
        assert ours is not None
        assert theirs is not None
        assert ours.config_hash != theirs.config_hash, "what runs elsewhere is not run here"
        one.tell(ours, measure(ours))
        two.tell(theirs, measure(theirs))
        rest = search(one, 2) + search(two, 2)
        hashes = [candidate.config_hash for candidate in (ours, theirs, *rest)]
        assert len(set(hashes)) == len(hashes)
        assert one.trials == two.trials


def test_only_time_tells_that_a_process_elsewhere_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    with opened(tmp_path, storage=url, trial_timeout_s=60.0) as one:
        one.enqueue(BASE, Origin.base)
        lost = one.ask()
        assert lost is not None
        with opened(tmp_path, storage=url, trial_timeout_s=60.0) as two:
            assert two.ask() is not None
            import time
            now_s = time.time()
            monkeypatch.setattr(time, "time", lambda: now_s + 61)
            again = two.ask()
            assert again is not None
            assert again.config == BASE
            two.tell(again, measure(again))
        with pytest.raises(TrialLost, match="given up after 60 s"):
            one.tell(lost, measure(lost))
    states = [trial.state for trial in raw_trials(RDBStorage(url))]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.COMPLETE]


@pytest.mark.parametrize(("url", "message"), [
    ("nonsense", r"study.storage=...: is not the URL of a database"),
    ("nosuch://user:secret@host/db", r"study.storage=nosuch://user:\*\*\*@host/db: cannot be used: .*nosuch"),
    ("sqlite:////no/such/folder/study.db", "study.storage=sqlite:////no/such/folder/study.db: cannot be used"),
])
def test_a_database_that_cannot_be_used_is_refused_without_its_password(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised, opened(tmp_path, storage=url):
        pass
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


# --- parts ------------------------------------------------------------------------------------------------------------

DOMAINS = [(Options(("a", None, True)), st.sampled_from(["a", None, True])),
           (Ladder((1, 3, None)), st.sampled_from([1, 3, None])), (Integers(2, 9, is_log=True), st.integers(2, 9)),
           (Reals(0.5, 2.0), st.floats(0.5, 2.0))]


@given(st.sampled_from(DOMAINS).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1])))
def test_a_parameter_stands_for_its_value(drawn: tuple[Any, Value]) -> None:
    domain, value = drawn
    knob = Knob("k", domain)
    got = suggest(optuna.trial.FixedTrial({"k": to_param(knob, value)}), knob)  # type: ignore[arg-type]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(("budget", "startup"), [(1, 1), (3, 2), (5, 4), (12, 5), (24, 8), (100, 10)])
def test_a_sampler_always_gets_to_learn(budget: int, startup: int) -> None:
    assert startup_trials(budget) == startup


