"""Each knob of a winner put back by itself, on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError
from servekit.config.schema import Config
from servekit.tuner.executor import EngineFailed
from servekit.tuner.reverts import STREAM, Revert, describe_revert, knobs_to_put_back, put_back
from servekit.tuner.space import Condition, Knob, Ladder, Options, Reals, Space, Value
from servekit.tuner.trial import Ending
from tuner_runs import SLO, FakeEngine

SEQS, POLICY = "scheduler.max_num_seqs", "scheduler.policy.kind"
WEIGHT, TOKENS = "scheduler.policy.prefill_weight", "scheduler.max_step_tokens"
BASE = ("model.source=dummy:tiny", f"{SEQS}=8")
SPACE = Space((Knob(WEIGHT, Reals(0.1, 1.0), Condition(POLICY, ("sjf",))), Knob(SEQS, Ladder((8, 16))),
               Knob(POLICY, Options(("fifo", "sjf"))), Knob(TOKENS, Ladder((256, 512)))),
              {WEIGHT: 0.5, SEQS: 8, POLICY: "fifo", TOKENS: 512})
WINNER: dict[str, Value] = {WEIGHT: 0.7, SEQS: 16, POLICY: "sjf", TOKENS: 512}


def assemble(overrides: Sequence[str]) -> Config:
    return compose_serve([*BASE, *overrides]).config


def capacity(config: Config) -> float:
    return 10.0 if config.scheduler.max_num_seqs == 16 else 3.0


def reverted(engine: FakeEngine, left_s: float = 1e9) -> list[Revert]:
    return list(put_back(SPACE, WINNER, assemble, SLO, engine, 6.0, 60, lambda: left_s))  # type: ignore[arg-type]


def test_only_what_differs_is_put_back_and_components_come_first() -> None:
    assert knobs_to_put_back(SPACE, WINNER) == [SEQS, POLICY, WEIGHT]
    assert knobs_to_put_back(SPACE, dict(SPACE.start)) == []


def test_the_knob_that_carries_the_load_is_found(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    found = {revert.knob: revert for revert in reverted(engine)}
    assert {knob: revert.holds for knob, revert in found.items()} == {"": True, SEQS: False, POLICY: True, WEIGHT: True}
    assert found[SEQS].misses["ttft.p95"] > 0.5 and (found[SEQS].winner, found[SEQS].default) == (16, 8)
    assert {stream for *_, stream in engine.calls} == {STREAM}, "all have the same requests"
    assert describe_revert(found[SEQS]).startswith(f"{SEQS}=8 instead of 16: fails; ttft.p95 missed by ")


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    assert reverted(engine, left_s=9.9) == [] and engine.calls == []


def test_what_does_not_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, measure_at = FakeEngine(tmp_path, capacity), FakeEngine.measure_at

    def dies(self: FakeEngine, config: Config, *words: object, **named: object) -> object:
        if config.scheduler.max_num_seqs == 8:
            raise EngineFailed(Ending.crashed, "it died")
        return measure_at(self, config, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "measure_at", dies)
    found = {revert.knob: revert for revert in reverted(engine)}
    assert found[SEQS].holds is None and "not measured (it died)" in describe_revert(found[SEQS])
    assert found[POLICY].holds


def test_what_cannot_be_composed_is_said(tmp_path: Path) -> None:
    def refuses(overrides: Sequence[str]) -> Config:
        if any(word.endswith("fifo") for word in overrides):
            raise ConfigError(POLICY, "fifo", "does not go together", "choose another")
        return assemble(overrides)

    found = {revert.knob: revert for revert in put_back(
        SPACE, WINNER, refuses, SLO, FakeEngine(tmp_path, capacity), 6.0, 60, lambda: 1e9)}  # type: ignore[arg-type]
    assert found[POLICY].holds is None and "does not go together" in found[POLICY].note
