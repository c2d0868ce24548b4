"""`servekit verify --rerun`: measure what a certificate claims once more, on this machine and on new arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from servekit.config.errors import ConfigError, require
from servekit.config.schema import Config
from servekit.tuner.certificate import Certificate, Claim
from servekit.tuner.confirmation import Confirmation, Entrant, Finalist, Progress, Rules
from servekit.tuner.executor import RunLength, TrialExecutor
from servekit.tuner.judgement import Judgement, Role
from servekit.tuner.launch import Configuration, read_configuration
from servekit.tuner.measure import Tolerance
from servekit.tuner.own_engine import engine_for
from servekit.tuner.run_log import read_run
from servekit.tuner.settings import Budget

RERUNS = "reruns"


def rerun(certificate: Certificate, folder: Path, say: Callable[[str], object]) -> bool:
    """The winner once more at its confirmed rate, the default beside it; where it holds, the default at its own, too.

    True if the winner holds the objective again. `folder` is that of the certificate; the new logs go to a folder
    inside it.

    Raises:
        ConfigError: there is no winner, it is another server's certificate, or its settings are not known here.
        StartError: the model's files cannot be had.
    """
    claim, judgement = certificate.claim, certificate.judgement
    require(judgement.winner is not None, "certificate", judgement.winner, "names no winner to measure again",
            "tune again")
    finalists = [_finalist(claim, judgement, folder, name) for name in _names(judgement)]
    length = _length(claim, finalists[0], folder)
    say("measuring again, on new arrivals: " + ", ".join(
        f"{one.name}, {length.at(one.rate_per_s)} requests at {one.rate_per_s:.2f} req/s" for one in finalists))
    with _executor(claim, folder, finalists[0].config, length) as executor:
        found = Confirmation(claim.objective, finalists, executor, Rules(length, max_rounds=2),
                             lambda progress: _show(progress, say), _is_of_the_default).run()
    for name, why in found.failures.items():
        say(f"  {name}: {why}")
    return found.judgement.find(finalists[0].name).confirmed_per_s is not None


def _length(claim: Claim, winner: Finalist, folder: Path) -> RunLength:
    """As many requests as the shortest run of the certificate, and as long as the winner's."""
    runs = {run.log: read_run(folder / run.log) for run in claim.runs}
    winners = (runs[run.log] for run in claim.runs if run.finalist == winner.name)
    return RunLength(min(run.num_requests for run in runs.values()),
                     min(run.num_requests / run.rate_per_s for run in winners), claim.load.plan.available)


def _names(judgement: Judgement) -> list[str]:
    """The winner, then the default, if it is another."""
    default = judgement.default
    assert judgement.winner is not None
    return [judgement.winner, *([default.name] if default is not None and default.name != judgement.winner else [])]


def _finalist(claim: Claim, judgement: Judgement, folder: Path, name: str) -> Finalist:
    """At the rate that was confirmed for it, or else the lowest at which it failed."""
    finding = judgement.find(name)
    log = next((run.log for run in claim.runs if run.finalist == name), None)
    require(log is not None and bool(finding.rates), "certificate", name, "was never measured", "tune again")
    assert log is not None
    config = read_configuration(read_run(folder / log).config, log)
    if not isinstance(config, Config):
        raise ConfigError("certificate", name, "is a configuration of another server, which is not started here",
                          "start it with its launch script, and measure it with servekit bench")
    role = Role.tuned if name == judgement.winner else Role.default
    return Finalist(name, role, config, finding.confirmed_per_s or finding.rates[0].rate_per_s)


@contextmanager
def _executor(claim: Claim, folder: Path, config: Configuration, length: RunLength) -> Iterator[TrialExecutor]:
    """Over fresh engines. A seed that no rerun had before gives requests that nobody has seen."""
    assert isinstance(config, Config)
    logs = folder / RERUNS
    plan = replace(claim.load.plan, seed=claim.load.seed + 1 + sum(1 for _ in logs.glob("*.json")))
    host = engine_for(config)
    budget = Budget()
    executor = TrialExecutor(host, claim.objective, plan, length, logs,
                             Tolerance(budget.max_busy_share, budget.max_slowdown))
    try:
        yield executor
    finally:
        executor.close()


def _is_of_the_default(entered: Sequence[Entrant]) -> bool:
    """The second round: a winner that has failed is not tried at a lower rate."""
    return all(entrant.finalist.role is Role.default for entrant in entered)


def _show(progress: Progress, say: Callable[[str], object]) -> None:
    if progress.holds is not None:
        say(f"  {progress.entrant.finalist.name} at {progress.entrant.rate_per_s:.2f} req/s: "
            f"{'holds' if progress.holds else 'fails'} (run {progress.run} of {progress.num_runs})")
