"""What a search comes to: confirmation, memory attack, tuned.yaml, certificate and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from servekit.config.errors import show
from servekit.config.resolve import config_hash
from servekit.config.schema import Config
from servekit.engine.messages import EngineFacts
from servekit.model.local import LocalModel
from servekit.tuner.attack import AttackLog, attack_process
from servekit.tuner.certificate import NAME as CERTIFICATE
from servekit.tuner.certificate import Certificate, Circumstances, certify
from servekit.tuner.confirmation import Confirmation, Confirmed, Finalist, Progress, Rules, plan_time
from servekit.tuner.emission import TunedFor, results_of, tuned_yaml
from servekit.tuner.executor import EngineExecutor, RunLength
from servekit.tuner.judgement import Judgement, Role
from servekit.tuner.report import Findings, write_report
from servekit.tuner.settings import Settings
from servekit.tuner.space import Space
from servekit.tuner.study import Origin, Trial, TuningStudy

TUNED = "tuned.yaml"
REPORT = "report.html"
ATTACKS = "attacks"
_FINALISTS = 2
"""Of the search's best, how many are measured again."""
_ENGINE_START_S = 5.0
"""What a confirmation reckons with for each start, and for its last answers."""


def conclude(settings: Settings, executor: EngineExecutor, study: TuningStudy, space: Space, facts: EngineFacts,
             local: LocalModel, left_s: Callable[[], float], console: Console) -> bool:
    """Confirm the best, attack the winner, write everything; whether anything holds the objective."""
    if not study.shortlist(1):
        _say_nothing_holds(study, console)
        return False
    finalists = _finalists(settings, study)
    confirmed = _confirm(settings, executor, finalists, left_s, console)
    judgement, attacks = _attack(settings, executor, confirmed, local, console)
    certificate = _write(settings, executor, study, space, facts, confirmed, judgement, attacks)
    _print_result(settings, certificate.judgement, console)
    return certificate.judgement.winner is not None


def _say_nothing_holds(study: TuningStudy, console: Console) -> None:
    """The best achievable, and what bound it."""
    measured = [trial for trial in study.trials if trial.ending.has_verdict]
    if not measured:
        console.print("no configuration could be measured", style="yellow")
        return
    closest = min(measured, key=lambda trial: max(trial.constraints.values()))
    broken = ", ".join(name for name, value in closest.constraints.items() if value > 0)
    bounds: dict[str, int] = dict(closest.facts.get("bound", {}))
    binding = max(bounds, key=lambda name: bounds[name]) if bounds else "unknown"
    rates = [run["rate_per_s"] for run in closest.facts.get("runs", ())]
    console.print(f"nothing holds the objective. Closest: trial {closest.number} at {min(rates, default=0.0):.2f} "
                  f"req/s, which breaks {broken}; most of its steps were bound by {binding}. Its settings: "
                  f"{', '.join(f'{key}={show(value)}' for key, value in closest.values.items())}",
                  style="yellow", highlight=False, soft_wrap=True)


# --- confirmation and attack ------------------------------------------------------------------------------------------

def _finalists(settings: Settings, study: TuningStudy) -> list[Finalist]:
    """The search's best and, at the rate that the search found for it, the default."""
    base_hash = config_hash(settings.base)
    best = [trial for trial in study.shortlist(_FINALISTS + 1) if trial.config_hash != base_hash][:_FINALISTS]
    found = [Finalist(f"trial {trial.number}", Role.tuned, _config_of(settings, study, trial), trial.rate_per_s)
             for trial in best]
    base = next((trial for trial in study.trials if trial.config_hash == base_hash and trial.repeats is None), None)
    lowest_per_s = min((trial.rate_per_s for trial in study.shortlist(_FINALISTS)), default=1.0)
    base_per_s = base.rate_per_s if base is not None and base.rate_per_s > 0 else lowest_per_s
    return [*found, Finalist("default", Role.default, settings.base, base_per_s)]


def _config_of(settings: Settings, study: TuningStudy, trial: Trial) -> Config:
    return settings.assemble(study.overrides(trial))


def _confirm(settings: Settings, executor: EngineExecutor, finalists: Sequence[Finalist],
             left_s: Callable[[], float], console: Console) -> Confirmed:
    length = RunLength(settings.budget.confirm_requests, 2 * settings.budget.min_run_s, executor.plan.available)
    rules = Rules(length.at(max(finalist.rate_per_s for finalist in finalists)))
    plan = plan_time(finalists, rules, _ENGINE_START_S, settings.budget.warmup_requests, _ENGINE_START_S)
    console.print(f"\nconfirmation: {', '.join(finalist.name for finalist in finalists)}, {plan.num_runs} runs of "
                  f"{rules.num_requests} requests each in fresh processes, about {plan.first_round_s / 60:.1f} min, on "
                  "arrivals that the search never used", highlight=False, soft_wrap=True)

    def may_begin_round() -> bool:
        return left_s() > plan.first_round_s

    def show_progress(progress: Progress) -> None:
        if progress.holds is not None:
            finalist = progress.entrant.finalist.name
            console.print(f"  {finalist} at {progress.entrant.rate_per_s:.2f} req/s: "
                          f"{'holds' if progress.holds else 'fails'} (round {progress.round}, run {progress.run} of "
                          f"{progress.num_runs})", highlight=False)

    return Confirmation(settings.slo, finalists, executor, rules, show_progress, may_begin_round).run()


def _attack(settings: Settings, executor: EngineExecutor, confirmed: Confirmed, local: LocalModel,
            console: Console) -> tuple[Judgement, dict[str, Path]]:
    """Attack the winner, and whoever takes its place if it does not survive."""
    judgement, attacks, survived = confirmed.judgement, dict[str, Path](), dict[str, bool]()
    while judgement.winner is not None and judgement.winner not in attacks:
        name = judgement.winner
        config = next(finalist.config for finalist in confirmed.finalists if finalist.name == name)
        with console.status(f"memory attack on {name}"):
            log = attack_process(config, local, executor.cache_dir, settings.budget.timeout_s)
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


# --- what is written --------------------------------------------------------------------------------------------------

def _write(settings: Settings, executor: EngineExecutor, study: TuningStudy, space: Space, facts: EngineFacts,
           confirmed: Confirmed, judgement: Judgement, attacks: dict[str, Path]) -> Certificate:
    """tuned.yaml if there is a winner, the certificate and the report in any case."""
    folder = settings.folder
    winner = next((finalist for finalist in confirmed.finalists if finalist.name == judgement.winner), None)
    others = []
    if winner is not None:
        text = tuned_yaml(winner.config, settings.base_overrides, _tuned_for(settings, facts, judgement))
        (folder / TUNED).write_text(text, encoding="utf-8")
        others.append(folder / TUNED)
    certificate = certify(folder, settings.slo, executor.plan, confirmed, attacks, others,
                          _circumstances(settings, study, facts, confirmed))
    write_report(Findings(certificate, folder, executor.runs_folder, space, study.trials, facts.model_name,
                          _workload_words(settings)), folder / REPORT)
    return certificate


def _tuned_for(settings: Settings, facts: EngineFacts, judgement: Judgement) -> TunedFor:
    return TunedFor(slo=_slo_words(settings), workload=_workload_words(settings),
                    model=f"{facts.model_name}, {facts.dtype}, quantization {facts.quantization}",
                    device=f"{facts.device}, {facts.threads} threads", date=_now()[:10], results=results_of(judgement))


def _circumstances(settings: Settings, study: TuningStudy, facts: EngineFacts,
                   confirmed: Confirmed) -> Circumstances:
    by_name = {f"trial {trial.number}": study.overrides(trial) for trial in study.trials if trial.values}
    return Circumstances(
        base_overrides=settings.base_overrides,
        overrides={finalist.name: by_name.get(finalist.name, []) for finalist in confirmed.finalists},
        device={"name": facts.device, "threads": facts.threads, "kernels": facts.kernels, "dtype": facts.dtype,
                "quantization": facts.quantization, "num_kv_blocks": facts.num_kv_blocks},
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


def _print_result(settings: Settings, judgement: Judgement, console: Console) -> None:
    console.print()
    for line in results_of(judgement):
        console.print(line, highlight=False, soft_wrap=True)
    if judgement.winner is not None:
        console.print(f"\nservekit serve {settings.folder / TUNED}", highlight=False)
    console.print(f"servekit verify {settings.folder / CERTIFICATE}    report: {settings.folder / REPORT}",
                  highlight=False)
