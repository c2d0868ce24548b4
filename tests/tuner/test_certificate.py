"""A certificate is computed again from its logs, and nothing in it can be altered unseen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.tuner.attack import AttackLog, End, Phase, Sent
from servekit.tuner.certificate import (
    NAME,
    Certificate,
    Circumstances,
    ExitCode,
    certify,
    judged,
    judgement_problems,
    main,
    read_certificate,
    verify,
)
from servekit.tuner.confirmation import Confirmation, Finalist, Rules
from servekit.tuner.emission import TunedFor, tuned_yaml
from servekit.tuner.executor import RunLength
from servekit.tuner.judgement import Role
from servekit.tuner.run_log import file_hash
from tuner_runs import PLAN, SLO, FakeEngine

BASE = ("model.source=dummy:tiny",)
FOUND = "scheduler.max_num_seqs=16"


@dataclass
class Folder:
    """A run folder with a certificate. `path` may be altered; `restore` undoes it."""

    path: Path
    pristine: Path

    @property
    def certificate(self) -> Path:
        return self.path / NAME

    @property
    def logs(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file() and path != self.certificate)

    def restore(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.pristine, self.path)

    def reseal(self, change: Callable[[dict[str, Any]], None] = lambda claim: None) -> None:
        """What a forger does: change the certificate, take new hashes of all files, and a new digest."""
        plain = json.loads(self.certificate.read_bytes())
        change(plain)
        plain["claim"]["files"] = {name: file_hash(self.path / name) for name in plain["claim"]["files"]}
        self.certificate.write_bytes(msgspec.convert(plain, Certificate).sealed.encoded)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("certified")
    config = compose_serve([*BASE, FOUND]).config
    finalists = (Finalist("trial 3", Role.tuned, config, 6.0, (FOUND,)),
                 Finalist("default", Role.default, compose_serve(BASE).config, 2.5))
    engine = FakeEngine(folder, lambda found: 10.0 if found == config else 5.0)
    confirmed = Confirmation(SLO, finalists, engine, Rules(RunLength(40, 0.0), max_rounds=2)).run()
    attack = AttackLog(config_hash(config), 10, 64, False, [
        Phase("full batch", 0.5, [Sent(10, 8, End.answered)] * 3, 3, 10, 2, 0),
        Phase("after it", 0.1, [Sent(1, 1, End.answered)], 1, 1, 0, 0)], 123_456_789, None)
    attack.write(folder / "attack.json")
    (folder / "tuned.yaml").write_text(tuned_yaml(config, BASE, TunedFor("slo", "load", "model", "cpu", "today")))
    certify(folder, SLO, PLAN, confirmed, {"trial 3": folder / "attack.json"}, [folder / "tuned.yaml"],
            Circumstances(BASE, {"name": "cpu", "cores": 2}, {"trials": 12, "minutes": 3.5},
                          "2024-05-01T10:00:00+00:00"))
    pristine = tmp_path_factory.mktemp("pristine") / "copy"
    shutil.copytree(folder, pristine)
    return Folder(folder, pristine)


@pytest.fixture
def folder(made: Folder) -> Iterator[Folder]:
    yield made
    made.restore()


def test_what_it_says_and_that_it_verifies(folder: Folder, tmp_path: Path) -> None:
    certificate = read_certificate(folder.certificate)
    judgement, claim = certificate.judgement, certificate.claim
    assert (judgement.winner, judgement.find("trial 3").confirmed_per_s) == ("trial 3", 6.0)
    assert certificate.attacks["trial 3"].survived and certificate.attacks["trial 3"].preemptions == 2
    assert {"servekit", "python", "torch", "optuna"} <= set(claim.versions)
    assert {run.log for run in claim.runs} | {"attack.json", "tuned.yaml"} == set(claim.files)
    assert tuple(claim.slo) == SLO.promises
    result = verify(folder.certificate)
    assert result.problems == [] and len(result.checked) == 10
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder.path, moved)
    assert verify(moved / NAME).problems == [], "on any machine, in any folder"


def test_the_command_prints_what_was_checked(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder.certificate)]) == ExitCode.ok
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "verified" and all(line.endswith("as claimed") for line in out[:-1])
    log = folder.path / read_certificate(folder.certificate).claim.runs[0].log
    log.write_bytes(log.read_bytes() + b" ")
    assert main([str(folder.certificate)]) == ExitCode.failed
    printed = capsys.readouterr()
    assert "was altered" in printed.err and "proves nothing" in printed.out


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["--help-me"], ["missing.json"]])
def test_without_a_certificate_it_says_what_it_takes(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(argv)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_altered_byte_of_any_file_is_detected(folder: Folder, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([*folder.logs, *[folder.certificate] * len(folder.logs)]))
    before = path.read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    kind = data.draw(st.sampled_from(["replace", "delete", "insert"]))
    byte = bytes([data.draw(st.integers(0, 255).filter(lambda byte: byte != before[place]))])
    altered = {"replace": before[:place] + byte + before[place + 1:], "delete": before[:place] + before[place + 1:],
               "insert": before[:place] + byte + before[place:]}[kind]
    if altered == before:
        return
    path.write_bytes(altered)
    try:
        assert verify(folder.certificate).problems
    except ConfigError:
        pass
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("alter", [
    lambda text: text.replace(b"\n  ", b"\n ", 1), lambda text: text + b"\n",
    lambda text: text.replace(b"0.0,", b"0.00,", 1),
    lambda text: text.replace(b'"winner":', b'"winner": "default",\n    "winner":', 1),
    lambda text: text.replace(b'"format_version"', b'"remark": 1,\n  "format_version"', 1)],
    ids=["indentation", "end", "number", "key twice", "unknown key"])
def test_what_reads_the_same_must_also_be_written_the_same(folder: Folder, alter: Callable[[bytes], bytes]) -> None:
    before = folder.certificate.read_bytes()
    folder.certificate.write_bytes(alter(before))
    assert folder.certificate.read_bytes() != before
    assert any("its bytes are not those" in problem for problem in verify(folder.certificate).problems)


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Where the plain values of a JSON document are."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, *path, key)
    else:
        yield path


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case None:
            return 1
    return {"tuned": "random", "random": "tuned", "default": "random"}.get(value, f"{value}0")


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def get(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def test_every_field_that_is_altered_is_detected(folder: Folder) -> None:
    """Each value of the certificate in turn, the file otherwise as it was written."""
    plain = json.loads(folder.certificate.read_bytes())
    written = read_certificate(folder.certificate)
    for path in list(leaves(plain)):
        altered = json.loads(folder.certificate.read_bytes())
        put(altered, path, other(get(plain, path)))
        try:
            found = msgspec.convert(altered, Certificate)
        except msgspec.ValidationError:
            continue
        assert found != written, path
        assert found.sealed.digest != found.digest, path


def test_every_number_of_the_judgement_that_is_forged_with_a_new_digest_is_detected(folder: Folder) -> None:
    plain = json.loads(folder.certificate.read_bytes())
    paths = [path for part in ("judgement", "attacks") for path in leaves(plain[part], part)]
    assert len(paths) > 50
    computed = judged(read_certificate(folder.certificate).claim, folder.path)
    assert list(judgement_problems(read_certificate(folder.certificate), computed)) == []
    for path in paths:
        altered = json.loads(folder.certificate.read_bytes())
        put(altered, path, other(get(plain, path)))
        try:
            forged = msgspec.convert(altered, Certificate)
        except msgspec.ValidationError:
            continue
        assert list(judgement_problems(forged, computed)), path


def first_log(folder: Folder) -> Path:
    return folder.path / read_certificate(folder.certificate).claim.runs[0].log


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    plain = json.loads(path.read_bytes())
    change(plain)
    path.write_bytes(json.dumps(plain).encode())


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another arrival": (lambda log: put(log, ("requests", 5, "intended_s"), 0.5), "not that of the workload"),
    "shorter prompts": (lambda log: put(log, ("requests", 5, "prompt_tokens"), 3), "not that of the workload"),
    "shorter answers": (lambda log: put(log, ("requests", 5, "wanted_output_tokens"), 1), "not that of the workload"),
    "a late one made warm-up": (lambda log: put(log, ("requests", 20, "is_warmup"), True), "not that of the workload"),
    "a request left out": (lambda log: log["requests"].pop(), "are not those of the workload"),
    "another rate": (lambda log: put(log, ("rate_per_s",), 6.5), "not that of the workload"),
    "another stream": (lambda log: put(log, ("stream",), "confirm 9"), "not that of the workload"),
    "settings": (lambda log: put(log, ("config", "scheduler", "max_num_seqs"), 64), "have the hash"),
    "a later first token": (lambda log: put(log, ("requests", 20, "chunk_times_s", 0),
                                            log["requests"][20]["chunk_times_s"][0] - 0.01), "by the logs"),
    "a problem": (lambda log: put(log, ("problems",), ["drift"]), "by the logs"),
    "a search's arrivals": (lambda log: put(log, ("stream",), "trial 3 run 1"), "not a stream of the confirmation"),
    "the same arrivals again": (lambda log: put(log, ("stream",), "confirm 2"), "confirm 2 is used twice"),
    "times without tokens": (lambda log: log["requests"][20]["chunk_tokens"].pop(), "not that of the workload"),
    "the verdict": (lambda log: put(log, ("verdict",), "fails"), "say that the objective holds"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_log_with_new_hashes_is_detected(folder: Folder, name: str) -> None:
    change, message = FORGERIES[name]
    edit(first_log(folder), change)
    folder.reseal()
    problems = verify(folder.certificate).problems
    assert problems and any(message in problem for problem in problems), problems


CLAIMS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a laxer objective": (lambda made: put(made, ("claim", "slo", 0, "limits", "ttft_s"), 9.0), "slo_fingerprint"),
    "another workload": (lambda made: put(made, ("claim", "load", "workload", "workload", "output_tokens"), 2),
                         "workload_hash"),
    "another seed": (lambda made: put(made, ("claim", "load", "seed"), 8), "not that of the workload"),
    "another configuration": (lambda made: put(made, ("claim", "finalists", 0, "config_hash"), "0" * 12),
                              "which is not trial 3"),
    "swapped finalists": (lambda made: put(made, ("claim", "runs", 0, "finalist"), "default"), "which is not default"),
    "a run counted twice": (lambda made: put(made, ("claim", "runs", 1, "log"), made["claim"]["runs"][0]["log"]),
                            "is used twice"),
    "a stranger": (lambda made: put(made, ("claim", "runs", 0, "finalist"), "nobody"), "who is no finalist"),
    "a file outside": (lambda made: put(made, ("claim", "runs", 0, "log"), "../../etc/hostname"), "has no SHA-256"),
    "an attack on another": (lambda made: put(made, ("claim", "attacks", 0, "finalist"), "default"),
                             "which is not default"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_forged_claim_with_a_new_digest_is_detected(folder: Folder, name: str) -> None:
    change, message = CLAIMS[name]
    folder.reseal(change)
    problems = verify(folder.certificate).problems
    assert problems and any(message in problem for problem in problems), problems


def test_another_tuned_yaml_and_a_missing_log_are_detected(folder: Folder) -> None:
    text = (folder.path / "tuned.yaml").read_text().replace("max_num_seqs: 16", "max_num_seqs: 17")
    (folder.path / "tuned.yaml").write_text(text)
    folder.reseal()
    assert any("composes to" in problem for problem in verify(folder.certificate).problems)
    folder.restore()
    first_log(folder).unlink()
    assert any("no such file" in problem for problem in verify(folder.certificate).problems)


def test_what_cannot_be_computed_is_a_problem(folder: Folder) -> None:
    edit(folder.path / "attack.json", lambda log: put(log, ("num_kv_blocks",), 0))
    folder.reseal()
    assert any("cannot be computed" in problem for problem in verify(folder.certificate).problems)


def test_another_format_is_refused_by_name(folder: Folder) -> None:
    edit(folder.certificate, lambda made: put(made, ("format_version",), 99))
    with pytest.raises(ConfigError, match="has format 99"):
        verify(folder.certificate)
