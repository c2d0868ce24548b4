"""One run: its verdict, its early stop, and what makes it invalid.

The target's answers carry times of their own, far beyond or far below the limits, so that nothing depends on how fast
this machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.load.target import Failure, FailureKind, Observation, RequestFailed
from servekit.load.workload import WorkloadRequest
from servekit.sim.fitted import TimedStep
from servekit.sim.step_time import PromptChunk, StepShape
from servekit.tuner.machine import MachineUse
from servekit.tuner.measure import Load, Measurement, Problem, Tolerance, measure, slowdown
from servekit.tuner.run_log import LoggedRequest
from servekit.tuner.slo import Slo, parse_slo
from servekit.tuner.trial import violations
from servekit.tuner.verdict import Verdict

OUTPUT_TOKENS = 3
LIMIT_S = 200.0
SLO = parse_slo({"ttft": {"p80": "200s"}, "tpot": {"p50": "100s", "p90": "200s"}})
TTFT = parse_slo({"ttft": {"p80": "200s"}})
TPOT = parse_slo({"tpot": {"p80": "200s"}})


@dataclass(frozen=True)
class Answer:
    """What becomes of a request."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    num_tokens: int = OUTPUT_TOKENS
    finish: str | None = "length"
    failure: FailureKind | None = None
    """At the end, instead of the finish."""
    hangs: bool = False
    """For ever, after its tokens."""
    cached_tokens: int | None = 0
    blocks_loop_s: float = 0.0


GOOD, SLOW, HANGING = Answer(), Answer(ttft_s=10 * LIMIT_S), Answer(num_tokens=0, hangs=True)


@dataclass
class FakeTarget:
    answers: Sequence[Answer]
    sent: list[int] = field(default_factory=list)

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        self.sent.append(request.index)
        answer, sent_s = self.answers[request.index], time.monotonic()
        time.sleep(answer.blocks_loop_s)
        for i in range(answer.num_tokens):
            is_last = i + 1 == answer.num_tokens and not answer.failure and not answer.hangs
            yield Observation(sent_s + answer.ttft_s + i * answer.gap_s, True, output_tokens=i + 1,
                              cached_tokens=answer.cached_tokens, finish_reason=answer.finish if is_last else None)
            await asyncio.sleep(0)
        if answer.hangs:
            await asyncio.Event().wait()
        if answer.failure:
            raise RequestFailed(Failure(answer.failure, "as the test says"))


class QuietMachine(MachineUse):
    def __init__(self, share_of_others: float | None = 0.0) -> None:
        super().__init__(list)
        self._share = share_of_others

    def share_of_others(self) -> float | None:
        return self._share


def run(answers: Sequence[Answer], slo: Slo = SLO, *, warmup_requests: int = 0, every_s: float = 0.0,
        timeout_s: float = 60.0, shares_prefixes: bool = False, machine: MachineUse | None = None,
        steps: Sequence[TimedStep] = (), tolerance: Tolerance | None = None, stops_early: bool = True) -> Measurement:
    requests = [WorkloadRequest(i, [1, 2], OUTPUT_TOKENS, i * every_s) for i in range(len(answers))]
    load = Load(requests, len(answers) - warmup_requests, warmup_requests, timeout_s, shares_prefixes)
    return asyncio.run(measure(FakeTarget(answers), load, slo, machine or QuietMachine(), steps,
                               tolerance or Tolerance(), stops_early))


def verdict_of_the_log(measured: Measurement, slo: Slo) -> Verdict:
    latencies = [LoggedRequest.of(record).latencies for record in measured.records if not record.is_warmup]
    return Verdict.holds if slo.holds(latencies) else Verdict.fails


# --- the verdict ------------------------------------------------------------------------------------------------------

times_s = st.sampled_from([0.0, LIMIT_S / 4, LIMIT_S * 0.75, 10 * LIMIT_S])
answers = st.builds(
    Answer, ttft_s=times_s, gap_s=times_s, num_tokens=st.integers(0, OUTPUT_TOKENS),
    finish=st.sampled_from(["length", "length", "stop", "abort", None]),
    failure=st.sampled_from([None, None, None, FailureKind.status, FailureKind.incomplete]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.just(GOOD), answers), min_size=1, max_size=12), st.integers(0, 3))
def test_the_verdict_is_that_of_the_log(script: list[Answer], warmup_requests: int) -> None:
    measured = run([SLOW] * warmup_requests + script, warmup_requests=warmup_requests, stops_early=False)
    assert len(measured.records) == warmup_requests + len(script) and not measured.is_stopped_early
    assert measured.verdict is verdict_of_the_log(measured, SLO)
    assert [tally.num_missed for tally in measured.tallies] == list(
        SLO.misses([LoggedRequest.of(record).latencies for record in measured.records if not record.is_warmup]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.just(GOOD), answers), min_size=1, max_size=12))
def test_stopping_early_does_not_change_the_verdict(script: list[Answer]) -> None:
    assert run(script, stops_early=True).verdict is run(script, stops_early=False).verdict


@pytest.mark.parametrize("bad", [
    Answer(failure=FailureKind.stream), Answer(num_tokens=0, failure=FailureKind.status), Answer(finish=None),
    Answer(finish="abort"), Answer(num_tokens=OUTPUT_TOKENS - 1)])
def test_an_answer_that_is_none_breaks_every_promise(bad: Answer) -> None:
    measured = run([GOOD] * 7 + [bad] * 3, stops_early=False)
    assert measured.verdict is Verdict.fails and [tally.num_missed for tally in measured.tallies] == [3, 3, 3]


def test_a_request_that_runs_out_of_time_breaks_every_promise() -> None:
    """Also a promise on the gaps between tokens, of which it has none."""
    measured = run([GOOD] * 7 + [HANGING] * 3, TPOT, timeout_s=0.05, stops_early=False)
    assert measured.verdict is Verdict.fails
    assert [record.failure.kind for record in measured.records if record.failure] == [FailureKind.timeout] * 3


def test_only_what_the_engine_lost_counts_as_its_failure() -> None:
    kinds = list(FailureKind)
    measured = run([Answer(failure=kind) for kind in kinds], stops_early=False)
    assert measured.engine_failures == 2  # connection and stream


# --- the early stop ---------------------------------------------------------------------------------------------------

def test_what_cannot_matter_any_more_is_not_sent() -> None:
    """Two of ten may miss: after three, the requests of the next hours need not be waited for."""
    script, later_s = [SLOW] * 3 + [GOOD] * 7, 3600.0
    requests = [WorkloadRequest(i, [1], OUTPUT_TOKENS, 0.0 if i < 3 else later_s) for i in range(10)]
    target = FakeTarget(script)
    measured = asyncio.run(measure(target, Load(requests, 10, 0, 60.0, False), TTFT, QuietMachine(), (), Tolerance()))
    assert measured.verdict is Verdict.fails and measured.is_stopped_early and target.sent == [0, 1, 2]


def test_a_run_that_has_held_stops() -> None:
    requests = [WorkloadRequest(i, [1], OUTPUT_TOKENS, 0.0 if i < 8 else 3600.0) for i in range(10)]
    target = FakeTarget([GOOD] * 10)
    measured = asyncio.run(measure(target, Load(requests, 10, 0, 60.0, False), TTFT, QuietMachine(), (), Tolerance()))
    assert measured.holds and measured.is_stopped_early and target.sent == list(range(8))


def test_requests_in_flight_count_as_soon_as_they_are_late() -> None:
    """None of them ever ends, and the run does."""
    slo = parse_slo({"ttft": {"p80": "100ms"}})
    measured = run([HANGING] * 10, slo, timeout_s=3600.0)
    assert measured.verdict is Verdict.fails and measured.is_stopped_early
    assert {record.failure.kind for record in measured.records if record.failure} == {FailureKind.interrupted}
    assert measured.engine_failures == 0


@pytest.mark.parametrize("num_good, losing_s, stops_early, is_given_up", [
    (2, 0.0, True, True), (4, 0.0, True, False), (2, 3600.0, True, False), (2, 0.0, False, False)])
def test_a_run_that_is_losing_is_given_up_when_its_time_is_over(num_good: int, losing_s: float, stops_early: bool,
                                                                is_given_up: bool) -> None:
    """Of ten two may miss. One of three is too many for so short a part, one of five is not: that run goes on."""
    script = [*[GOOD] * num_good, SLOW, *[GOOD] * (9 - num_good)]
    requests = [WorkloadRequest(i, [1], OUTPUT_TOKENS, 0.0 if i <= num_good else 0.3) for i in range(10)]
    load = Load(requests, 10, 0, 60.0, False)
    measured = asyncio.run(measure(FakeTarget(script), load, TTFT, QuietMachine(), (), Tolerance(), stops_early,
                                   losing_s))
    assert measured.is_given_up is is_given_up
    assert measured.verdict is (Verdict.undecided if is_given_up else Verdict.holds)
    assert (violations(measured.tallies, measured.is_given_up)["ttft.p80"] > 0) is is_given_up
    assert not measured.holds or not is_given_up


def test_the_warm_up_is_not_judged() -> None:
    measured = run([SLOW] * 4 + [GOOD] * 4, TTFT, warmup_requests=4, stops_early=False)
    assert measured.holds and sum(record.is_warmup for record in measured.records) == 4


# --- what makes it invalid --------------------------------------------------------------------------------------------

def steps_of(durations_s: Sequence[float]) -> list[TimedStep]:
    return [TimedStep(StepShape(4, 400, (), 4), duration_s) for duration_s in durations_s]


def test_a_quiet_run_is_valid() -> None:
    assert run([GOOD] * 10, steps=steps_of([0.01] * 300)).problems == ()


def test_a_late_generator_is_noticed() -> None:
    """The loop stands still while others are due."""
    slo = parse_slo({"ttft": {"p50": "100ms"}})
    late = run([Answer(blocks_loop_s=0.2), *[GOOD] * 5], slo, stops_early=False)
    assert Problem.generator_late in late.problems
    assert Problem.generator_late not in run([Answer(blocks_loop_s=0.2), *[GOOD] * 5], SLO, stops_early=False).problems


def test_cached_tokens_are_noticed_where_no_prompt_was_seen_before() -> None:
    polluted = [GOOD, Answer(cached_tokens=16)]
    assert run(polluted, stops_early=False).problems == (Problem.cache_polluted,)
    assert run(polluted, stops_early=False, shares_prefixes=True).problems == ()
    assert run(polluted[::-1], stops_early=False, warmup_requests=1).problems == ()


def test_a_busy_machine_is_noticed() -> None:
    assert run([GOOD], machine=QuietMachine(0.2)).problems == (Problem.machine_busy,)
    assert run([GOOD], machine=QuietMachine(0.2), tolerance=Tolerance(busy_share=0.3)).problems == ()
    assert run([GOOD], machine=QuietMachine(0.2), tolerance=Tolerance(busy_share=None)).problems == ()
    assert run([GOOD], machine=QuietMachine(None)).problems == ()


def test_drift_is_noticed() -> None:
    steps = steps_of([0.010] * 100 + [0.012] * 100 + [0.015] * 100)
    assert run([GOOD], steps=steps).problems == (Problem.drift,)
    assert run([GOOD], steps=steps, tolerance=Tolerance(slowdown=2.0)).problems == ()
    assert run([GOOD], steps=steps, tolerance=Tolerance(slowdown=None)).problems == ()


def test_slowdown_is_the_factor_for_steps_of_equal_size() -> None:
    assert slowdown(steps_of([0.010] * 100 + [0.020] * 100)) == pytest.approx(2.0)
    assert slowdown(steps_of([0.020] * 100 + [0.010] * 100)) == pytest.approx(0.5)
    assert slowdown(steps_of([0.010] * 10 + [0.020] * 10)) == 1.0, "too few to tell"


def test_a_growing_batch_is_no_drift() -> None:
    growing = [TimedStep(StepShape(i // 20, 100 * (i // 20), (PromptChunk(64, 0),) if i % 5 == 0 else (), i // 20),
                         0.004 + 0.001 * (i // 20) + (0.020 if i % 5 == 0 else 0.0)) for i in range(20, 600)]
    assert slowdown(growing) == pytest.approx(1.0, abs=0.05)


def test_a_few_slow_steps_are_no_drift() -> None:
    assert slowdown(steps_of([0.010] * 280 + [0.5] * 20)) == pytest.approx(1.0, abs=0.05)
