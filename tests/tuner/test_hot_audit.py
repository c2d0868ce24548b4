"""Which trials are repeated cold, and which knobs are demoted for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.tuner.hot_audit import HotAudit, Repeat, changed_knobs
from servekit.tuner.space import Integers, Knob, Options, Space, Warmth

BATCH, CHUNK, THREADS = "scheduler.max_num_seqs", "scheduler.prefill.chunk_tokens", "engine.threads"
SPACE = Space((Knob(BATCH, Integers(1, 64)), Knob(CHUNK, Integers(16, 512)),
               Knob(THREADS, Options((1, 2)), warmth=Warmth.cold)))


def repeat(difference: float, *changed: str) -> Repeat:
    return Repeat(changed, hot_tpot_s=0.010 * (1 + difference), cold_tpot_s=0.010)


def audit_of(*repeats: Repeat) -> HotAudit:
    return HotAudit(SPACE, seed=0, repeats=list(repeats))


def run(seed: int, num_trials: int) -> list[bool]:
    """For each of so many hot trials, whether it was repeated."""
    audit, due = HotAudit(SPACE, seed), []
    for _ in range(num_trials):
        due.append(audit.is_due())
        if due[-1]:
            audit.take(repeat(0.0))
    return due


@given(seed=st.integers(0, 1000), num_trials=st.integers(1, 60))
def test_one_of_every_five_is_repeated(seed: int, num_trials: int) -> None:
    due = run(seed, num_trials)
    blocks = [due[i:i + 5] for i in range(0, len(due), 5)]
    assert all(sum(block) == 1 for block in blocks if len(block) == 5)


def test_which_one_it_is_depends_on_the_seed() -> None:
    assert {run(seed, 5).index(True) for seed in range(100)} == set(range(5))
    assert run(3, 40) == run(3, 40)


def test_a_repeat_that_could_not_be_measured_is_made_up_for() -> None:
    audit = HotAudit(SPACE, seed=0)
    while not audit.is_due():
        pass
    audit.gave_up()
    assert [audit.is_due() for _ in range(5 - audit.num_hot_trials)].count(True) <= 1
    made_up = sum(audit.is_due() for _ in range(5))
    assert made_up >= 1


def test_a_knob_that_goes_with_a_difference_is_demoted() -> None:
    audit = audit_of(repeat(0.2, BATCH), repeat(0.1, BATCH, CHUNK), repeat(0.01, CHUNK), repeat(0.0, CHUNK))
    assert audit.demoted() == {BATCH}


@pytest.mark.parametrize("difference", [0.2, -0.2])
def test_faster_hot_is_as_wrong_as_slower(difference: float) -> None:
    assert audit_of(repeat(difference, BATCH), repeat(difference, BATCH)).demoted() == {BATCH}


def test_one_repeat_is_not_enough() -> None:
    assert audit_of(repeat(0.5, BATCH)).demoted() == frozenset()


def test_a_small_difference_is_none() -> None:
    assert audit_of(*[repeat(0.04, BATCH)] * 4).demoted() == frozenset()


def test_a_difference_without_the_knob_clears_it() -> None:
    """A machine that is noisy however the engine is started says nothing against any knob."""
    assert audit_of(*[repeat(0.2, BATCH)] * 2, *[repeat(0.3, CHUNK)] * 2).demoted() == {CHUNK}


def test_a_cold_knob_needs_no_demotion() -> None:
    assert audit_of(*[repeat(0.2, THREADS)] * 3).demoted() == frozenset()


def test_changed_knobs() -> None:
    assert changed_knobs({BATCH: 4, CHUNK: 64}, {BATCH: 8, CHUNK: 64}) == (BATCH,)
    assert changed_knobs({BATCH: 4}, {BATCH: 4, CHUNK: 64}) == (CHUNK,)
    assert changed_knobs({BATCH: 4}, {BATCH: 4}) == ()
