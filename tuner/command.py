"""`servekit tune`: search on the real device, confirm on arrivals that the search never saw, and emit what won."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from threading import current_thread, main_thread
from types import FrameType

import msgspec
from rich.console import Console

from servekit.config.errors import ConfigError, require
from servekit.config.resolve import as_dict, config_hash
from servekit.config.schema import Config
from servekit.engine.client import StartError
from servekit.load.metrics import RequestLatencies
from servekit.tuner.adviser import Adviser
from servekit.tuner.baseline import START_SHARE, look_at_base, refuse_impossible
from servekit.tuner.confirmation import Finalist
from servekit.tuner.default_space import Facts
from servekit.tuner.display import PlannedRuns, print_advice, print_plan, print_trial, shown_values
from servekit.tuner.executor import Description, EngineFailed, RunLength, TrialExecutor, Warm
from servekit.tuner.grammar import parse_space
from servekit.tuner.hot_audit import HotAudit, Repeat, changed_knobs
from servekit.tuner.judgement import Role
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Tolerance
from servekit.tuner.outcome import conclude, finalist_of
from servekit.tuner.own_engine import engine_for
from servekit.tuner.run_log import read_run
from servekit.tuner.server_host import ServerHost
from servekit.tuner.settings import Settings, find_file, read_settings
from servekit.tuner.space import Space, Value
from servekit.tuner.study import Identity, Origin, SamplerKind, Trial, TuningStudy, open_study
from servekit.tuner.subject import OtherServer, OwnEngine, Subject
from servekit.tuner.trial import Candidate, Ending, Outcome

RUNS = "runs"
SERVER_LOGS = "servers"
RANDOM = "random"
_MOST_INVALID = 6
"""Disturbed measurements in a row after which going on is a waste of time."""


class ExitCode(IntEnum):
    """What the shell is told."""

    ok = 0
    configuration = 2
    startup_failure = 3
    nothing_holds = 4
    interrupted = 130


def run(argv: Sequence[str]) -> int:
    """Tune as the file and the words after it say; returns the exit status.

    Raises ConfigError for what cannot be honoured, before anything in the run folder is touched.
    """
    require(bool(argv) and "=" not in argv[0], "file", argv[0] if argv else None, "must be a tuning file",
            "for example servekit tune slo.yaml, or one of conf/slo/")
    console = Console()
    settings = read_settings(find_file(argv[0]), argv[1:])
    _check_search(settings)
    subject = _subject(settings, console)
    try:
        with _interruptible(), _executor(settings, subject) as executor:
            return _tune(settings, subject, executor, console)
    except StartError as error:
        print(f"servekit: {error}", file=sys.stderr)
        return ExitCode.startup_failure


def _tune(settings: Settings, subject: Subject, executor: TrialExecutor, console: Console) -> int:
    started_s = time.monotonic()
    adviser = Adviser(settings.slo, executor.plan, executor.length, settings.study.seed)
    subject.inform(adviser)
    baseline = look_at_base(settings, executor, console)
    refuse_impossible(settings.slo, baseline.single)
    space = subject.space(baseline.description)
    audit = HotAudit(space, settings.study.seed)
    subject.heed(audit)
    num_requests = executor.length.at(0.0)
    executor.allowance = settings.allowance(num_requests)
    start_per_s = settings.start_rate_per_s or START_SHARE * baseline.capacity_per_s
    identity = _identity(settings, subject, space, baseline.description)
    with open_study(settings.folder, settings.study, identity, space, settings.slo.names, settings.assemble) as study:
        _record(settings)
        print_plan(settings, space, baseline, PlannedRuns(num_requests, start_per_s, executor.allowance),
                   len(study.trials), console)
        study.bury_the_dead()
        _enqueue_known(settings, study)
        clock = Clock(started_s, settings.budget.minutes * 60)
        try:
            executor.begin(start_per_s, study.trials)
            _search(settings, executor, study, audit, adviser, clock, console)
            with clock.stopped():
                random = _search_at_random(settings, executor, study, identity, space, start_per_s, console)
        except KeyboardInterrupt:
            console.print("\nstopped; everything measured so far is kept, and the same command goes on from here",
                          soft_wrap=True)
            return ExitCode.interrupted
        is_held = conclude(settings, subject, executor, study, random, space, baseline.description, clock.left_s,
                           console)
    return ExitCode.ok if is_held else ExitCode.nothing_holds


# --- before the search ------------------------------------------------------------------------------------------------

def _check_search(settings: Settings) -> None:
    """Refuse a mistake in the search space, and a base outside of it, before anything is started.

    Raises ConfigError. How far the default space reaches depends on the engine; whether it can be read does not.
    """
    if isinstance(settings.base, Config):
        parse_space(settings.search, settings.base, Facts(cores=1, is_gpu=False, max_model_len=1)).locate(settings.base)


def _subject(settings: Settings, console: Console) -> Subject:
    """What is tuned: another server, or the engine with its model's files."""
    if settings.server is not None:
        return OtherServer(settings.server, ServerHost(settings.server, settings.folder / SERVER_LOGS,
                                                       settings.budget.timeout_s, partial(_say, console)))
    assert isinstance(settings.base, Config)
    return OwnEngine(settings, settings.base, engine_for(settings.base))


def _say(console: Console, line: str) -> None:
    console.print(f"        {line}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is up, and keep what is known. Only the main thread gets signals.

    asyncio's own treatment of Ctrl-C cancels what runs, and whatever takes a cancellation for an end swallows it.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _executor(settings: Settings, subject: Subject) -> Iterator[TrialExecutor]:
    budget = settings.budget
    plan = LoadPlan(settings.bench, settings.study.seed, budget.warmup_requests, budget.timeout_s)
    executor = TrialExecutor(subject.host, settings.slo, plan,
                             RunLength(budget.requests, budget.min_run_s, plan.available), settings.folder / RUNS,
                             Tolerance(budget.max_busy_share, budget.max_slowdown))
    try:
        yield executor
    finally:
        executor.close()


def _identity(settings: Settings, subject: Subject, space: Space, about: Description) -> Identity:
    return Identity(space=subject.fingerprint(space), slo=settings.slo.fingerprint,
                    workload=config_hash(settings.bench), model=about.model, device=about.device)


def _record(settings: Settings) -> None:
    """Keep the tuning file's values beside what comes of them."""
    text = msgspec.json.format(msgspec.json.encode(
        {"settings": settings.values, "base": as_dict(settings.base)}, enc_hook=str))
    (settings.folder / "settings.json").write_bytes(text)


def _enqueue_known(settings: Settings, study: TuningStudy) -> None:
    """The base configuration first, then what the craft starts from."""
    study.enqueue(settings.base, Origin.base)
    if settings.server is None:
        for origin, overrides in ((Origin.rule_of_thumb, RULE_OF_THUMB), (Origin.recipe, SHORT_STEPS),
                                  (Origin.recipe, LARGE_STEPS)):
            with suppress(ConfigError):  # It may be outside a search space of the user's own.
                study.enqueue(settings.assemble(overrides), origin)


RULE_OF_THUMB = ("scheduler.max_num_seqs=128", "scheduler.max_step_tokens=512", "scheduler/batching=continuous",
                 "scheduler/policy=fifo", "scheduler/prefill=chunked", "scheduler.prefill.chunk_tokens=256",
                 "scheduler/prefix_cache=hash")
"""Where practitioners begin: a large batch, continuous, chunks of 256, a prefix cache."""
SHORT_STEPS = ("scheduler.max_num_seqs=64", "scheduler.max_step_tokens=128", "scheduler/prefill=splitfuse")
"""One end of what the craft trades: no step is long, so that nobody who reads along is held up (Dynamic SplitFuse)."""
LARGE_STEPS = ("scheduler.max_num_seqs=1024", "scheduler.max_step_tokens=2048", "scheduler/prefill=chunked",
               "scheduler.prefill.chunk_tokens=1024")
"""The other end: the weights are read once for many tokens."""


# --- the search -------------------------------------------------------------------------------------------------------

@dataclass
class Clock:
    """How much of the budget is used."""

    started_s: float
    budget_s: float

    def left_s(self, kept_share: float = 0.0) -> float:
        """Seconds left for the search when a share of the budget is kept for what comes after."""
        return self.budget_s * (1 - kept_share) - (time.monotonic() - self.started_s)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done meanwhile is not part of the budget."""
        before_s = time.monotonic()
        try:
            yield
        finally:
            self.started_s += time.monotonic() - before_s


def _search(settings: Settings, executor: TrialExecutor, study: TuningStudy, audit: HotAudit, adviser: Adviser,
            clock: Clock, console: Console) -> None:
    """Trials until the time or their number is used up."""
    started_with: Mapping[str, Value] = audit.space.active(audit.space.start)
    num_invalid = 0
    adviser.recall(study.trials)
    while clock.left_s(settings.budget.confirm_share) > 0 and not _is_enough(settings, study):
        candidate = study.ask()
        if candidate is None:
            console.print("every configuration of the space has been measured", highlight=False)
            return
        with _under_way(study, candidate, console):
            outcome = _tried(executor, adviser, candidate)
        study.tell(candidate, outcome)
        num_invalid = num_invalid + 1 if outcome.ending is Ending.invalid else 0
        print_trial(study, candidate, outcome, clock.left_s(settings.budget.confirm_share), console)
        print_advice(adviser, outcome, console)
        for config in adviser.suggestions(audit.space, settings.assemble, executor.incumbent_per_s):
            with suppress(ConfigError):  # A file of an option may set a knob to what the space does not have.
                study.enqueue(config, Origin.simulator)
        if num_invalid == _MOST_INVALID:
            raise StartError(f"{num_invalid} measurements in a row were disturbed "
                             f"({', '.join(outcome.facts['problems'])}); use a quiet machine, or allow more with "
                             "budget.max_busy_share and budget.max_slowdown")
        if outcome.facts.get("warm") == Warm.cold.value:
            started_with = candidate.values
        elif outcome.ending is Ending.measured and outcome.rate_per_s > 0 and audit.is_due():
            _repeat_cold(executor, audit, candidate, outcome, started_with, settings, console)
            started_with = candidate.values


def _search_at_random(settings: Settings, executor: TrialExecutor, study: TuningStudy, identity: Identity, space: Space,
                      start_per_s: float, console: Console) -> Finalist | None:
    """The best that a random search finds in as much time as the trials of the search took, if that is asked for."""
    if Role.random not in settings.compare:
        return None
    wanted_s = _device_s(study.trials)
    console.print(f"\nrandom search for as long as the search took, {wanted_s / 60:.1f} min", highlight=False)
    # With a seed of its own: with the study's, it would draw what the study began with.
    options = replace(settings.study, sampler=SamplerKind.random, name=f"{settings.study.name}-random",
                      seed=settings.study.seed + 1)
    with open_study(settings.folder / RANDOM, options, identity, space, settings.slo.names,
                    settings.assemble) as drawn:
        executor.begin(start_per_s, drawn.trials)
        while (left_s := wanted_s - _device_s(drawn.trials)) > 0 and (candidate := drawn.ask()) is not None:
            with _under_way(drawn, candidate, console):
                outcome = executor.run(candidate)
            drawn.tell(candidate, outcome)
            print_trial(drawn, candidate, outcome, left_s, console)
        best = next(iter(drawn.shortlist(1)), None)
        return None if best is None else finalist_of(settings, drawn, best, "random", Role.random, best.rate_per_s)


def _device_s(trials: Sequence[Trial]) -> float:
    """How long trials took."""
    return sum(float(trial.facts.get("duration_s", 0.0)) for trial in trials if trial.repeats is None)


@contextmanager
def _under_way(study: TuningStudy, candidate: Candidate, console: Console) -> Iterator[None]:
    """A candidate is being measured; if that is interrupted, the study keeps it for the next start."""
    try:
        with console.status(f"trial {candidate.number}: {shown_values(candidate)}"):
            yield
    except BaseException:
        study.tell(candidate, Outcome(Ending.abandoned))
        raise


def _tried(executor: TrialExecutor, adviser: Adviser, candidate: Candidate) -> Outcome:
    """Measure a candidate, if it is worth it."""
    prediction = adviser.predict(candidate.config, executor.rate_search())
    return (adviser.screened_out(prediction, executor.incumbent_per_s)
            or adviser.compared(prediction, executor.run(candidate)))


def _repeat_cold(executor: TrialExecutor, audit: HotAudit, candidate: Candidate, outcome: Outcome,
                 started_with: Mapping[str, Value], settings: Settings, console: Console) -> None:
    """Measure a hot trial's best rate once more on a fresh engine, with equal arrivals."""
    before = audit.demoted()
    stream = f"audit {candidate.number}"
    try:
        with console.status(f"trial {candidate.number} again, hot and cold, to see whether it matters"):
            tpots = []
            for cold in (False, True):
                _, path = executor.measure_at(candidate.config, outcome.rate_per_s, settings.budget.requests, stream,
                                              cold=cold, stops_early=False)
                tpots.append(_mean_tpot_s([request.latencies for request in read_run(path).measured]))
    except EngineFailed:
        audit.gave_up()
        return
    if None in tpots:
        audit.gave_up()
        return
    repeat = Repeat(changed_knobs(candidate.values, started_with), *tpots)  # type: ignore[arg-type]
    audit.take(repeat)
    console.print(f"        again, cold: TPOT {repeat.difference:+.1%} hot against cold", highlight=False)
    for key in sorted(audit.demoted() - before):
        console.print(f"        {key} behaves differently in a live engine: from now on it gets a fresh process",
                      style="yellow", highlight=False)


def _mean_tpot_s(requests: Sequence[RequestLatencies | None]) -> float | None:
    tpots = [request.tpot_s for request in requests if request is not None and request.tpot_s is not None]
    return sum(tpots) / len(tpots) if tpots else None


def _is_enough(settings: Settings, study: TuningStudy) -> bool:
    limit = settings.budget.trials
    tried = [trial for trial in study.trials if trial.repeats is None and trial.ending is not Ending.screened_out]
    return limit is not None and len(tried) >= limit
