"""certificate.json: what was confirmed, in a form that anybody can compute again from the raw logs, without a device.

It holds a claim (what was measured, of what, where, and the SHA-256 of every raw log) and the judgement that follows
from it. `verify` checks that

- the certificate's own digest is that of its bytes, and every byte is as it was written;
- every log has its SHA-256, and the hash of its configuration is that of the settings in it;
- the requests of every log are those that the workload, the seed and the name of the stream give: lengths and times;
  and no stream is one of the search, or counted twice;
- every count, bound, verdict and ratio follows from the logs;
- tuned.yaml composes to the winner, or tuned.sh launches it.

The digest finds damage and careless edits. Whoever forges a number must forge the logs as well; nothing here is signed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import isclose
from pathlib import Path, PurePosixPath
from platform import python_version
from typing import Any

import msgspec

from servekit.config.bench import BenchConfig
from servekit.config.compose import recompose
from servekit.config.errors import ConfigError, require
from servekit.config.resolve import as_dict, config_hash
from servekit.config.roots import bench_root
from servekit.tuner.attack import AttackLog, read_attack
from servekit.tuner.confirmation import STREAM, Confirmed
from servekit.tuner.emission import hash_of_layer
from servekit.tuner.judgement import Judgement, NamedRun, Role, is_evidence, judge, latencies_of
from servekit.tuner.launch import LaunchConfig, read_configuration
from servekit.tuner.launch_script import SCRIPT, script_problems
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.run_log import LoggedRun, file_hash, read_run
from servekit.tuner.slo import Promise, Slo

FORMAT_VERSION = 1
NAME = "certificate.json"
_TIME_TOLERANCE_S = 1e-6
"""Between a planned arrival and the logged one, which was computed on another clock."""
RERUN = "--rerun"
_PACKAGES = ("servekit", "torch", "optuna", "numpy", "scipy")


# --- what it says -----------------------------------------------------------------------------------------------------

class FinalistText(msgspec.Struct, frozen=True):
    """A configuration that was measured again."""

    name: str
    role: Role
    config_hash: str
    overrides: list[str]
    """On top of the base."""
    searched_rate_per_s: float
    """Where the search said that it holds."""


class RunText(msgspec.Struct, frozen=True):
    """A run of the confirmation."""

    finalist: str
    log: str
    """Path of the raw log, from the folder of the certificate."""


class LoadText(msgspec.Struct, frozen=True):
    """What was sent."""

    workload: dict[str, Any]
    """Workload and arrivals, as `servekit bench` takes them."""
    workload_hash: str
    seed: int
    """Of the study; the name of a run's stream makes it that of the run."""
    warmup_requests: int
    timeout_s: float

    @classmethod
    def of(cls, plan: LoadPlan) -> LoadText:
        """What a plan sends."""
        return cls(as_dict(plan.bench), config_hash(plan.bench), plan.seed, plan.warmup_requests, plan.timeout_s)

    @property
    def plan(self) -> LoadPlan:
        """The same plan. Raises ConfigError for what this version does not know."""
        bench: BenchConfig = recompose(bench_root(), self.workload, NAME)
        return LoadPlan(bench, self.seed, self.warmup_requests, self.timeout_s)


class Claim(msgspec.Struct, frozen=True):
    """What was measured."""

    made_at: str
    slo: list[Promise]
    slo_fingerprint: str
    load: LoadText
    base_overrides: list[str]
    finalists: list[FinalistText]
    runs: list[RunText]
    """In the order in which they were made; bad measurements too, which count for nothing."""
    attacks: list[RunText]
    failures: dict[str, str]
    """Of finalists whose engine failed, or that could not be measured well: why."""
    search: dict[str, Any]
    """How the finalists were found: trials, minutes, sampler."""
    versions: dict[str, str]
    device: dict[str, Any]
    files: dict[str, str]
    """SHA-256 of every file that it rests on, by its path from the folder of the certificate."""

    @property
    def objective(self) -> Slo:
        """The objective as it is judged."""
        return Slo(tuple(self.slo))

    @property
    def roles(self) -> dict[str, Role]:
        """Of the finalists, by name."""
        return {finalist.name: finalist.role for finalist in self.finalists}


class AttackText(msgspec.Struct, frozen=True):
    """What a memory attack did."""

    survived: bool
    num_requests: int
    peak_memory_bytes: int | None
    """Of the engine's process; None: unknown."""
    peak_kv_share: float
    preemptions: int
    swapped_out_blocks: int

    @classmethod
    def of(cls, log: AttackLog) -> AttackText:
        """From its raw log."""
        return cls(log.survived, sum(len(phase.requests) for phase in log.phases), log.peak_memory_bytes,
                   log.peak_kv_share, log.preemptions, log.swapped_out_blocks)


class Certificate(msgspec.Struct, frozen=True):
    """A claim, and what follows from it."""

    claim: Claim
    judgement: Judgement
    attacks: dict[str, AttackText]
    """What came of the memory attacks, by the finalist's name."""
    format_version: int = FORMAT_VERSION
    digest: str = ""
    """SHA-256 of the certificate with this field empty."""

    @property
    def encoded(self) -> bytes:
        """As it is on disk: there is one way to write it."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"

    @property
    def sealed(self) -> Certificate:
        """The same with its digest."""
        blank = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(blank, digest=hashlib.sha256(blank.encoded).hexdigest())


# --- making one -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Circumstances:
    """What cannot be read from a run's log."""

    base_overrides: Sequence[str]
    device: Mapping[str, Any]
    search: Mapping[str, Any]
    made_at: str
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())


def installed_versions() -> dict[str, str]:
    """Of Python and the packages that matter."""
    found = {"python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def certify(folder: Path, slo: Slo, plan: LoadPlan, confirmed: Confirmed, attacks: Mapping[str, Path],
            others: Sequence[Path], circumstances: Circumstances) -> Certificate:
    """Write certificate.json to `folder`, in which all logs lie.

    `attacks` are the logs of memory attacks by the finalist's name; `others` are files that it also vouches for, such
    as tuned.yaml.
    """
    runs = [RunText(run.finalist, _inside(folder, run.log)) for run in confirmed.runs]
    attack_runs = [RunText(name, _inside(folder, path)) for name, path in attacks.items()]
    names = [*(run.log for run in (*runs, *attack_runs)), *(_inside(folder, path) for path in others)]
    finalists = [FinalistText(finalist.name, finalist.role, config_hash(finalist.config),
                              list(finalist.overrides), finalist.rate_per_s)
                 for finalist in confirmed.finalists]
    claim = Claim(circumstances.made_at, list(slo.promises), slo.fingerprint,
                  LoadText.of(plan), list(circumstances.base_overrides), finalists, runs, attack_runs,
                  dict(confirmed.failures), dict(circumstances.search), dict(circumstances.versions),
                  dict(circumstances.device), {name: file_hash(folder / name) for name in names})
    made = judged(claim, folder).sealed
    part = folder / f".{NAME}.part"
    part.write_bytes(made.encoded)
    part.replace(folder / NAME)
    return made


def _inside(folder: Path, path: Path) -> str:
    return path.resolve().relative_to(folder.resolve()).as_posix()


def judged(claim: Claim, folder: Path) -> Certificate:
    """What follows from a claim and the logs in a folder."""
    attacks = {attack.finalist: read_attack(folder / attack.log) for attack in claim.attacks}
    runs = [NamedRun(run.finalist, read_run(folder / run.log)) for run in claim.runs]
    judgement = judge(claim.objective, claim.roles, runs, {name: log.survived for name, log in attacks.items()})
    return Certificate(claim, judgement, {name: AttackText.of(log) for name, log in attacks.items()})


def read_certificate(path: Path) -> Certificate:
    """Read a certificate. Raises ConfigError for anything else, or one of another format."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Certificate)
    except FileNotFoundError:
        raise ConfigError("certificate", path, "there is no such file", "give the path of a certificate.json") from None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ConfigError("certificate", path, f"is not a certificate ({error})",
                          "give the certificate.json of a tuning run, as it was written") from None
    require(found.format_version == FORMAT_VERSION, "certificate", path,
            f"has format {found.format_version}, and this servekit reads {FORMAT_VERSION}",
            "verify it with the version of servekit that it names")
    return found


# --- verifying one ----------------------------------------------------------------------------------------------------

_SENSELESS = (ValueError, ArithmeticError, LookupError)
"""What reading or computing from a forged log may end in; a ConfigError is a ValueError."""


@dataclass
class Verification:
    """What was checked, and what was found to be wrong."""

    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self, what: str, problems: Iterator[str]) -> bool:
        """Take in one check; whether it found nothing. What cannot even be computed is a problem, too."""
        try:
            found = list(problems)
        except _SENSELESS as error:
            found = [f"{what}: cannot be computed from the logs: {error}"]
        self.checked.append(f"{what}: {'as claimed' if not found else 'NOT as claimed'}")
        self.problems += found
        return not found


def verify(path: Path) -> Verification:
    """Compute everything that a certificate says again. Raises ConfigError if it cannot be read at all."""
    certificate, folder, result = read_certificate(path), path.parent, Verification()
    claim = certificate.claim
    if not (result.check("the certificate's own digest", _digest_problems(certificate, path.read_bytes()))
            and result.check(f"SHA-256 of {len(claim.files)} files", _file_problems(claim, folder))):
        return result
    runs, num_runs = _Runs(claim, folder), len(claim.runs)
    result.check("objective, workload and finalists", _claim_problems(claim))
    result.check(f"settings of {num_runs} runs", _config_problems(claim, runs))
    result.check(f"requests of {num_runs} runs", _request_problems(claim, runs))
    result.check(f"arrivals of {num_runs} runs, each new", _stream_problems(runs))
    result.check(f"verdicts of {num_runs} runs", _verdict_problems(claim, runs))
    result.check(f"{len(claim.attacks)} memory attacks", _attack_problems(claim, folder))
    result.check("every count, bound and ratio", _recomputed(certificate, folder))
    result.check("what serves the winner", _tuned_problems(certificate, folder))
    return result


@dataclass(frozen=True)
class _Runs:
    """The runs of a claim, read anew each time: together they may be larger than the memory."""

    claim: Claim
    folder: Path

    def __iter__(self) -> Iterator[tuple[RunText, LoggedRun]]:
        return ((run, read_run(self.folder / run.log)) for run in self.claim.runs)


def _digest_problems(certificate: Certificate, written: bytes) -> Iterator[str]:
    if (found := certificate.sealed.digest) != certificate.digest:
        yield f"the certificate was altered: its digest is {found}, and it says {certificate.digest}"
    if certificate.encoded != written:
        yield "the certificate was altered: its bytes are not those that were written"


def _file_problems(claim: Claim, folder: Path) -> Iterator[str]:
    for name, expected in claim.files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            yield f"{name}: lies outside the folder of the certificate"
        elif not (folder / name).is_file():
            yield f"{name}: there is no such file"
        elif (found := file_hash(folder / name)) != expected:
            yield f"{name}: was altered, its SHA-256 is {found}"
    for run in (*claim.runs, *claim.attacks):
        if run.log not in claim.files:
            yield f"{run.log}: has no SHA-256 in the certificate"


def _claim_problems(claim: Claim) -> Iterator[str]:
    if claim.objective.fingerprint != claim.slo_fingerprint:
        yield f"slo_fingerprint: is {claim.objective.fingerprint}, and the certificate says {claim.slo_fingerprint}"
    if (found := config_hash(claim.load.plan.bench)) != claim.load.workload_hash:
        yield f"workload_hash: is {found}, and the certificate says {claim.load.workload_hash}"
    if len(claim.roles) < len(claim.finalists):
        yield "finalists: two have one name"
    logs = [run.log for run in (*claim.runs, *claim.attacks)]
    yield from (f"{log}: is used twice" for log in sorted({log for log in logs if logs.count(log) > 1}))
    yield from (f"{run.log}: is of {run.finalist}, who is no finalist" for run in (*claim.runs, *claim.attacks)
                if run.finalist not in claim.roles)


def _config_problems(claim: Claim, runs: _Runs) -> Iterator[str]:
    expected = {finalist.name: finalist.config_hash for finalist in claim.finalists}
    hashes: dict[str, str] = {}
    for text, run in runs:
        key = repr(run.config)
        if key not in hashes:
            hashes[key] = config_hash(read_configuration(run.config, text.log))
        if hashes[key] != run.config_hash:
            yield f"{text.log}: its settings have the hash {hashes[key]}, and it says {run.config_hash}"
        if run.config_hash != expected.get(text.finalist):
            yield f"{text.log}: is a run of {run.config_hash}, which is not {text.finalist}"


def _request_problems(claim: Claim, runs: _Runs) -> Iterator[str]:
    plan = claim.load.plan
    for text, run in runs:
        load = plan.load(run.rate_per_s, run.num_requests, run.stream, plan.bench.vocab_high)
        planned = {request.index: request for request in load.requests}
        if run.warmup_requests != plan.warmup_requests:
            yield f"{text.log}: has {run.warmup_requests} warm-up requests, not {plan.warmup_requests}"
        if sorted(request.index for request in run.requests) != sorted(planned):
            yield f"{text.log}: its requests are not those of the workload"
            continue
        for logged in run.requests:
            wanted = planned[logged.index]
            is_same = (len(logged.chunk_times_s) == len(logged.chunk_tokens)
                       and logged.prompt_tokens == len(wanted.prompt_token_ids)
                       and logged.wanted_output_tokens == wanted.output_tokens
                       and logged.is_warmup is (logged.index < plan.warmup_requests)
                       and abs(logged.intended_s - (wanted.arrival_s or 0.0)) <= _TIME_TOLERANCE_S)
            if not is_same:
                yield f"{text.log}: request {logged.index} is not that of the workload at {run.rate_per_s:g} req/s"


def _stream_problems(runs: _Runs) -> Iterator[str]:
    """Equal arrivals under one configuration at one rate would count one piece of evidence twice."""
    seen = set[tuple[str, float, str]]()
    for text, run in runs:
        if not run.stream.startswith(STREAM):
            yield f"{text.log}: has the arrivals of {run.stream}, which is not a stream of the confirmation"
        key = (text.finalist, run.rate_per_s, run.stream)
        if is_evidence(run) and key in seen:
            yield f"{text.log}: {run.stream} is used twice for {text.finalist} at {run.rate_per_s:g} req/s"
        if is_evidence(run):
            seen.add(key)


def _verdict_problems(claim: Claim, runs: _Runs) -> Iterator[str]:
    for text, run in runs:
        if is_evidence(run):
            verdict = "holds" if claim.objective.holds(latencies_of(run)) else "fails"
            if run.verdict != verdict:
                yield f"{text.log}: its requests say that the objective {verdict}, and it says {run.verdict}"


def _attack_problems(claim: Claim, folder: Path) -> Iterator[str]:
    expected = {finalist.name: finalist.config_hash for finalist in claim.finalists}
    for attack in claim.attacks:
        found = read_attack(folder / attack.log).config_hash
        if found != expected.get(attack.finalist):
            yield f"{attack.log}: is an attack on {found}, which is not {attack.finalist}"


def _recomputed(certificate: Certificate, folder: Path) -> Iterator[str]:
    yield from judgement_problems(certificate, judged(certificate.claim, folder))


def judgement_problems(claimed: Certificate, computed: Certificate) -> Iterator[str]:
    """Where what a certificate says is not what was computed."""
    for part in ("judgement", "attacks"):
        yield from _differences(part, msgspec.to_builtins(getattr(claimed, part)),
                                msgspec.to_builtins(getattr(computed, part)))


def _differences(where: str, claimed: Any, computed: Any) -> Iterator[str]:
    """Floats may differ in their last digits: numpy and scipy are not the same on every machine."""
    if isinstance(claimed, dict) and isinstance(computed, dict) and claimed.keys() == computed.keys():
        for key, value in claimed.items():
            yield from _differences(f"{where}.{key}", value, computed[key])
    elif isinstance(claimed, list | tuple) and isinstance(computed, list | tuple) and len(claimed) == len(computed):
        for place, (one, other) in enumerate(zip(claimed, computed, strict=True)):
            yield from _differences(f"{where}[{place}]", one, other)
    elif isinstance(claimed, float) and isinstance(computed, float):
        if not isclose(claimed, computed, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{where}: is {computed!r} by the logs, and the certificate says {claimed!r}"
    elif claimed != computed:
        yield f"{where}: is {computed!r} by the logs, and the certificate says {claimed!r}"


def _tuned_problems(certificate: Certificate, folder: Path) -> Iterator[str]:
    winner = certificate.judgement.winner
    wanted = {finalist.name: finalist.config_hash for finalist in certificate.claim.finalists}.get(winner or "")
    for name in certificate.claim.files:
        if PurePosixPath(name).name == "tuned.yaml":
            found = hash_of_layer((folder / name).read_text(encoding="utf-8"))
            if found != wanted:
                yield f"{name}: composes to {found}, and the winner is {wanted}"
        if name == SCRIPT:
            yield from script_problems(folder, _launch_of(certificate.claim, winner, folder))


def _launch_of(claim: Claim, name: str | None, folder: Path) -> LaunchConfig:
    """How a finalist was launched, by the log of a run whose settings were checked."""
    log = next(run.log for run in claim.runs if run.finalist == name)
    found = read_configuration(read_run(folder / log).config, log)
    if not isinstance(found, LaunchConfig):
        raise ValueError(f"{log} is no run of another server")
    return found


# --- the command ------------------------------------------------------------------------------------------------------

class ExitCode(IntEnum):
    """What the shell is told."""

    ok = 0
    failed = 1


def main(argv: Sequence[str], say: Callable[[str], object] = print) -> int:
    """`servekit verify certificate.json [--rerun]`: check it against the logs beside it, and print what was checked;
    with --rerun, measure the winner and the default once more.

    Raises ConfigError if there is no certificate to check, or it cannot be measured again.
    """
    words = [word for word in argv if word != RERUN]
    require(len(words) == 1 and not words[0].startswith("-"), "certificate", " ".join(argv),
            f"takes the path of one certificate, and {RERUN}", "for example servekit verify tuning/certificate.json")
    path = Path(words[0])
    result = verify(path)
    for line in result.checked:
        say(line)
    for problem in result.problems:
        print(f"servekit: {problem}", file=sys.stderr)
    say("verified" if not result.problems else f"{len(result.problems)} problems: this certificate proves nothing")
    if result.problems:
        return ExitCode.failed
    return ExitCode.ok if RERUN not in argv or _rerun(path, say) else ExitCode.failed


def _rerun(path: Path, say: Callable[[str], object]) -> bool:
    # By name: what measures needs this file, and a certificate is checked without it.
    is_held = bool(import_module("servekit.tuner.rerun").rerun(read_certificate(path), path.parent, say))
    say("the winner holds the objective again" if is_held else "the winner does NOT hold the objective again")
    return is_held
