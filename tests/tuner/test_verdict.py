"""The early verdict against the full one, on runs small enough to be judged by sorting."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from random import Random

import pytest

from random_runs import SINGLE_SLOS, Trace, decide, random_trace
from servekit.config.bench import SloConfig
from servekit.load.metrics import RequestLatencies
from servekit.tuner.slo import Promise, Slo
from servekit.tuner.verdict import AnswerLength, RunningVerdict, Tally, Verdict

NUM_TRACES = 100_000
TTFT = Slo((Promise("ttft.p50", 500, SloConfig(ttft_s=1.0)),))
TPOT = Slo((Promise("tpot.p99", 990, SloConfig(tpot_s=0.1)),))


@pytest.mark.timeout(900)
def test_early_verdict_equals_the_full_one_on_100_000_traces() -> None:
    random = Random(1)
    seen = dict.fromkeys(Verdict, 0)
    early = 0
    for number in range(NUM_TRACES):
        trace = random_trace(random)
        decision = decide(trace, look_at_every=1 + number % 3)
        seen[decision.verdict] += 1
        early += decision.at_event < len(trace.events())
    assert min(seen[Verdict.holds], seen[Verdict.fails]) > NUM_TRACES / 5, "the traces must have both verdicts"
    assert early > NUM_TRACES / 2


def test_early_verdict_equals_the_full_one_on_larger_runs() -> None:
    random = Random(2)
    for _ in range(200):
        decide(random_trace(random, largest=100), look_at_every=5)


def test_undecided_means_that_both_verdicts_may_still_come() -> None:
    random = Random(3)
    undecided = 0
    for _ in range(4000):
        trace = random_trace(random)
        if trace.slo not in SINGLE_SLOS:
            continue
        running = RunningVerdict(trace.slo, len(trace.requests), trace.length)
        for at_s, tell in trace.events():
            tell(running)
            if running.at(at_s) is Verdict.undecided:
                undecided += 1
                assert worst_continuation(deepcopy(running), at_s) is Verdict.fails
                assert best_continuation(deepcopy(running), trace, at_s) is Verdict.holds
    assert undecided > 1000


def worst_continuation(running: RunningVerdict, now_s: float) -> Verdict:
    """Everything that is open fails."""
    for index in list(running._in_flight):
        running.failed(index)
    for index in range(1000, 1000 + running.num_requests - running._num_sent):
        running.sent(index, now_s, 1)
        running.failed(index)
    return running.at(now_s)


def best_continuation(running: RunningVerdict, trace: Trace, now_s: float) -> Verdict:
    """Everything that is open ends at once, in the better of the two ways in which it can."""
    promise = trace.slo.promises[0]
    for index, answer in list(running._in_flight.items()):
        owed = answer.wanted_tokens - answer.num_tokens
        may_stop = trace.length is AnswerLength.at_most and answer.num_tokens > 0
        if not (may_stop and not promise.is_missed_by(answer.ended(now_s))):
            last_s = answer.last_s if answer.num_tokens else now_s
            for i in range(1, owed + 1):
                running.token(index, last_s + (now_s - last_s) * i / owed)
        running.finished(index, now_s)
    for index in range(1000, 1000 + running.num_requests - running._num_sent):
        running.sent(index, now_s, 1)
        running.token(index, now_s)
        running.finished(index, now_s)
    return running.at(now_s)


# --- the rules, broken on purpose -------------------------------------------------------------------------------------

def first_traces(count: int) -> Iterator[Trace]:
    random = Random(4)
    return (random_trace(random) for _ in range(count))


def test_without_requests_in_flight_the_verdict_is_right_but_later(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [decide(trace) for trace in first_traces(3000)]
    monkeypatch.setattr(RunningVerdict, "_note_lateness", lambda *_: None)
    blind = [decide(trace) for trace in first_traces(3000)]
    assert [decision.verdict for decision in exact] == [decision.verdict for decision in blind]
    assert all(own.at_event <= other.at_event for own, other in zip(exact, blind, strict=True))
    failing = [(own.at_event, other.at_event) for own, other in zip(exact, blind, strict=True)
               if own.verdict is Verdict.fails]
    assert sum(own for own, _ in failing) < 0.9 * sum(other for _, other in failing), "no tenth of the events saved"


def naive_endings(answer, now_s, length):  # type: ignore[no-untyped-def]
    """The textbook's TPOT bound, which takes for granted that another token comes."""
    return [answer.ended(now_s, answer.wanted_tokens - answer.num_tokens)]


def only_the_unsent_are_open(tally: Tally) -> Verdict:
    misses, allowed = tally.num_missed + tally.num_late, tally.promise.misses_allowed(tally.num_requests)
    if misses > allowed:
        return Verdict.fails
    are_enough = tally.num_ended >= tally.promise.per_mille * tally.num_requests / 1000
    return Verdict.holds if are_enough else Verdict.undecided


def one_miss_too_few(promise: Promise, num_requests: int) -> int:
    return max(0, num_requests - -(-promise.per_mille * num_requests // 1000) - 1)


def one_miss_too_many(promise: Promise, num_requests: int) -> int:
    return num_requests * (1000 - promise.per_mille) // 1000 + 1


@pytest.mark.parametrize(("target", "wrong"), [
    ("servekit.tuner.verdict._Answer.best_endings", naive_endings),
    ("servekit.tuner.verdict.Tally.verdict", property(only_the_unsent_are_open)),
    ("servekit.tuner.slo.Promise.misses_allowed", one_miss_too_few),
    ("servekit.tuner.slo.Promise.misses_allowed", one_miss_too_many),
])
def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch, target: str, wrong: object) -> None:
    traces = list(first_traces(3000))
    monkeypatch.setattr(target, wrong)
    with pytest.raises(AssertionError):
        for trace in traces:
            decide(trace)


# --- by hand ----------------------------------------------------------------------------------------------------------

def test_a_waiting_request_is_late_once_its_age_exceeds_the_limit() -> None:
    running = RunningVerdict(TTFT, num_requests=2)
    running.sent(0, 0.0, 4)
    running.sent(1, 0.5, 4)
    assert running.at(1.4) is Verdict.undecided
    assert running.tallies(1.4)[0].num_late == 1
    assert running.at(1.5) is Verdict.undecided, "exactly the limit is no miss"
    assert running.at(1.51) is Verdict.fails, "two of two are late, and one may be"


def test_a_slow_answer_is_late_before_its_last_token() -> None:
    running = RunningVerdict(TPOT, num_requests=1)
    running.sent(0, 0.0, 11)
    running.token(0, 5.0)
    running.token(0, 5.9)
    assert running.at(6.0) is Verdict.undecided, "the other nine may all come now"
    assert running.at(6.01) is Verdict.fails


def test_an_answer_that_may_stop_at_any_token_is_not_late_while_it_pauses() -> None:
    running = RunningVerdict(TPOT, num_requests=1, length=AnswerLength.at_most)
    running.sent(0, 0.0, 11)
    running.token(0, 5.0)
    running.token(0, 5.05)
    assert running.at(60.0) is Verdict.undecided
    running.finished(0, 60.0)
    assert running.at(60.0) is Verdict.holds


def test_rounding_makes_no_request_late() -> None:
    """Tokens of a chunk are spread over the gap before it, and rounding may leave each gap short of the mean."""
    random = Random(5)
    num_short = 0
    for _ in range(3_000):
        first_s, gap_s, count = random.uniform(0, 0.1), random.uniform(0, 3), random.randint(2, 9)
        at_s = first_s + gap_s
        tokens = [first_s + (at_s - first_s) * (number / count) for number in range(count + 1)]
        longest_s = max(later - earlier for earlier, later in pairwise(tokens))
        num_short += longest_s < (at_s - first_s) / count
        running = RunningVerdict(Slo((Promise("itl.p99", 990, SloConfig(itl_s=longest_s)),)), num_requests=1)
        running.sent(0, 0.0, count + 1)
        running.token(0, first_s)
        assert running.at(at_s) is Verdict.undecided
        for token_s in tokens[1:]:
            running.token(0, token_s)
        running.finished(0, at_s)
        assert running.at(at_s) is Verdict.holds
    assert num_short > 0


def test_it_passes_once_the_rest_cannot_break_it() -> None:
    running = RunningVerdict(TTFT, num_requests=4)
    for index in range(2):
        running.sent(index, 0.0, 1)
        running.token(index, 0.5)
        running.finished(index, 0.5)
        assert running.at(0.5) is (Verdict.holds if index else Verdict.undecided)


def test_failed_and_short_answers_miss_every_promise() -> None:
    both = Slo(TTFT.promises + TPOT.promises)
    running = RunningVerdict(both, num_requests=3)
    running.sent(0, 0.0, 2)
    running.failed(0)
    running.sent(1, 0.0, 2)
    running.token(1, 0.1)
    running.finished(1, 0.1)
    running.sent(2, 0.0, 2)
    running.finished(2, 0.1)
    assert [tally.num_missed for tally in running.tallies(0.1)] == [3, 3]


def test_wrong_events_are_refused() -> None:
    running = RunningVerdict(TTFT, num_requests=1)
    running.sent(0, 0.0, 1)
    running.token(0, 0.1)
    with pytest.raises(ValueError, match="more than the 1 tokens"):
        running.token(0, 0.2)
    with pytest.raises(ValueError, match="one more than the 1"):
        running.sent(1, 0.0, 1)
    with pytest.raises(ValueError, match="no verdict"):
        RunningVerdict(TTFT, num_requests=0)


@pytest.mark.parametrize(("ended", "missed", "late"), [(100, 0, 0), (100, 1, 0), (100, 2, 0), (40, 0, 2), (9, 2, 1)])
def test_violation_is_above_zero_exactly_when_the_promise_is_broken(ended: int, missed: int, late: int) -> None:
    tally = Tally(Promise("ttft.p99", 990, SloConfig(ttft_s=1.0)), 100, ended, missed, late)
    assert (tally.violation > 0) is (tally.verdict is Verdict.fails)


def test_violation_of_an_early_stop_grows_with_how_early_it_came() -> None:
    promise = Promise("ttft.p99", 990, SloConfig(ttft_s=1.0))
    sooner, later = (Tally(promise, 1000, ended, 11, 0).violation for ended in (20, 500))
    assert sooner > later > Tally(promise, 1000, 1000, 11, 0).violation > 0


def test_full_verdict_counts_what_no_request_breaks() -> None:
    fast, slow = RequestLatencies(0.5, None, None, 0.5), RequestLatencies(1.5, 0.2, 0.3, 3.0)
    assert TTFT.holds([fast, slow])
    assert not TTFT.holds([fast, slow, None])
    assert TPOT.holds([fast, fast])
    with pytest.raises(ValueError, match="without requests"):
        TTFT.holds([])
