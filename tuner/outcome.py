"""What a search comes to: confirmation, memory attack, tuned.yaml, certificate and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from servekit.config.errors import show
from servekit.config.resolve import config_hash
from servekit.tuner.attack import AttackLog
from servekit.tuner.certificate import NAME as CERTIFICATE
from servekit.tuner.certificate import Certificate, Circumstances, certify
from servekit.tuner.confirmation import (
    Confirmation,
    Confirmed,
    Entrant,
    Finalist,
    Progress,
    Rules,
    plan_time,
    roles_of,
    round_s,
)
from servekit.tuner.emission import TunedFor, results_of
from servekit.tuner.executor import Description, RunLength, TrialExecutor
from servekit.tuner.judgement import Judgement, Role, judge
from servekit.tuner.report import Findings, write_report
from servekit.tuner.reverts import Revert, describe_revert, put_back
from servekit.tuner.settings import Settings
from servekit.tuner.space import Space
from servekit.tuner.study import NO_ANSWERS, Origin, Trial, TuningStudy
from servekit.tuner.subject import Subject
from servekit.tuner.trial import Ending

REPORT = "report.html"
ATTACKS = "attacks"
_FINALISTS = 2
"""Of the search's best, how many are measured again."""
_ENGINE_START_S = 5.0
"""What a confirmation reckons with for each start, and for its last answers."""


def conclude(settings: Settings, subject: Subject, executor: TrialExecutor, study: TuningStudy,
             random: Finalist | None, space: Space, about: Description, left_s: Callable[[], float],
             console: Console) -> bool:
    """Confirm the best, attack the winner, write everything; whether anything holds the objective."""
    if not study.shortlist(1) and random is None:
        _conclude_without_any(settings, executor, study, space, about, console)
        return False
    finalists = _finalists(settings, study, random)
    confirmed = _confirm(settings, executor, finalists, left_s, console)
    judgement, attacks = _attack(settings, subject, confirmed, console)
    files = _emitted(settings, subject, about, confirmed, judgement)
    reverts = _put_back(settings, executor, study, space, judgement, left_s, console)
    certificate = _write(settings, executor, study, space, about, confirmed, attacks, files, reverts)
    _print_result(settings, subject, certificate.judgement, files, console)
    if confirmed.is_out_of_time:
        console.print("the time was used up before everything was confirmed that could be: lower rates of a candidate, "
                      "or higher ones of the default, were not tried; raise budget.minutes, and give the same command",
                      style="yellow", highlight=False, soft_wrap=True)
    return certificate.judgement.winner is not None


# --- when the search has found nothing --------------------------------------------------------------------------------

def _conclude_without_any(settings: Settings, executor: TrialExecutor, study: TuningStudy, space: Space,
                          about: Description, console: Console) -> None:
    """The best achievable, and what bound it; there is nothing to be measured again."""
    closest = _closest(study)
    words = "" if closest is None else _closest_words(closest)
    confirmed = _nothing_confirmed(settings, study, closest)
    _write(settings, executor, study, space, about, confirmed, {}, (), (), words)
    console.print(f"nothing holds the objective. {words}" if words else "no configuration could be measured",
                  style="yellow", highlight=False, soft_wrap=True)
    if any(trial.facts.get("is_out_of_time") for trial in study.trials):
        console.print("lower rates were not tried, since there was no time for them: raise budget.minutes, or lower "
                      "budget.requests", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"report: {settings.folder / REPORT}", highlight=False)


def _closest(study: TuningStudy) -> Trial | None:
    """The trial that came closest to holding; None: none could be measured."""
    measured = [trial for trial in study.trials if trial.ending is Ending.measured]
    return min(measured, key=lambda trial: max(trial.constraints.values()), default=None)


def _closest_words(trial: Trial) -> str:
    broken = ", ".join(name for name, value in trial.constraints.items() if value > 0)
    bounds: dict[str, int] = dict(trial.facts.get("bound", {}))
    bound = max(bounds, key=lambda name: bounds[name], default="").replace("_", " ")
    binding = f"; most of its steps were bound by {bound}" if bound else ""
    lowest_per_s = min(run["rate_per_s"] for run in trial.facts["runs"])
    return (f"Closest: trial {trial.number} at {lowest_per_s:.2f} req/s, which breaks {broken}{binding}. Its settings: "
            f"{', '.join(f'{key}={show(value)}' for key, value in trial.values.items())}")


def _nothing_confirmed(settings: Settings, study: TuningStudy, closest: Trial | None) -> Confirmed:
    """The default and what came closest, with the reason why neither was measured again."""
    base_hash = config_hash(settings.base)
    base = _trial_of(study, base_hash)
    default = Finalist("default", Role.default, settings.base, 0.0)
    reasons = {default.name: "was not measured" if base is None else _why_not(base)}
    finalists = [default]
    if closest is not None and closest.config_hash != base_hash:
        finalists.insert(0, finalist_of(settings, study, closest, f"trial {closest.number}", Role.tuned, 0.0))
        reasons[f"trial {closest.number}"] = _why_not(closest)
    return Confirmed(tuple(finalists), (), reasons, judge(settings.slo, roles_of(finalists), ()))


def _why_not(trial: Trial) -> str:
    if trial.ending.has_verdict:
        return "held the objective at no rate that was tried"
    return f"{trial.ending.value.replace('_', ' ')}: {trial.facts.get('error', '')}".rstrip(": ")


# --- confirmation and attack ------------------------------------------------------------------------------------------

def _finalists(settings: Settings, study: TuningStudy, random: Finalist | None) -> list[Finalist]:
    """The search's best and, each at the rate that was found for it, the default and whom else to compare with."""
    base_hash = config_hash(settings.base)
    best = [trial for trial in study.shortlist(_FINALISTS + 1) if trial.config_hash != base_hash][:_FINALISTS]
    found = [finalist_of(settings, study, trial, f"trial {trial.number}", Role.tuned, trial.rate_per_s)
             for trial in best]
    lowest_per_s = min((trial.rate_per_s for trial in study.shortlist(_FINALISTS)),
                       default=1.0 if random is None else random.rate_per_s)
    default = Finalist("default", Role.default, settings.base, _first_rate_of(study, base_hash) or lowest_per_s)
    others = [*_rule_of_thumb(settings, study, lowest_per_s),
              *([] if random is None else [random])]
    # A configuration is measured once, under the name that says most of it.
    taken = {config_hash(finalist.config) for finalist in (*found, default)}
    return [*found, default, *(other for other in others if config_hash(other.config) not in taken)]


def _rule_of_thumb(settings: Settings, study: TuningStudy, lowest_per_s: float) -> list[Finalist]:
    trial = next((trial for trial in study.trials if trial.origin is Origin.rule_of_thumb), None)
    if Role.rule_of_thumb not in settings.compare or trial is None:
        return []
    return [finalist_of(settings, study, trial, "rule of thumb", Role.rule_of_thumb, trial.rate_per_s or lowest_per_s)]


def finalist_of(settings: Settings, study: TuningStudy, trial: Trial, name: str, role: Role,
                rate_per_s: float) -> Finalist:
    """A trial's configuration, to be measured again."""
    overrides = tuple(study.overrides(trial))
    return Finalist(name, role, settings.assemble(overrides), rate_per_s, overrides)


def _first_rate_of(study: TuningStudy, wanted_hash: str) -> float:
    """What the search found for a configuration, or the lowest rate at which it broke something; 0: it tells neither.

    What holds nothing that was tried is not begun with where others hold: it would only fail there again.
    """
    trial = _trial_of(study, wanted_hash)
    if trial is None or trial.ending is not Ending.measured:
        return 0.0
    return trial.rate_per_s or min((run["rate_per_s"] for run in trial.facts["runs"]), default=0.0)


def _trial_of(study: TuningStudy, wanted_hash: str) -> Trial | None:
    """The trial that says something of a configuration."""
    return next((trial for trial in study.trials if trial.config_hash == wanted_hash and trial.repeats is None
                 and trial.ending not in NO_ANSWERS), None)


def _confirm(settings: Settings, executor: TrialExecutor, finalists: Sequence[Finalist],
             left_s: Callable[[], float], console: Console) -> Confirmed:
    length = RunLength(settings.budget.confirm_requests, 2 * settings.budget.min_run_s, executor.plan.available)
    rules = Rules(length)
    start_s, warmup_requests = max(_ENGINE_START_S, executor.longest_start_s), settings.budget.warmup_requests
    plan = plan_time(finalists, rules, start_s, warmup_requests, _ENGINE_START_S)
    console.print(f"\nconfirmation: {', '.join(finalist.name for finalist in finalists)}, {plan.num_runs} runs of "
                  f"{length.num_requests} requests or {length.min_s:g} s at least, each in a fresh process, about "
                  f"{plan.least_s / 60:.1f} min, more if a candidate fails at first, on arrivals that the search never "
                  "used", highlight=False, soft_wrap=True)

    rivals_s = _rivals_s(settings, finalists)

    def may_begin_round(entered: Sequence[Entrant]) -> bool:
        return left_s() + rivals_s > round_s(entered, rules, start_s, warmup_requests, _ENGINE_START_S)

    def show_progress(progress: Progress) -> None:
        if progress.holds is not None:
            finalist = progress.entrant.finalist.name
            console.print(f"  {finalist} at {progress.entrant.rate_per_s:.2f} req/s: "
                          f"{'holds' if progress.holds else 'fails'} (round {progress.round}, run {progress.run} of "
                          f"{progress.num_runs})", highlight=False)

    return Confirmation(settings.slo, finalists, executor, rules, show_progress, may_begin_round).run()


def _rivals_s(settings: Settings, finalists: Sequence[Finalist]) -> float:
    """Time for those whom the winner is compared with, and who are not there under another name."""
    return settings.budget.rival_s * sum(finalist.role in settings.compare for finalist in finalists)


def _attack(settings: Settings, subject: Subject, confirmed: Confirmed,
            console: Console) -> tuple[Judgement, dict[str, Path]]:
    """Attack the winner, and whoever takes its place if it does not survive; where there is no attack, nobody."""
    judgement, attacks, survived = confirmed.judgement, dict[str, Path](), dict[str, bool]()
    while judgement.winner is not None and judgement.winner not in attacks:
        name = judgement.winner
        config = next(finalist.config for finalist in confirmed.finalists if finalist.name == name)
        with console.status(f"memory attack on {name}"):
            log = subject.attack(config)
        if log is None:
            console.print("no memory attack: it is made for servekit's own engine", highlight=False)
            break
        attacks[name] = settings.folder / ATTACKS / f"{config_hash(config)}.json"
        log.write(attacks[name])
        survived[name] = log.survived
        _print_attack(name, log, console)
        judgement = confirmed.attacked(settings.slo, survived)
    return judgement, attacks


def _print_attack(name: str, log: AttackLog, console: Console) -> None:
    peak = "" if log.peak_memory_bytes is None else f", {log.peak_memory_bytes / 1e9:.2f} GB at most"
    what = "survives" if log.survived else f"does not survive ({log.failure or 'requests were lost'})"
    console.print(f"memory attack: {name} {what}; {log.peak_kv_share:.0%} of the KV cache in use at once, "
                  f"{log.preemptions} preemptions{peak}", highlight=False)


def _put_back(settings: Settings, executor: TrialExecutor, study: TuningStudy, space: Space, judgement: Judgement,
              left_s: Callable[[], float], console: Console) -> list[Revert]:
    """What each knob of the winner is worth, as far as there is time for it."""
    winner = next((finding for finding in judgement.finalists if finding.name == judgement.winner), None)
    trial = next((trial for trial in study.trials if winner is not None and winner.name == f"trial {trial.number}"),
                 None)
    if winner is None or winner.confirmed_per_s is None or trial is None:
        return []
    num_requests = executor.length.at(winner.confirmed_per_s)
    with console.status("each knob of the winner put back by itself"):
        found = list(put_back(space, trial.values, settings.assemble, settings.slo, executor, winner.confirmed_per_s,
                              num_requests, left_s))
    for revert in found:
        console.print(f"  {describe_revert(revert)}", highlight=False, markup=False, soft_wrap=True)
    return found


# --- what is written --------------------------------------------------------------------------------------------------

def _emitted(settings: Settings, subject: Subject, about: Description, confirmed: Confirmed,
             judgement: Judgement) -> list[Path]:
    """Write what serves the winner, if there is one."""
    winner = next((finalist for finalist in confirmed.finalists if finalist.name == judgement.winner), None)
    texts = {} if winner is None else subject.emitted(winner.config, _tuned_for(settings, about, judgement))
    for name, text in texts.items():
        (settings.folder / name).write_text(text, encoding="utf-8")
    return [settings.folder / name for name in texts]


def _write(settings: Settings, executor: TrialExecutor, study: TuningStudy, space: Space, about: Description,
           confirmed: Confirmed, attacks: dict[str, Path], files: Sequence[Path],
           reverts: Sequence[Revert], closest: str = "") -> Certificate:
    """The certificate and the report."""
    folder = settings.folder
    certificate = certify(folder, settings.slo, executor.plan, confirmed, attacks, files,
                          _circumstances(settings, study, about))
    write_report(Findings(certificate, folder, executor.runs_folder, space, study.trials, about.model,
                          _workload_words(settings), reverts=reverts, closest=closest), folder / REPORT)
    return certificate


def _tuned_for(settings: Settings, about: Description, judgement: Judgement) -> TunedFor:
    return TunedFor(slo=_slo_words(settings), workload=_workload_words(settings), model=about.model,
                    device=about.device, date=_now()[:10], results=results_of(judgement))


def _circumstances(settings: Settings, study: TuningStudy, about: Description) -> Circumstances:
    return Circumstances(
        base_overrides=settings.base_overrides,
        device=about.details,
        search={"trials": len(study.trials), "sampler": settings.study.sampler.value, "seed": settings.study.seed,
                "from_base": sum(trial.origin is Origin.base for trial in study.trials),
                "minutes": settings.budget.minutes},
        made_at=_now())


def _slo_words(settings: Settings) -> str:
    parts = []
    for promise in settings.slo.promises:
        limits = promise.limits
        named = {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "itl": limits.itl_s, "e2e": limits.e2e_s}
        kept = ", ".join(f"{name} <= {value * 1e3:g} ms" for name, value in named.items() if value is not None)
        parts.append(f"{promise.per_mille / 10:g} % of the requests with {kept}")
    return "; ".join(parts)


def _workload_words(settings: Settings) -> str:
    workload, arrival = settings.bench.workload, settings.bench.arrival
    return f"{workload.kind.value} lengths, {arrival.kind.value} arrivals"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _print_result(settings: Settings, subject: Subject, judgement: Judgement, files: Sequence[Path],
                  console: Console) -> None:
    console.print()
    for line in results_of(judgement):
        console.print(line, highlight=False, soft_wrap=True)
    if files:
        console.print(f"\n{subject.serve_command(files[0])}", highlight=False)
    console.print(f"servekit verify {settings.folder / CERTIFICATE}    report: {settings.folder / REPORT}",
                  highlight=False)
