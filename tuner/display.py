"""What is printed while a tuning goes on: the plan, then one line a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rich.console import Console

from servekit.config.errors import show
from servekit.config.schema import Config
from servekit.tuner.adviser import SIMULATOR, Adviser, describe
from servekit.tuner.baseline import Baseline
from servekit.tuner.default_space import not_searched
from servekit.tuner.launch import LaunchConfig
from servekit.tuner.rate_search import LOSING_SHARE, Allowance, RateSearch
from servekit.tuner.settings import Settings
from servekit.tuner.slo import Promise
from servekit.tuner.space import Space, words
from servekit.tuner.statistics import requests_needed
from servekit.tuner.study import TuningStudy
from servekit.tuner.trial import Candidate, Ending, Outcome


@dataclass(frozen=True)
class PlannedRuns:
    """What a trial consists of."""

    num_requests: int
    """Of each run."""
    start_per_s: float
    """Rate of the first."""
    allowance: Allowance


def print_plan(settings: Settings, space: Space, baseline: Baseline, runs: PlannedRuns, num_trials: int,
               console: Console) -> None:
    """What will be searched, how long a trial is, and how many requests a verdict needs."""
    for line in (_objective(settings), *_device(baseline), *_searched(settings, space),
                 _trial_length(settings, runs), _budget(settings, num_trials), *_trials(settings, runs), ""):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _objective(settings: Settings) -> str:
    return "objective: " + ", ".join(f"{promise.name} ({_limits(promise)})" for promise in settings.slo.promises)


def _limits(promise: Promise) -> str:
    limits = promise.limits
    named = {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "itl": limits.itl_s, "e2e": limits.e2e_s}
    return ", ".join(f"{name} {value * 1e3:g} ms" for name, value in named.items() if value is not None)


def _device(baseline: Baseline) -> list[str]:
    single = baseline.single
    tpot = "" if single.tpot_s is None else f", TPOT {single.tpot_s * 1e3:.1f} ms"
    return [f"engine: {baseline.description.model}, on {baseline.description.device}",
            f"one request alone: TTFT {single.ttft_s * 1e3:.0f} ms{tpot}; at most about {baseline.capacity_per_s:.2f} "
            "req/s come through"]


def _searched(settings: Settings, space: Space) -> list[str]:
    knobs = [f"  {knob.key}: {words(knob.domain)} ({knob.warmth.value}; from {show(space.start[knob.key])})"
             for knob in space.knobs]
    base = settings.base
    is_own = isinstance(settings.search, Mapping)
    left = not_searched(base) if isinstance(base, Config) and not is_own else {}
    return [f"searched: {len(space.knobs)} knobs", *knobs,
            *([f"left as they are, since they decide less than these; search=all varies them, too, and knows more "
               f"values: {', '.join(space.left_out)}"] if space.left_out else []),
            *([f"left as they are, being the owner's decision: {', '.join(left)}"] if left else []),
            *(() if settings.server is None else _OTHER_SERVER),
            *(["base is left aside: it is about servekit's own engine"] if settings.ignores_base else [])]


_OTHER_SERVER = (
    "null: the knob is left out, and the server decides",
    "another server: every trial is a fresh process; there are no hot trials, no steps to tell drift or the binding "
    "limit or to simulate from, and no memory attack")


def _trial_length(settings: Settings, runs: PlannedRuns) -> str:
    requests, rate_per_s = runs.num_requests, runs.start_per_s
    strictest = max(promise.per_mille for promise in settings.slo.promises)
    return (f"a run of a trial: {requests} requests, about {requests / rate_per_s:.0f} s at {rate_per_s:.2f} req/s, "
            f"shorter as soon as its verdict is certain; {requests_needed(strictest)} requests without a miss would "
            f"prove {strictest / 10:g} % at 95 % confidence")


def _budget(settings: Settings, num_trials: int) -> str:
    budget = settings.budget
    done = f"; {num_trials} trials are there already" if num_trials else ""
    rivals = ""
    if settings.compare:
        rivals = (f"; {budget.rival_s / 60:.1f} minutes more of confirmation for each of "
                  f"{', '.join(role.value for role in settings.compare)} that is a configuration of its own")
    return f"budget: {budget.minutes:g} minutes, {budget.confirm_share:.0%} of them for the confirmation{rivals}{done}"


def _trials(settings: Settings, runs: PlannedRuns) -> list[str]:
    """How many configurations there is time for, and what each may take of it."""
    search_s, allowance, limit = settings.budget.search_s, runs.allowance, settings.budget.trials
    run_s = max(allowance.shortest_s(runs.start_per_s, holds=True), settings.budget.min_run_s)
    holding_s = min(max(allowance.narrowing_s, run_s), RateSearch.max_runs * run_s)
    return [f"trials: about {ceil(search_s / holding_s)} if each holds at such a rate, {round(1 / LOSING_SHARE)} if "
            "none holds anything, more where a run is soon seen to fail beside a better one"
            f"{'' if limit is None else f'; no more than {limit}, as budget.trials says'}",
            f"of {search_s / 60:.1f} minutes for the search, a configuration that holds nothing gets about "
            f"{allowance.losing_s:.0f} s ({LOSING_SHARE:.0%}), one that holds up to {allowance.most_s:.0f} s on the "
            f"way up, {allowance.narrowing_s:.0f} s where it is narrowed down after that; no rate below "
            f"{min(runs.start_per_s, allowance.lowest_per_s):.2f} req/s is tried, where one run would take longer",
            "a rate above the best so far must hold in a second run as well, on other arrivals, if there is time for "
            "one"]


def print_trial(study: TuningStudy, candidate: Candidate, outcome: Outcome, left_s: float, console: Console) -> None:
    """One line: what became of it, the best so far, the time left."""
    best = next(iter(study.shortlist(1)), None)
    best_words = "none holds yet" if best is None else f"best {best.rate_per_s:.2f} req/s (trial {best.number})"
    warm = f", {outcome.facts['warm']}" if "warm" in outcome.facts else ""
    took = f" in {outcome.facts['duration_s']:.0f} s" if "duration_s" in outcome.facts else ""
    console.print(f"trial {candidate.number:3}{warm}: {_ending(outcome)}{took}; {best_words}; "
                  f"{max(0.0, left_s) / 60:.1f} min left  [{shown_values(candidate)}]",
                  highlight=False, markup=False, soft_wrap=True)


def print_advice(adviser: Adviser, outcome: Outcome, console: Console) -> None:
    """What the simulator said of a trial, and how good it has been."""
    if SIMULATOR in outcome.facts:
        console.print(f"        simulated: {outcome.facts[SIMULATOR]['predicted_per_s']:.2f} req/s; "
                      f"{describe(adviser.record)}", highlight=False, markup=False, soft_wrap=True)


def _ending(outcome: Outcome) -> str:
    if outcome.ending is not Ending.measured:
        detail = str(outcome.facts.get("error") or ", ".join(outcome.facts.get("problems", ())))
        ending = str(outcome.ending.value).replace("_", " ")
        return f"{ending} ({detail})" if detail else ending
    problems = sorted({problem for run in outcome.facts["runs"] for problem in run.get("problems", ())})
    return _verdict(outcome) + (f" (a run made twice: {', '.join(problems)})" if problems else "")


def _verdict(outcome: Outcome) -> str:
    if outcome.rate_per_s > 0:
        return f"holds at {outcome.rate_per_s:.2f} req/s"
    broken = ", ".join(name for name, value in outcome.violations.items() if value > 0)
    lowest = min((run["rate_per_s"] for run in outcome.facts["runs"]), default=0.0)
    if outcome.facts["is_out_of_time"]:
        return (f"no rate held down to {lowest:.2f} req/s in the time that one configuration may take: "
                f"there it breaks {broken}")
    return f"breaks {broken} at {lowest:.2f} req/s"


def shown_values(candidate: Candidate) -> str:
    """The knobs that matter in a candidate, in one line; of another server, those that are given."""
    if isinstance(candidate.config, LaunchConfig):
        return _pairs(candidate.config.knobs) or "start_command as it is"
    return _pairs({key.removeprefix("scheduler."): value for key, value in candidate.values.items()})


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={show(value)}" for key, value in values.items())
