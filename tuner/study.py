"""The search: Optuna proposes, something else measures, and every trial is kept where the next start finds it.

What Optuna must be told, and in which way, is not obvious (each point was found by trying version 5.0.0):

- A trial without constraints counts as feasible, so every trial that ends gets all of them, in one order, once.
- A crash is an answer: told as failed it would teach the sampler nothing, so it is told as complete and infeasible.
- A bad measurement is no answer: it is told as failed, and the same configuration is tried once more.
- Samplers repeat themselves. A configuration that was measured is told its earlier outcome and not measured again.
- Every knob is suggested in every trial, also one that does not matter in it, so that the GP sampler can be used and
  multivariate TPE sees all trials; which configurations are equal is decided by their resolved hash.
- A process that is killed leaves a trial running for ever. It is closed, and its configuration tried again.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.tuner.launch import Configuration
from servekit.tuner.space import Integers, Knob, Ladder, Options, Reals, Space, Value
from servekit.tuner.trial import NEVER_RAN, Candidate, Ending, Outcome

FORMAT_VERSION = 1
"""Of what is stored in a study."""
MAX_REPEATS = 5
"""Suggestions in a row that bring nothing new, after which they are drawn at random: learners insist."""
MAX_DRAWS = 50
"""Random draws in a row that bring nothing new, after which the space counts as exhausted."""
NO_ANSWERS = (Ending.invalid, Ending.abandoned)
"""Endings that say nothing of the configuration."""
RAN = "ran"
"""The constraint that a configuration breaks by not running at all."""

Assemble: TypeAlias = Callable[[Sequence[str]], Configuration]
"""The configuration that overrides make of the base. Raises ConfigError."""
Params: TypeAlias = dict[str, Any]
"""A point in Optuna's terms."""


class SamplerKind(Enum):
    """Who proposes."""

    tpe = "tpe"
    gp = "gp"
    random = "random"
    qmc = "qmc"


class Origin(Enum):
    """Why a configuration is tried."""

    base = "base"
    rule_of_thumb = "rule_of_thumb"
    recipe = "recipe"
    sampler = "sampler"
    simulator = "simulator"
    shortlist = "shortlist"


@dataclass(frozen=True)
class StudyOptions:
    """How to search."""

    name: str = "tune"
    sampler: SamplerKind = SamplerKind.tpe
    num_startup_trials: int = 10
    """Trials, those asked for by name included, before the sampler learns from them."""
    seed: int = 0
    storage: str | None = None
    """URL of a database that several machines share; None: a file in the run folder, for one process at a time."""
    trial_timeout_s: float = 3600.0
    """Longest life of a trial. With a shared storage, one that runs longer is taken for lost."""


@dataclass(frozen=True)
class Identity:
    """What the trials of one study have in common. Fingerprints, or words where they are short."""

    space: str
    slo: str
    workload: str
    model: str
    device: str
    format: str = str(FORMAT_VERSION)


@dataclass(frozen=True)
class Trial:
    """A trial that has ended."""

    number: int
    origin: Origin
    ending: Ending
    values: Mapping[str, Value]
    config_hash: str
    """Empty for settings that do not go together."""
    rate_per_s: float
    constraints: Mapping[str, float]
    """Above 0 is broken."""
    repeats: int | None
    """The trial whose outcome this one was told, if it was not run."""
    facts: Mapping[str, Any]

    @property
    def is_feasible(self) -> bool:
        """Whether it was measured and kept every promise."""
        is_measured = self.ending in (Ending.measured, Ending.stopped_early)
        return is_measured and all(value <= 0 for value in self.constraints.values())


class TrialLost(Exception):
    """The outcome of a trial came after it had been given up."""


@contextmanager
def open_study(folder: Path, options: StudyOptions, identity: Identity, space: Space, promises: Sequence[str],
               assemble: Assemble) -> Iterator[TuningStudy]:
    """Begin a study in a run folder, or go on with the one that is there.

    Raises:
        ConfigError: the study is of another model, device, objective, workload or space, is in use by another
            process, or its storage cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _alone_in(folder) if options.storage is None else nullcontext():
        storage = _storage(folder, options.storage)
        study = _load_or_create(storage, options.name)
        _claim(study, identity)
        tuning = TuningStudy(study, options, space, promises, assemble)
        tuning.bury_the_dead()
        yield tuning


class TuningStudy:
    """Proposes configurations and remembers their outcomes. Made by `open_study`."""

    def __init__(self, study: optuna.Study, options: StudyOptions, space: Space, promises: Sequence[str],
                 assemble: Assemble) -> None:
        self._study = study
        num_trials = len(study.get_trials(deepcopy=False))
        self._sampler = make_sampler(options, num_trials)
        self._dice = make_sampler(replace(options, sampler=SamplerKind.random), num_trials)
        self._options = options
        self._space = space
        self._constraints = (RAN, *promises)
        self._assemble = assemble
        self._running: dict[int, optuna.Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        """Those that have ended, in the order of their numbers."""
        ended = (trial for trial in self._frozen(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
                 if _ENDING in trial.user_attrs)
        # A process may be killed between the two steps in which it tells how a trial ended.
        return [_read_trial(trial) for trial in ended
                if trial.state is not TrialState.FAIL or Ending(trial.user_attrs[_ENDING]) in NO_ANSWERS]

    def enqueue(self, config: Configuration, origin: Origin) -> bool:
        """Try a configuration before any suggestion. False if it was measured, is running or is queued already.

        Raises ConfigError if it is outside the search space.
        """
        point = self._space.locate(config)
        params = {knob.key: to_param(knob, point[knob.key]) for knob in self._space.knobs}
        known = self._frozen(TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE)
        if any(params in (trial.params, trial.user_attrs.get(_ASKED_FOR)) for trial in known):
            return False
        self._enqueue(params, origin)
        return True

    def ask(self) -> Candidate | None:
        """The next configuration to measure, one that was not measured before. None: there seems to be no other."""
        if self._options.storage is not None:
            self.bury_the_dead()
        for sampler, count in ((self._sampler, MAX_REPEATS), (self._dice, MAX_DRAWS)):
            self._study.sampler = sampler
            for _ in range(count):
                if candidate := self._suggested():
                    return candidate
        return None

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Record what became of a candidate.

        Raises:
            ValueError: the outcome is not one of every promise of this study.
            TrialLost: it had been given up, since it took longer than `trial_timeout_s`.
        """
        if outcome.violations and set(outcome.violations) != set(self._constraints[1:]):
            raise ValueError(f"violations of {sorted(outcome.violations)} are not those of {self._constraints[1:]}")
        self._record(self._running.pop(candidate.number), outcome)

    def overrides(self, trial: Trial) -> list[str]:
        """What composes a trial's configuration on top of the base."""
        return self._space.overrides({**self._space.start, **trial.values})

    def shortlist(self, count: int) -> list[Trial]:
        """The best that kept every promise, for another measurement: the rate of a best trial owes much to luck."""
        feasible = [trial for trial in self.trials if trial.is_feasible and trial.repeats is None]
        return sorted(feasible, key=lambda trial: (-trial.rate_per_s, trial.number))[:count]

    def bury_the_dead(self) -> None:
        """Close the trials whose process is gone, and try their configurations again.

        In a run folder that is every trial that this process did not begin. With a shared storage other machines may
        be at work, and only the time tells.
        """
        for trial in self._frozen(TrialState.RUNNING):
            is_lost = self._options.storage is None or time.time() - _started_s(trial) > self._options.trial_timeout_s
            if is_lost and trial.number not in self._running:
                self._bury(trial)

    # --- before a measurement ---

    def _suggested(self) -> Candidate | None:
        with _quiet():
            trial = self._study.ask()
            trial.set_user_attr(_STARTED, time.time())
            point = {knob.key: suggest(trial, knob) for knob in self._space.knobs}
        return self._prepared(trial, point)

    def _prepared(self, trial: optuna.Trial, point: Mapping[str, Value]) -> Candidate | None:
        """What is to be measured; None, and the trial is over, if nothing is."""
        values, overrides = self._space.active(point), self._space.overrides(point)
        trial.set_user_attr(_VALUES, values)
        self._running[trial.number] = trial
        try:
            config = self._assemble(overrides)
        except ConfigError as error:
            self._record(self._running.pop(trial.number), Outcome(Ending.illegal, facts={"error": str(error)}))
            return None
        found = config_hash(config)
        if (same := self._same(found)) is not None:
            self._repeat(self._running.pop(trial.number), same)
            return None
        trial.set_user_attr(_HASH, found)
        return Candidate(trial.number, values, overrides, config, found)

    def _same(self, found: str) -> FrozenTrial | None:
        """A trial of the same configuration that was measured or is being measured."""
        return next((trial for trial in self._frozen(TrialState.COMPLETE, TrialState.RUNNING)
                     if trial.user_attrs.get(_HASH) == found), None)

    def _repeat(self, trial: optuna.Trial, same: FrozenTrial) -> None:
        """Tell a trial the outcome of its twin, or that it is one too many while the twin still runs elsewhere."""
        trial.set_user_attr(_REPEATS, same.number)
        if same.state is TrialState.RUNNING:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name in (_HASH, _ENDING):
            trial.set_user_attr(name, same.user_attrs[name])
        for name, value in same.constraints.items():
            trial.set_constraint(name, value)
        self._study.tell(trial, same.value)

    def _enqueue(self, params: Params, origin: Origin, retries: int | None = None) -> None:
        attrs = {_ORIGIN: origin.value, _ASKED_FOR: params}
        self._study.enqueue_trial(params, attrs if retries is None else {**attrs, _RETRIES: retries})

    # --- after it ---

    def _record(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """Attributes and constraints before the end of the trial: after it they cannot be set."""
        try:
            trial.set_user_attr(_ENDING, outcome.ending.value)
            trial.set_user_attr(_FACTS, dict(outcome.facts))
            self._end(trial, outcome)
        except (UpdateFinishedTrialError, ValueError) as error:
            raise TrialLost(f"trial {trial.number} was given up after {self._options.trial_timeout_s:g} s") from error

    def _end(self, trial: optuna.Trial, outcome: Outcome) -> None:
        if outcome.ending in NO_ANSWERS:
            self._study.tell(trial, state=TrialState.FAIL)
            self._try_again(trial, is_retry=outcome.ending is Ending.invalid)
            return
        self._constrain(trial, outcome)
        if outcome.ending is Ending.screened_out:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.rate_per_s)

    def _constrain(self, trial: optuna.Trial, outcome: Outcome) -> None:
        trial.set_constraint(RAN, -1.0 if outcome.ending.has_verdict else 1.0)
        for name in self._constraints[1:]:
            trial.set_constraint(name, outcome.violations.get(name, NEVER_RAN))

    def _try_again(self, trial: optuna.Trial, is_retry: bool) -> None:
        """A bad measurement is repeated once; one that was abandoned as often as it takes."""
        if not is_retry or _RETRIES not in trial.user_attrs:
            retries = trial.number if is_retry else trial.user_attrs.get(_RETRIES)
            self._enqueue(trial.params, _origin(trial.user_attrs), retries)

    def _bury(self, trial: FrozenTrial) -> None:
        # Another machine may have been quicker.
        with suppress(UpdateFinishedTrialError, ValueError):
            self._study.tell(trial.number, state=TrialState.FAIL)
            params = trial.user_attrs.get(_ASKED_FOR) or trial.params
            if set(params) == {knob.key for knob in self._space.knobs}:
                self._enqueue(params, _origin(trial.user_attrs), trial.user_attrs.get(_RETRIES))

    def _frozen(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)


# --- a trial in Optuna's terms ----------------------------------------------------------------------------------------

_VALUES, _HASH, _ORIGIN, _ENDING, _FACTS = "values", "config_hash", "origin", "ending", "facts"
_ASKED_FOR = "asked_for"
"""The parameters of a trial that was enqueued: Optuna shows them to nobody until it runs."""
_REPEATS = "repeats"
"""The trial whose outcome this one was told."""
_RETRIES = "retries"
"""The trial whose bad measurement this one repeats."""
_STARTED = "started_s"
"""Seconds since 1970: the times that Optuna keeps have no time zone, and machines differ in theirs."""


def suggest(trial: optuna.Trial, knob: Knob) -> Value:
    """The value that the sampler wants for a knob. The steps of a ladder are numbered, which keeps their order."""
    match knob.domain:
        case Options(values):
            chosen: Value = trial.suggest_categorical(knob.key, values)
            return chosen
        case Ladder(values):
            return values[trial.suggest_int(knob.key, 0, len(values) - 1)]
        case Integers(low, high, is_log):
            return trial.suggest_int(knob.key, low, high, log=is_log)
        case Reals(low, high, is_log):
            return trial.suggest_float(knob.key, low, high, log=is_log)


def to_param(knob: Knob, value: Value) -> Any:
    """The parameter for which `suggest` gives this value. For a value outside the domain, one that is inside."""
    match knob.domain:
        case Options(values):
            return value if knob.domain.contains(value) else values[0]
        case Ladder(values):
            return values.index(value) if value in values else 0
        case Integers(low) | Reals(low):
            return value if knob.domain.contains(value) else low


def _read_trial(trial: FrozenTrial) -> Trial:
    attrs = trial.user_attrs
    return Trial(
        number=trial.number, origin=_origin(attrs), ending=Ending(attrs[_ENDING]), values=attrs[_VALUES],
        config_hash=attrs.get(_HASH, ""), rate_per_s=trial.value if trial.value is not None else 0.0,
        constraints=dict(trial.constraints), repeats=attrs.get(_REPEATS), facts=attrs.get(_FACTS, {}))


def _origin(attrs: Mapping[str, Any]) -> Origin:
    return Origin(attrs.get(_ORIGIN, Origin.sampler.value))


def _started_s(trial: FrozenTrial) -> float:
    if trial.datetime_start is None:
        return 0.0
    return float(trial.user_attrs.get(_STARTED, trial.datetime_start.timestamp()))


# --- samplers ---------------------------------------------------------------------------------------------------------

def startup_trials(num_trials: int) -> int:
    """How many of a budget of trials a sampler should see before it learns: a third, at least 5 and at most 10."""
    return max(1, min(10, max(5, num_trials // 3), num_trials - 1))


def make_sampler(options: StudyOptions, num_trials: int) -> BaseSampler:
    """The sampler of a study that has `num_trials` already.

    Each start draws from a seed of its own, since a sampler that begins again with the same seed would suggest the
    same configurations; so does each process of those that share a storage. QMC keeps its place in its sequence in
    the study, and needs the seed of its first start.
    """
    process = 0 if options.storage is None else crc32(f"{os.uname().nodename} {os.getpid()}".encode())
    seed = crc32(repr((options.seed, num_trials, process)).encode())
    with _quiet():
        match options.sampler:
            case SamplerKind.tpe:
                return TPESampler(multivariate=True, n_startup_trials=options.num_startup_trials, seed=seed)
            case SamplerKind.gp:
                return GPSampler(n_startup_trials=options.num_startup_trials, seed=seed,
                                 warn_independent_sampling=False)
            case SamplerKind.random:
                return RandomSampler(seed=seed)
            case SamplerKind.qmc:
                return QMCSampler(scramble=True, seed=options.seed, warn_independent_sampling=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's reminders that samplers may change between versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


# --- storage ----------------------------------------------------------------------------------------------------------

JOURNAL = "study.journal"
LOCK = "study.lock"
_IDENTITY = "servekit.identity"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder. The system lets go of the lock when the process dies, however."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("folder", folder, "another process is tuning there",
                              "wait for it, choose another folder, or share a database with study.storage=URL"
                              ) from None
        yield


def _storage(folder: Path, url: str | None) -> BaseStorage:
    if url is None:
        with _quiet():
            return JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    try:
        shown = make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        raise ConfigError("study.storage", "...", "is not the URL of a database",
                          "for example study.storage=postgresql+psycopg://user@host/name") from None
    try:
        return RDBStorage(url)
    except (SQLAlchemyError, ImportError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError("study.storage", shown, f"cannot be used: {reason}",
                          "check the URL, start the database, or install its driver") from None


def _load_or_create(storage: BaseStorage, name: str) -> optuna.Study:
    """Creating one that exists would leave a mark in it, and it may turn out to be somebody else's."""
    pruner = optuna.pruners.NopPruner()
    try:
        return optuna.load_study(study_name=name, storage=storage, pruner=pruner)
    except KeyError:
        return optuna.create_study(study_name=name, storage=storage, pruner=pruner, direction="maximize",
                                   load_if_exists=True)


def _claim(study: optuna.Study, identity: Identity) -> None:
    """Write on a new study what it is about; refuse one that is about something else."""
    stored = study.user_attrs.get(_IDENTITY)
    if stored is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_IDENTITY, asdict(identity))
        return
    for part, own in asdict(identity).items():
        other = (stored or {}).get(part)
        if other != own:
            raise ConfigError("study.name", study.study_name, f"was made for another {part}: {other}, not {own}",
                              "choose another folder or study.name, or tune what it was made for")
