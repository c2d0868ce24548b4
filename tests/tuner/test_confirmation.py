"""The second measurement, on a fake engine of known capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.config.schema import Config
from servekit.tuner.confirmation import (
    Climb,
    Confirmation,
    Confirmed,
    Entrant,
    Finalist,
    Progress,
    Rules,
    plan_time,
    round_s,
)
from servekit.tuner.executor import EngineFailed, RunLength
from servekit.tuner.judgement import Role
from servekit.tuner.measure import Measurement, Problem
from servekit.tuner.trial import Ending
from tuner_runs import PLAN, SLO, FakeEngine, config_with

LENGTH = RunLength(150, 0.0)
RULES = Rules(LENGTH)
CAPACITY = {8: 5.0, 16: 10.0, 32: 10.5, 64: 7.0}
"""Requests per second by max_num_seqs: what the fake engine can do."""


def capacity(config: Config) -> float:
    return CAPACITY[config.scheduler.max_num_seqs]


def finalist(name: str, num_seqs: int, rate_per_s: float, role: Role = Role.tuned) -> Finalist:
    return Finalist(name, role, config_with(num_seqs), rate_per_s)


DEFAULT = finalist("default", 8, 2.5, Role.default)
BEST = finalist("trial 5", 16, 6.0)


def confirm(engine: FakeEngine, *finalists: Finalist, rules: Rules = RULES,
            on_progress: Callable[[Progress], None] = lambda _: None) -> Confirmed:
    return Confirmation(SLO, finalists, engine, rules, on_progress).run()


def test_there_and_back_on_the_same_requests_with_the_default_beside_the_leader(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    confirmed = confirm(engine, BEST, DEFAULT, rules=Rules(LENGTH, max_rounds=2))
    assert [(seqs, rate) for seqs, rate, _ in engine.calls] == [
        (16, 6.0), (8, 6.0), (8, 6.0), (16, 6.0), (8, 2.5), (8, 2.5)]
    assert [stream[-1] for *_, stream in engine.calls] == ["1", "1", "2", "2", "3", "4"]
    judgement = confirmed.judgement
    assert judgement.winner == "trial 5"
    assert judgement.find("trial 5").confirmed_per_s == 6.0
    default = judgement.find("default")
    assert (default.confirmed_per_s, default.failed_per_s) == (2.5, 6.0)
    assert judgement.ratio is not None
    assert (judgement.ratio.value, judgement.ratio.low, judgement.ratio.high) == (6.0 / 2.5, 1.0, None)
    ttft = judgement.differences[0]
    assert (ttft.promise, ttft.num_pairs, ttft.rate_per_s) == ("ttft.p95", 300, 6.0)
    assert ttft.winner_missed <= 15 < ttft.default_missed
    assert ttft.high is not None and ttft.high < 0, "the winner misses less, beyond chance"


def test_the_default_climbs_until_it_fails_so_that_the_ratio_is_not_flattered(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    judgement = confirm(engine, BEST, DEFAULT, rules=Rules(LENGTH, max_rounds=12)).judgement
    default = judgement.find("default")
    assert default.confirmed_per_s is not None and default.failed_per_s is not None
    assert 2.5 < default.confirmed_per_s < default.failed_per_s <= default.confirmed_per_s * 1.08
    assert judgement.ratio is not None and judgement.ratio.low is not None and judgement.ratio.value is not None
    assert judgement.ratio.low == 6.0 / default.failed_per_s > 1.0
    rates = [rate for seqs, rate, _ in engine.calls if seqs == 16]
    assert set(rates) == {6.0}, "the winner had nothing more to show"


def test_a_candidate_steps_down_on_new_arrivals_until_it_holds(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    lucky = finalist("trial 9", 16, 10.4)
    judgement = confirm(engine, lucky, DEFAULT, rules=Rules(LENGTH, step=0.2, max_rounds=8)).judgement
    rates = [(rate, stream) for seqs, rate, stream in engine.calls if seqs == 16]
    assert len({rate for rate, _ in rates}) > 1
    assert len({stream for _, stream in rates}) == len(rates), "no arrivals are used twice"
    winner = judgement.find("trial 9")
    assert judgement.winner == "trial 9" and winner.confirmed_per_s is not None
    assert winner.confirmed_per_s < 10.0 < winner.rates[-1].rate_per_s
    assert winner.failed_per_s is not None and winner.failed_per_s > winner.confirmed_per_s
    assert judgement.ratio is not None and judgement.ratio.high is not None


def test_the_default_is_measured_at_its_own_rate_before_the_winner_is_refined(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    confirm(engine, finalist("trial 9", 16, 12.0), DEFAULT, rules=Rules(LENGTH, max_rounds=8))
    rates = [(seqs, rate) for seqs, rate, _ in engine.calls]
    leaders = [(place, rate) for place, (seqs, rate) in enumerate(rates) if seqs == 16]
    refined = next(place for (_, before), (place, rate) in pairwise(leaders) if rate > before)
    assert rates.index((8, 2.5)) < refined


@given(truth=st.floats(0.5, 100.0), role=st.sampled_from([Role.tuned, Role.default]))
@settings(deadline=None)
def test_what_a_finalist_holds_is_found_to_within_a_step(truth: float, role: Role) -> None:
    climb = Climb(replace(BEST, rate_per_s=10.0, role=role), step=0.07)
    rates = []
    while (rate_per_s := climb.next_per_s) is not None:
        rates.append(rate_per_s)
        climb.note(rate_per_s, rate_per_s <= truth)
    assert len(rates) <= 15 and rates[0] == 10.0
    assert climb.held_per_s is not None and climb.held_per_s <= truth
    if role is Role.tuned and truth >= 10.0:
        assert rates == [10.0], "the search knew of no higher rate"
    else:
        assert climb.failed_per_s is not None and truth < climb.failed_per_s
        assert climb.failed_per_s * (1 - climb.step) <= climb.held_per_s * (1 + 1e-9)


def test_the_first_step_is_the_shortest() -> None:
    climb = Climb(BEST, step=0.07)
    for expected in (6.0, 6.0 * 0.93, 6.0 * 0.93 * 0.86):
        assert climb.next_per_s == pytest.approx(expected)
        climb.note(expected, False)


def test_a_run_lasts_as_long_as_its_own_rate_needs(tmp_path: Path) -> None:
    counts = dict[float, int]()

    class Counting(FakeEngine):
        def measure_at(self, config: Config, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                       stops_early: bool) -> tuple[Measurement, Path]:
            counts[rate_per_s] = num_requests
            return super().measure_at(config, rate_per_s, num_requests, stream, cold=cold, stops_early=stops_early)

    confirm(Counting(tmp_path, capacity), BEST, DEFAULT, rules=Rules(RunLength(100, 20.0), max_rounds=2))
    assert counts == {6.0: 120, 2.5: 100}


def test_only_the_candidate_with_the_highest_rate_is_measured(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    worse = finalist("trial 3", 64, 4.0)
    judgement = confirm(engine, worse, BEST, DEFAULT).judgement
    assert judgement.winner == "trial 5"
    assert 64 not in {seqs for seqs, *_ in engine.calls}


def test_when_the_leader_falls_the_next_one_is_measured(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    boaster, next_one = finalist("trial 3", 64, 9.0), finalist("trial 5", 16, 8.6)
    judgement = confirm(engine, boaster, next_one, DEFAULT, rules=Rules(LENGTH, max_rounds=9)).judgement
    assert judgement.winner == "trial 5"
    failed = judgement.find("trial 3")
    assert failed.confirmed_per_s is None and [found.rate_per_s for found in failed.rates] == [9.0]
    assert failed.rates[0].num_runs == 1, "who failed on the way there is not measured on the way back"


def test_a_candidates_failure_makes_the_steps_of_the_others_longer(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, lambda config: 4.0)
    confirm(engine, finalist("trial 3", 16, 9.0), finalist("trial 5", 32, 9.0), DEFAULT)
    calls = [(seqs, rate) for seqs, rate, _ in engine.calls if seqs != 8][:4]
    assert [seqs for seqs, _ in calls] == [16, 32, 16, 32]
    assert [rate for _, rate in calls] == pytest.approx([9.0, 9.0, 9.0 * 0.86, 9.0 * 0.72])


def test_the_default_wins_a_tie_and_then_the_ratio_is_one(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, lambda config: 10.0)
    judgement = confirm(engine, finalist("trial 1", 16, 3.0), finalist("default", 8, 3.0, Role.default)).judgement
    assert judgement.winner == "default"
    assert judgement.ratio is not None and judgement.ratio.value == 1.0
    assert judgement.differences == ()


def test_nothing_holds(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, lambda config: 0.1)
    judgement = confirm(engine, BEST, DEFAULT, rules=Rules(LENGTH, max_rounds=2)).judgement
    assert judgement.winner is None and judgement.ratio is None
    assert [found.rate_per_s for found in judgement.find("trial 5").rates] == pytest.approx([6.0 * 0.93, 6.0])
    assert judgement.find("default").rates == (), "there is nothing to compare it with"
    worst = judgement.find("trial 5").rates[0]
    assert not worst.holds and worst.promises[0].is_disproven and worst.promises[1].is_proven


def test_the_default_wins_where_no_candidate_holds_more(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, lambda config: 5.0 if config.scheduler.max_num_seqs == 8 else 0.1)
    judgement = confirm(engine, BEST, DEFAULT).judgement
    assert judgement.winner == "default"


def test_an_engine_that_dies_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    class Dying(FakeEngine):
        def measure_at(self, config: Config, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                       stops_early: bool) -> tuple[Measurement, Path]:
            if config.scheduler.max_num_seqs == 32:
                raise EngineFailed(Ending.crashed, "boom")
            return super().measure_at(config, rate_per_s, num_requests, stream, cold=cold, stops_early=stops_early)

    confirmed = confirm(Dying(tmp_path, capacity), finalist("trial 2", 32, 9.0), BEST, DEFAULT)
    assert confirmed.judgement.winner == "trial 5"
    assert confirmed.failures == {"trial 2": "crashed: boom"}


def test_a_bad_measurement_is_repeated_and_never_counts(tmp_path: Path) -> None:
    bad = set[tuple[int, str]]()

    def once(config: Config, stream: str) -> list[Problem]:
        key = (config.scheduler.max_num_seqs, stream)
        is_first = key not in bad
        bad.add(key)
        return [Problem.machine_busy] if is_first and stream == "confirm 1" else []

    confirmed = confirm(FakeEngine(tmp_path, capacity, problems=once), BEST, rules=Rules(LENGTH, max_rounds=1))
    assert confirmed.judgement.winner == "trial 5" and len(confirmed.runs) == 3
    assert confirmed.judgement.find("trial 5").rates[0].num_runs == 2

    always = FakeEngine(tmp_path / "b", capacity, problems=lambda config, stream: [Problem.drift])
    confirmed = confirm(always, BEST)
    assert confirmed.judgement.winner is None and len(always.calls) == 2
    assert confirmed.failures["trial 5"] == "could not be measured well in 2 attempts: drift"


def test_who_does_not_survive_the_attack_cannot_win(tmp_path: Path) -> None:
    confirmed = confirm(FakeEngine(tmp_path, capacity), BEST, DEFAULT)
    judgement = confirmed.attacked(SLO, {"trial 5": False})
    assert judgement.winner == "default" and judgement.find("trial 5").survives_attack is False


def test_the_plan_of_time_covers_what_is_measured_if_all_goes_well(tmp_path: Path) -> None:
    finalists = (BEST, DEFAULT, finalist("thumb", 64, 3.0, Role.rule_of_thumb))
    plan = plan_time(finalists, RULES, start_s=5.0, warmup_requests=PLAN.warmup_requests, drain_s=1.0)
    engine = FakeEngine(tmp_path, capacity)
    confirm(engine, *finalists, rules=Rules(LENGTH, max_rounds=2))
    assert plan.num_runs == len(engine.calls) == 8
    one_way_s = 152 / 6.0 * 2 + 152 / 2.5 + 152 / 3.0 + 4 * 6.0
    assert plan.least_s == pytest.approx(2 * one_way_s)


def test_progress_counts_the_runs_and_tells_how_they_ended(tmp_path: Path) -> None:
    seen = list[Progress]()
    confirm(FakeEngine(tmp_path, capacity), BEST, DEFAULT, rules=Rules(LENGTH, max_rounds=2), on_progress=seen.append)
    assert [(told.round, told.run, told.num_runs, told.holds) for told in seen if told.holds is not None] == [
        (1, 1, 4, True), (1, 2, 4, False), (1, 3, 4, False), (1, 4, 4, True), (2, 1, 2, True), (2, 2, 2, True)]


def test_no_new_round_begins_without_time(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    asked = list[float]()

    def may_begin_round(entered: Sequence[Entrant]) -> bool:
        asked.append(round_s(entered, RULES, start_s=5.0, warmup_requests=2, drain_s=1.0))
        return False

    confirmation = Confirmation(SLO, (BEST, DEFAULT), engine, RULES, may_begin_round=may_begin_round)
    assert confirmation.run().is_out_of_time
    assert {stream for *_, stream in engine.calls} == {"confirm 1", "confirm 2"}
    assert asked == [pytest.approx(2 * (6.0 + 152 / 2.5))], "only the default would be measured"


def test_names_tell_finalists_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one name"):
        Confirmation(SLO, (BEST, BEST), FakeEngine(tmp_path, capacity), RULES)


def test_where_there_is_no_time_for_a_pair_the_leader_is_measured_alone(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    confirmation = Confirmation(SLO, (finalist("trial 9", 16, 12.0), DEFAULT), engine, RULES,
                                may_begin_round=lambda entered: len(entered) == 1)
    confirmed = confirmation.run()
    assert confirmed.judgement.winner == "trial 9" and confirmed.is_out_of_time
    winning = confirmed.judgement.find("trial 9").confirmed_per_s
    assert [seqs for seqs, rate, _ in engine.calls if rate == winning] == [16, 16]


def test_one_that_is_too_slow_for_the_time_left_does_not_keep_the_others_from_being_measured(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    slow = finalist("random", 64, 0.1, Role.random)
    confirmation = Confirmation(SLO, (BEST, DEFAULT, slow), engine, RULES,
                                may_begin_round=lambda entered: min(each.rate_per_s for each in entered) > 1.0)
    confirmed = confirmation.run()
    assert confirmed.is_out_of_time and 64 not in [seqs for seqs, *_ in engine.calls]
    assert confirmed.judgement.find("default").confirmed_per_s is not None
    assert confirmed.judgement.ratio is not None and confirmed.judgement.ratio.value is not None


def test_the_default_beside_the_leader_comes_before_whatever_else_is_compared(tmp_path: Path) -> None:
    pairs = list[list[Role]]()

    def may_begin_round(entered: Sequence[Entrant]) -> bool:
        if len(entered) == 2:
            pairs.append([entrant.finalist.role for entrant in entered])
        return len(entered) <= 2

    finalists = (finalist("trial 9", 16, 12.0), finalist("default", 8, 11.0, Role.default),
                 finalist("random", 64, 20.0, Role.random))
    Confirmation(SLO, finalists, FakeEngine(tmp_path, capacity), RULES, may_begin_round=may_begin_round).run()
    assert [Role.tuned, Role.default] in pairs and [Role.tuned, Role.random] not in pairs


def test_nobody_waits_for_one_that_is_too_slow(tmp_path: Path) -> None:
    """A candidate that failed climbs back up although the random one was never measured."""
    engine = FakeEngine(tmp_path, capacity)
    slow = finalist("random", 64, 0.1, Role.random)
    confirmation = Confirmation(SLO, (finalist("trial 9", 16, 12.0), DEFAULT, slow), engine, RULES,
                                may_begin_round=lambda entered: min(each.rate_per_s for each in entered) > 1.0)
    confirmation.run()
    leaders = [rate for seqs, rate, _ in engine.calls if seqs == 16]
    assert any(later > earlier for earlier, later in pairwise(leaders)), "it was refined"


def test_one_that_fits_is_measured_though_a_slower_one_that_matters_more_does_not(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, capacity)
    slow, fast = finalist("default", 8, 0.1, Role.default), finalist("random", 64, 5.0, Role.random)
    Confirmation(SLO, (BEST, slow, fast), engine, RULES,
                 may_begin_round=lambda entered: min(each.rate_per_s for each in entered) > 1.0).run()
    assert 64 in [seqs for seqs, *_ in engine.calls]
