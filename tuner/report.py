"""report.html: one page that says what was found and why to believe it, with everything it needs inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from servekit.config.bench import SloConfig
from servekit.config.errors import show
from servekit.load.metrics import RequestLatencies
from servekit.load.percentiles import rank
from servekit.tuner.certificate import Certificate
from servekit.tuner.importance import FEWEST_TRIALS, knob_importance
from servekit.tuner.judgement import FinalistFinding, RateFinding, Role, is_same_rate, latencies_of
from servekit.tuner.reverts import Revert
from servekit.tuner.run_log import LoggedRun, read_run
from servekit.tuner.slo import LATENCIES, Promise, Slo
from servekit.tuner.space import Knob, Space, words
from servekit.tuner.study import Trial
from servekit.tuner.trial import Ending

LEVELS = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
"""Factors on every limit of the objective, for which the same logs are judged again."""
_CURVE_POINTS = 240
_TIMELINE_S = 60.0
_REASONS: Mapping[Ending, str] = {
    Ending.illegal: "the settings do not go together", Ending.out_of_memory_at_start: "no memory to start",
    Ending.out_of_memory: "out of memory", Ending.hung: "hung", Ending.crashed: "crashed",
    Ending.invalid: "bad measurement", Ending.screened_out: "screened out by the simulator",
    Ending.abandoned: "abandoned"}


@dataclass(frozen=True)
class Findings:
    """Everything that a report draws from."""

    certificate: Certificate
    folder: Path
    """In which the certificate's logs lie."""
    runs_folder: Path
    """In which the logs of the search lie."""
    space: Space
    trials: Sequence[Trial]
    model: str
    """As people would call it; so are the next two."""
    workload: str
    plan: Sequence[str] = ()
    """What was going to be searched and measured, line by line."""
    reverts: Sequence[Revert] = ()
    """The winner with each of its knobs put back."""
    closest: str = ""
    """Where the search found nothing that holds: what came closest, and what bound it."""


@dataclass(frozen=True)
class _Run:
    """A run with what it is a run of."""

    config_hash: str
    run: LoggedRun

    @property
    def is_whole(self) -> bool:
        """Whether every request of it was waited for, and nothing was wrong with the measurement."""
        return len(self.run.measured) == self.run.num_requests and not self.run.problems


def write_report(findings: Findings, path: Path) -> None:
    """Write the page."""
    data = msgspec.json.encode(report_data(findings)).decode().replace("</", "<\\/")
    template = files("servekit.tuner").joinpath("report.html").read_text(encoding="utf-8")
    path.write_text(template.replace("@DATA@", data), encoding="utf-8")


def report_data(findings: Findings) -> dict[str, Any]:
    """What the page shows, as JSON has it; times in seconds, rates in requests per second."""
    certificate = findings.certificate
    slo, judgement = certificate.claim.objective, certificate.judgement
    runs = [*_confirmation_runs(findings), *_search_runs(findings)]
    shown = _shown(certificate)
    return {
        "objective": [_promise_text(promise) for promise in slo.promises],
        "workload": findings.workload, "model": findings.model, "made_at": certificate.claim.made_at,
        "device": dict(certificate.claim.device), "winner": judgement.winner, "ratio": asdict_or_none(judgement.ratio),
        "closest": findings.closest, "differences": [asdict(difference) for difference in judgement.differences],
        "rows": [_row(certificate, found) for found in judgement.finalists], "failures": certificate.claim.failures,
        "plan": list(findings.plan), "space": list(_space_rows(findings)),
        "curves": list(_curves(certificate, slo, runs)), "knees": list(_knees(slo, shown, runs)),
        "trials": [_trial(trial) for trial in findings.trials], "importance": _importance(findings),
        "reverts": [asdict(revert) for revert in findings.reverts],
        "bounds": list(_bounds(findings, shown)), "levels": _levels(slo, shown, runs),
        "timelines": list(_timelines(certificate, runs)),
        "facts": list(_facts(certificate, runs[:len(certificate.claim.runs)])),
    }


def asdict_or_none(value: Any) -> dict[str, Any] | None:
    """A dataclass as a mapping, if there is one."""
    return None if value is None else asdict(value)


# --- runs -------------------------------------------------------------------------------------------------------------

def _confirmation_runs(findings: Findings) -> Iterator[_Run]:
    for text in findings.certificate.claim.runs:
        run = read_run(findings.folder / text.log)
        yield _Run(run.config_hash, run)


def _search_runs(findings: Findings) -> Iterator[_Run]:
    """Of the trials whose logs are still there; none that was disturbed."""
    for trial in findings.trials:
        for fact in trial.facts.get("runs", ()) if trial.repeats is None else ():
            path = findings.runs_folder / fact["log"]
            if path.is_file() and not fact.get("problems"):
                yield _Run(trial.config_hash, read_run(path))


@dataclass(frozen=True)
class _Shown:
    """A configuration that the charts compare."""

    name: str
    role: Role
    config_hash: str
    finding: FinalistFinding


def _shown(certificate: Certificate) -> list[_Shown]:
    """The winner and whom it is compared with; without a winner, the first that the search found and was measured."""
    judgement = certificate.judgement
    tuned = [found for found in judgement.finalists if found.role is Role.tuned]
    first = judgement.winner or next((found.name for found in sorted(tuned, key=lambda found: not found.rates)), None)
    hashes = {finalist.name: finalist.config_hash for finalist in certificate.claim.finalists}
    return [_Shown(found.name, found.role, hashes[found.name], found) for found in judgement.finalists
            if found.name == first or found.role is not Role.tuned]


# --- the summary ------------------------------------------------------------------------------------------------------

def _promise_text(promise: Promise) -> str:
    limits = ", ".join(f"{name} ≤ {_seconds(limit_s)}" for name, limit_s in _limits(promise.limits).items())
    return f"{promise.per_mille / 10:g} % of requests: {limits}"


def _limits(limits: SloConfig) -> dict[str, float]:
    """By latency, as in LATENCIES."""
    given = asdict(limits)
    return {name: given[f"{name}_s"] for name in LATENCIES if given[f"{name}_s"] is not None}


def _seconds(value_s: float) -> str:
    return f"{value_s:g} s" if value_s >= 1 else f"{value_s * 1e3:g} ms"


def _row(certificate: Certificate, found: FinalistFinding) -> dict[str, Any]:
    finalist = next(one for one in certificate.claim.finalists if one.name == found.name)
    at = _decisive(found)
    return {"name": found.name, "role": found.role.value, "is_winner": found.name == certificate.judgement.winner,
            "confirmed_per_s": found.confirmed_per_s, "failed_per_s": found.failed_per_s,
            "searched_per_s": finalist.searched_rate_per_s, "overrides": finalist.overrides,
            "config_hash": finalist.config_hash, "survives": found.survives_attack,
            "at_per_s": None if at is None else at.rate_per_s,
            "promises": [] if at is None else [_promise_row(certificate.claim.objective, one) for one in at.promises]}


def _decisive(found: FinalistFinding) -> RateFinding | None:
    """Where it was confirmed, or else the lowest rate at which it failed."""
    if found.confirmed_per_s is not None:
        return found.at(found.confirmed_per_s)
    return found.rates[0] if found.rates else None


def _promise_row(slo: Slo, finding: Any) -> dict[str, Any]:
    """A promise with its latency and bounds, where it is about one latency."""
    promise = next(promise for promise in slo.promises if promise.name == finding.promise)
    limits = list(_limits(promise.limits).values())
    scale = limits[0] if len(limits) == 1 else None

    def latency_s(use: float | None) -> float | None:
        return None if use is None or scale is None else use * scale

    return {**asdict(finding), "latency_s": latency_s(finding.use), "low_s": latency_s(finding.use_low),
            "high_s": latency_s(finding.use_high), "limit_s": scale, "holds": finding.holds}


def _space_rows(findings: Findings) -> Iterator[dict[str, Any]]:
    winner = _trial_of(findings, findings.certificate.judgement.winner)
    for knob in findings.space.knobs:
        chosen = winner.values.get(knob.key) if winner else None
        is_set = winner is not None and knob.key in winner.values
        start = findings.space.start.get(knob.key)
        yield {"knob": knob.key, "domain": words(knob.domain), "default": show(start),
               "winner": show(chosen) if is_set else "", "changed": is_set and chosen != start,
               "warmth": knob.warmth.value,
               "condition": _condition_words(knob)}


def _condition_words(knob: Knob) -> str:
    """When it matters; empty: always."""
    condition = knob.condition
    return "" if condition is None else f"{condition.key} is {' or '.join(map(show, condition.kinds))}"


def _trial_of(findings: Findings, name: str | None) -> Trial | None:
    """The trial of a finalist's configuration."""
    wanted = {one.name: one.config_hash for one in findings.certificate.claim.finalists}.get(name or "")
    return next((trial for trial in findings.trials if trial.config_hash == wanted and trial.repeats is None), None)


# --- charts -----------------------------------------------------------------------------------------------------------

_Pick = Callable[[RequestLatencies], float | None]
_PICKS: Mapping[str, _Pick] = {"ttft": lambda of: of.ttft_s, "tpot": lambda of: of.tpot_s,
                               "itl": lambda of: of.longest_itl_s, "e2e": lambda of: of.e2e_s}


def _drawn_latencies(slo: Slo) -> list[str]:
    """TTFT and TPOT always, the others where something is promised of them."""
    limited = {name for promise in slo.promises for name in _limits(promise.limits)}
    return [name for name in LATENCIES if name in limited | {"ttft", "tpot"}]


def _limits_on(slo: Slo, latency: str) -> list[dict[str, float]]:
    return [{"limit_s": _limits(promise.limits)[latency], "share": promise.per_mille / 1000}
            for promise in slo.promises if latency in _limits(promise.limits)]


def _values(runs: Sequence[LoggedRun], latency: str) -> list[float]:
    """In ascending order, of the requests that were answered."""
    answered = (request for run in runs for request in latencies_of(run) if request is not None)
    return sorted(value for request in answered if (value := _PICKS[latency](request)) is not None)


def _curves(certificate: Certificate, slo: Slo, runs: Sequence[_Run]) -> Iterator[dict[str, Any]]:
    """Distribution functions: the winner at its rate, the default at the same and at its own."""
    series = list(_compared(certificate, runs))
    for latency in _drawn_latencies(slo):
        yield {"latency": latency, "limits": _limits_on(slo, latency),
               "series": [{"name": name, "role": role.value, "is_own": is_own,
                           "count": sum(len(run.measured) for run in found), **_curve(found, latency)}
                          for name, role, is_own, found in series]}


def _compared(certificate: Certificate, runs: Sequence[_Run]) -> Iterator[tuple[str, Role, bool, list[LoggedRun]]]:
    """Name, role, whether the rate is its own best, and runs."""
    shown, count = _shown(certificate), len(certificate.claim.runs)
    winner = next((one for one in shown if one.name == certificate.judgement.winner), None)
    rates = [(one, at.rate_per_s, True) for one in shown if (at := _decisive(one.finding)) is not None]
    if winner is not None and winner.finding.confirmed_per_s is not None:
        rates[1:1] = [(one, winner.finding.confirmed_per_s, False) for one in shown if one is not winner]
    seen = set[tuple[str, float]]()
    for one, rate_per_s, is_own in rates:
        found = [run.run for run in runs[:count] if run.config_hash == one.config_hash and run.is_whole
                 and is_same_rate(run.run.rate_per_s, rate_per_s)]
        if found and (one.name, rate_per_s) not in seen:
            seen.add((one.name, rate_per_s))
            yield f"{one.name} at {rate_per_s:.3g}/s", one.role, is_own, found


def _curve(runs: Sequence[LoggedRun], latency: str) -> dict[str, list[float]]:
    """Points of a distribution function; failed requests never arrive, so it may end below 1."""
    values, total = _values(runs, latency), sum(len(run.measured) for run in runs)
    spread = np.linspace(0, len(values) - 1, min(len(values), _CURVE_POINTS))
    places = sorted(set(map(int, spread)))
    return {"x": [values[place] for place in places], "y": [(place + 1) / total for place in places]}


def _knees(slo: Slo, shown: Sequence[_Shown], runs: Sequence[_Run]) -> Iterator[dict[str, Any]]:
    """Latency over rate, from every run of the winner and the default."""
    for latency in _drawn_latencies(slo):
        limits = _limits_on(slo, latency)
        per_mille = round(max((limit["share"] for limit in limits), default=0.99) * 1000)
        yield {"latency": latency, "per_mille": per_mille, "limits": limits, "series": [
            {"name": one.name, "role": one.role.value,
             "points": sorted(_knee_points([run for run in runs if run.config_hash == one.config_hash], latency,
                                           per_mille), key=lambda point: point["rate_per_s"])} for one in shown]}


def _knee_points(runs: Sequence[_Run], latency: str, per_mille: int) -> Iterator[dict[str, Any]]:
    for run in runs:
        values = _values([run.run], latency)
        if values and not run.run.problems:
            yield {"rate_per_s": run.run.rate_per_s, "latency_s": values[rank(per_mille, len(values)) - 1],
                   "count": len(values), "is_whole": run.is_whole, "warm": run.run.warm}


def _trial(trial: Trial) -> dict[str, Any]:
    return {"number": trial.number, "rate_per_s": trial.rate_per_s, "is_feasible": trial.is_feasible,
            "reason": _reason(trial), "origin": trial.origin.value.replace("_", " "),
            "is_repeat": trial.repeats is not None,
            "values": [f"{key}={show(value)}" for key, value in trial.values.items()]}


def _reason(trial: Trial) -> str:
    """Why it is not feasible."""
    if trial.is_feasible:
        return ""
    if trial.ending in _REASONS:
        error = trial.facts.get("error")
        return f"{_REASONS[trial.ending]}: {error}" if error else _REASONS[trial.ending]
    broken = [name for name, value in trial.constraints.items() if value > 0]
    time = " in the time that one configuration may take" if trial.facts.get("is_out_of_time") else ""
    return f"missed {', '.join(broken)} at every rate that was tried{time}"


def _importance(findings: Findings) -> dict[str, Any]:
    shares = knob_importance(findings.space, findings.trials)
    measured = sum(trial.repeats is None for trial in findings.trials)
    return {"shares": shares, "why": "" if shares else f"Too few trials: {measured}, and it takes {FEWEST_TRIALS} "
            "before the best tenth can be told from the rest." if measured < FEWEST_TRIALS else
            "The trials do not differ enough to tell."}


def _bounds(findings: Findings, shown: Sequence[_Shown]) -> Iterator[dict[str, Any]]:
    """Shares of the steps by what bound them, in the search's own trials of the winner and the default."""
    for one in shown:
        trial = _trial_of(findings, one.name)
        counts: Mapping[str, int] = trial.facts.get("bound", {}) if trial else {}
        total = sum(counts.values())
        if total:
            yield {"name": one.name, "role": one.role.value, "num_steps": total,
                   "shares": {bound: count / total for bound, count in counts.items()}}


def _levels(slo: Slo, shown: Sequence[_Shown], runs: Sequence[_Run]) -> dict[str, Any]:
    """The highest measured rate at which each would hold, were all limits so many times as long."""
    whole = [run for run in runs if run.is_whole]
    rows = [(one.name, [run for run in whole if run.config_hash == one.config_hash]) for one in shown]
    rows.append(("any configuration", whole))
    scaled = [_scaled(slo, factor) for factor in LEVELS]
    return {"factors": LEVELS, "objectives": [[_promise_text(promise) for promise in one.promises] for one in scaled],
            "rows": [{"name": name, "num_runs": len(own), "rates_per_s": [_highest(one, own) for one in scaled]}
                     for name, own in rows]}


def _scaled(slo: Slo, factor: float) -> Slo:
    """The objective with every limit longer by a factor."""
    return Slo(tuple(replace(promise, limits=SloConfig(**{
        f"{name}_s": limit_s * factor for name, limit_s in _limits(promise.limits).items()}))
        for promise in slo.promises))


def _highest(slo: Slo, runs: Sequence[_Run]) -> float | None:
    return max((run.run.rate_per_s for run in runs if slo.holds(latencies_of(run.run))), default=None)


def _timelines(certificate: Certificate, runs: Sequence[_Run]) -> Iterator[dict[str, Any]]:
    """The beginning of the first run of each that is compared: arrival, first token and end of every request."""
    for name, role, _, found in _compared(certificate, runs):
        requests = [request for request in found[0].measured if request.intended_s <= _TIMELINE_S]
        yield {"name": name, "role": role.value, "stream": found[0].stream, "requests": [
            [request.intended_s, request.chunk_times_s[0] if request.chunk_times_s else request.ended_s,
             request.ended_s, request.prompt_tokens, request.num_output_tokens,
             "" if request.failure is None else request.failure.value] for request in requests]}


# --- facts ------------------------------------------------------------------------------------------------------------

def _facts(certificate: Certificate, runs: Sequence[_Run]) -> Iterator[tuple[str, str]]:
    claim = certificate.claim
    yield "made", claim.made_at
    yield "digest", certificate.digest
    for name, value in (*claim.device.items(), *claim.search.items()):
        yield name.replace("_", " "), show(value)
    yield "versions", ", ".join(f"{name} {number}" for name, number in claim.versions.items())
    yield "workload", (f"{claim.load.workload_hash}, seed {claim.load.seed}, {claim.load.warmup_requests} warm-up "
                       "requests a run")
    yield "objective", claim.slo_fingerprint
    yield "base", " ".join(claim.base_overrides) or "as it is"
    if runs:
        yield "runs", f"{len(claim.runs)}, each on a fresh process"
        streams = ", ".join(dict.fromkeys(run.run.stream for run in runs))
        yield "arrivals", f"random streams {streams}: the search used none of them"
    for name, attack in certificate.attacks.items():
        memory = "unknown" if attack.peak_memory_bytes is None else f"{attack.peak_memory_bytes / 2**20:.0f} MiB"
        survival = "survived" if attack.survived else "DID NOT survive"
        yield f"memory attack on {name}", (
            f"{survival} {attack.num_requests} requests; peak memory of the process {memory}, "
            f"{attack.peak_kv_share:.0%} of the KV cache in use, {attack.preemptions} preemptions, "
            f"{attack.swapped_out_blocks} blocks swapped out")
    for name, why in claim.failures.items():
        yield f"{name} failed", why

