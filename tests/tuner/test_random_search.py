"""`compare: [random]`: a random search that takes as long as the search did, and its best beside the tuned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from servekit.config.compose import compose_serve
from servekit.config.schema import Config
from servekit.tuner import settings
from servekit.tuner.command import LARGE_STEPS, RANDOM, SHORT_STEPS, Clock, _enqueue_known, _search_at_random
from servekit.tuner.confirmation import Finalist
from servekit.tuner.default_space import Facts
from servekit.tuner.grammar import parse_space
from servekit.tuner.judgement import Role
from servekit.tuner.outcome import _finalists, _rivals_s
from servekit.tuner.settings import Settings, read_settings
from servekit.tuner.space import Knob, Ladder, Space
from servekit.tuner.study import Identity, Origin, Trial, TuningStudy, open_study
from servekit.tuner.trial import Candidate, Ending, Outcome

SEQS = "scheduler.max_num_seqs"
SPACE = Space((Knob(SEQS, Ladder((1, 2, 4, 8, 16, 32, 64, 128))),), {SEQS: 8})
IDENTITY = Identity(space="s", slo="o", workload="w", model="m", device="d")
TRIAL_S, SEARCHED = 10.0, 4
"""What a trial says that it took, and how many of the search there are."""
FILE = """\
slo: {ttft: {p90: 2s}}
workload: {name: fixed, prompt_tokens: 24, output_tokens: 4}
base: {model: {source: "dummy:tiny"}, scheduler.max_num_seqs: 8}
folder: FOLDER
"""


@dataclass
class MadeUp:
    """An executor that measures nothing: the more requests run at once, the better, up to a limit."""

    most_seqs: int = 64
    """Above it, nothing holds; nor does anything if it is 0."""
    began: list[tuple[float, int]] = field(default_factory=list)
    """Where a study began, and how many trials it had."""
    measured: list[int] = field(default_factory=list)
    searched: list[int] = field(default_factory=list)
    """What the search had measured."""

    def begin(self, start_per_s: float, trials: Iterable[Trial]) -> None:
        self.began.append((start_per_s, len(list(trials))))

    def run(self, candidate: Candidate) -> Outcome:
        assert isinstance(candidate.config, Config)
        seqs = candidate.config.scheduler.max_num_seqs
        self.measured.append(seqs)
        holds = seqs <= self.most_seqs
        return Outcome(Ending.measured, seqs / 8 if holds else 0.0, {"ttft.p90": -0.5 if holds else 0.5},
                       {"duration_s": TRIAL_S, "runs": [{"rate_per_s": 1.0}], "is_out_of_time": False})


@cache
def composed(overrides: tuple[str, ...]) -> Any:
    return compose_serve(overrides)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal need not survive a power cut here, and few configurations are composed again and again."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(settings, "compose_serve", lambda overrides: composed(tuple(overrides)))


def read(folder: Path, *words: str) -> Settings:
    (folder / "tune.yaml").write_text(FILE.replace("FOLDER", str(folder / "study")))
    return read_settings(folder / "tune.yaml", words)


@contextmanager
def searched(tuning: Settings, executor: MadeUp) -> Iterator[TuningStudy]:
    """A study in which the search has had its trials, the default first."""
    with open_study(tuning.folder, tuning.study, IDENTITY, SPACE, ("ttft.p90",), tuning.assemble) as study:
        study.enqueue(tuning.base, Origin.base)
        while len(executor.measured) < SEARCHED and (candidate := study.ask()) is not None:
            study.tell(candidate, executor.run(candidate))
        executor.searched, executor.measured = executor.measured, []
        yield study


def at_random(tuning: Settings, executor: MadeUp, study: TuningStudy) -> Finalist | None:
    return _search_at_random(tuning, executor, study, IDENTITY, SPACE, 3.0, Console(quiet=True))  # type: ignore[arg-type]


def test_it_takes_as_long_as_the_search_and_its_best_is_a_finalist(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path, "compare=[random]"), MadeUp()
    with searched(tuning, executor) as study:
        known = study.trials
        found = at_random(tuning, executor, study)
        assert study.trials == known, "it has a study of its own"
    assert len(executor.measured) == SEARCHED and len(set(executor.measured)) == SEARCHED
    assert executor.measured[1:] != executor.searched[1:], "the search began at random too, after the default"
    assert executor.measured[:3] != executor.searched[1:]
    assert executor.began == [(3.0, 0)], "it knows nothing of what the search has found"
    assert found is not None and (found.name, found.role) == ("random", Role.random)
    best = max(seqs for seqs in executor.measured if seqs <= executor.most_seqs)
    assert isinstance(found.config, Config)
    assert found.config.scheduler.max_num_seqs == best
    assert (found.rate_per_s, found.overrides) == (best / 8, (f"{SEQS}={best}",))


def test_after_an_interruption_it_goes_on_and_does_not_begin_again(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path, "compare=[random]"), MadeUp()
    with searched(tuning, executor) as study:
        first = at_random(tuning, executor, study)
        executor.measured.clear()
        assert at_random(tuning, executor, study) == first
    assert executor.measured == [] and executor.began[0] == (3.0, 0)
    assert executor.began[1][1] >= SEARCHED, "it is told what it has found before"


def test_whoever_does_not_ask_for_it_does_not_get_it(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path), MadeUp()
    with searched(tuning, executor) as study:
        assert at_random(tuning, executor, study) is None
    assert executor.measured == [] and not (tuning.folder / RANDOM).exists()


def test_where_nothing_held_there_is_nobody_to_compare_with(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path, "compare=[random]"), MadeUp(most_seqs=0)
    with searched(tuning, executor) as study:
        assert at_random(tuning, executor, study) is None
    assert len(executor.measured) == SEARCHED


def test_it_is_measured_again_unless_it_is_there_under_another_name(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path, "compare=[random]"), MadeUp(most_seqs=128)
    with searched(tuning, executor) as study:
        tuned = study.shortlist(1)[0].values[SEQS]
        default = Finalist("random", Role.random, tuning.base, 1.0)
        other = Finalist("random", Role.random, tuning.assemble([f"{SEQS}=100"]), 1.0)
        same = Finalist("random", Role.random, tuning.assemble([f"{SEQS}={tuned}"]), 1.0)
        assert names(_finalists(tuning, study, other))[-2:] == ["default", "random"]
        assert "random" not in names([*_finalists(tuning, study, same), *_finalists(tuning, study, default)])
        assert _rivals_s(tuning, _finalists(tuning, study, other)) == tuning.budget.rival_s == 20 * 60 * 0.4 / 2
        assert _rivals_s(tuning, _finalists(tuning, study, same)) == 0.0


def test_a_default_that_held_nothing_begins_where_it_failed_last(tmp_path: Path) -> None:
    tuning, executor = read(tmp_path), MadeUp(most_seqs=4)
    with searched(tuning, executor) as study:
        finalists = _finalists(tuning, study, None)
        assert min(trial.rate_per_s for trial in study.shortlist(3)) < 1.0, "that is not why"
    assert [found.rate_per_s for found in finalists if found.role is Role.default] == [1.0]


def names(finalists: Sequence[Finalist]) -> list[str]:
    return [finalist.name for finalist in finalists]


def test_its_time_is_not_taken_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    clock = Clock(started_s=100.0, budget_s=60.0)
    now_s[0] += 20.0
    with clock.stopped():
        now_s[0] += 1000.0
    assert clock.left_s() == 40.0


def test_what_the_craft_begins_with_is_within_the_default_space_and_comes_first(tmp_path: Path) -> None:
    """None of it is left out, unless the space is the user's own."""
    tuning = read(tmp_path, "base={model: {source: 'dummy:tiny'}}")
    assert isinstance(tuning.base, Config)
    space = parse_space("default", tuning.base, Facts(cores=2, is_gpu=False, max_model_len=2048))
    with open_study(tuning.folder, tuning.study, IDENTITY, space, ("ttft.p90",), tuning.assemble) as study:
        _enqueue_known(tuning, study)
        asked = [candidate.config for candidate in (study.ask(), study.ask(), study.ask()) if candidate is not None]
    assert asked == [tuning.base, tuning.assemble(SHORT_STEPS), tuning.assemble(LARGE_STEPS)], "the base is the rule"
