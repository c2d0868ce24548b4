"""`servekit tune target=openai` over a fake server: flags that make it faster, end it, or keep it from being ready."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from servekit.cli import main
from servekit.config.bench import BenchConfig, FixedWorkloadConfig
from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.tuner.certificate import read_certificate
from servekit.tuner.executor import EngineFailed, RunLength, TrialExecutor
from servekit.tuner.launch import LaunchConfig
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Tolerance
from servekit.tuner.run_log import file_hash, read_run
from servekit.tuner.server_host import ServerHost
from servekit.tuner.server_settings import ServerOptions, ServerSettings
from servekit.tuner.server_space import read_space
from servekit.tuner.slo import parse_slo
from servekit.tuner.trial import Candidate, Ending

FAKE = Path(__file__).parent / "fake_server.py"
FILE = """\
slo: {ttft: {p50: 30s}}
workload: {name: fixed, prompt_tokens: 24, output_tokens: 6, rate: 40}
base: {model: smollm2-135m}
search:
  mode: {values: "choice(fast, broken, stuck)", flag: {fast: --slots 8, broken: --broken, stuck: --stuck}}
budget:
  {minutes: 5, trials: 4, requests: 6, confirm_requests: 6, min_run_s: 0, warmup_requests: 1, max_busy_share: null}
launch: {start_timeout_s: 3}
target: openai
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def command(port: int, *flags: str) -> str:
    # -S: without site packages it starts at once.
    return shlex.join([sys.executable, "-S", str(FAKE), "--port", str(port), *flags])


@dataclass
class Tuned:
    """A tuning that has ended."""

    status: int
    out: str
    folder: Path
    child: int
    """Id of a process that the server had started."""


def is_alive(process_id: int) -> bool:
    """A process that nobody has waited for is not."""
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def tune(folder: Path, *words: str, port: int | None = None) -> int:
    port = free_port() if port is None else port
    file = folder / "tune.yaml"
    file.write_text(FILE)
    given = {word.partition("=")[0] for word in words}
    usual = {"url": f"http://127.0.0.1:{port}", "start_command": command(port), "folder": str(folder / "study")}
    return main(["tune", str(file), *words, *(f"{key}={value}" for key, value in usual.items() if key not in given)])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    child = folder / "child"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("servekit.tuner.command.Console.print", lambda _, text="", **rest: said.append(str(text)))
        status = tune(folder, f"start_command={command(port, '--child', str(child))}", port=port)
    return Tuned(status, "\n".join(said), folder / "study", int(child.read_text()))


def test_what_holds_is_found_and_what_does_not_run_is_told_with_its_last_lines(tuned: Tuned) -> None:
    assert tuned.status == 0, tuned.out
    for part in ("engine: fake, served by python", "  mode: fast, broken, stuck, null (cold; from null)",
                 "null: the knob is left out, and the server decides", "base is left aside",
                 "crashed (the server ended with status 1 before it was ready; its last lines: loading the model | "
                 "not enough memory for the slots)", "hung (the server was not ready at http://127.0.0.1:",
                 "[mode=fast]", "[start_command as it is]",
                 "no memory attack", f"sh {tuned.folder / 'tuned.sh'}"):
        assert part in tuned.out, tuned.out


def test_every_trial_is_a_fresh_process_and_none_is_left(tuned: Tuned) -> None:
    runs = [read_run(path) for path in (tuned.folder / "runs").glob("*.json")]
    assert {run.warm for run in runs if run.stream.startswith(("trial", "confirm"))} == {"cold"}
    assert len(list((tuned.folder / "servers").glob("*.log"))) >= 1 + 4 + 2, "the first look, each trial, confirmation"
    assert not is_alive(tuned.child)


def test_the_script_launches_the_winner_and_the_certificate_says_so(tuned: Tuned,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    script, certificate = tuned.folder / "tuned.sh", tuned.folder / "certificate.json"
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/sh" and lines[-1].startswith(f"exec {shlex.quote(sys.executable)} -S {FAKE} --port ")
    assert main(["verify", str(certificate)]) == 0, capsys.readouterr().err
    assert "what serves the winner: as claimed" in capsys.readouterr().out


def test_a_script_of_something_else_is_found(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    """Also when whoever changed it wrote its new hash into the certificate."""
    script, path = tuned.folder / "tuned.sh", tuned.folder / "certificate.json"
    kept = script.read_bytes(), path.read_bytes()
    try:
        script.write_bytes(kept[0].replace(b"--port", b"--slots 99 --port"))
        certificate = read_certificate(path)
        files = {**certificate.claim.files, "tuned.sh": file_hash(script)}
        claim = msgspec.structs.replace(certificate.claim, files=files)
        path.write_bytes(msgspec.structs.replace(certificate, claim=claim).sealed.encoded)
        assert main(["verify", str(path)]) == 1
        assert "tuned.sh: does not launch the winner" in capsys.readouterr().err
    finally:
        script.write_bytes(kept[0])
        path.write_bytes(kept[1])


def test_a_tuning_that_is_terminated_ends_its_server(tmp_path: Path) -> None:
    port, child, ignored = free_port(), tmp_path / "child", list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: ignored.append(number))

    def terminate_after_a_trial(_: object, text: object = "", **rest: object) -> None:
        if str(text).startswith("trial"):
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("servekit.tuner.command.Console.print", terminate_after_a_trial)
            assert tune(tmp_path, f"start_command={command(port, '--child', str(child))}", port=port) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ignored and not is_alive(int(child.read_text()))


# --- one server at a time ---------------------------------------------------------------------------------------------

BENCH = BenchConfig(workload=FixedWorkloadConfig(prompt_tokens=24, output_tokens=6))
KNOBS = {"slots": {"values": "choice(2, 8)", "flag": "--slots {value}"}}


@contextmanager
def executor_of(folder: Path, *flags: str, search: object = KNOBS) -> Iterator[tuple[TrialExecutor, ServerSettings]]:
    port = free_port()
    words = tuple(shlex.split(command(port, *flags)))
    server = ServerSettings(f"http://127.0.0.1:{port}", words, read_space(search, words), ServerOptions(None, 5.0))
    executor = TrialExecutor(ServerHost(server, folder / "servers", 30.0, lambda line: None),
                             parse_slo({"ttft": {"p50": "30s"}}), LoadPlan(BENCH, 3, 1, 30.0), RunLength(4, 0.0),
                             folder / "runs", Tolerance(None, None))
    executor.start_per_s = 50.0
    try:
        yield executor, server
    finally:
        executor.close()


def candidate(config: LaunchConfig) -> Candidate:
    return Candidate(0, {}, [], config, config_hash(config))


def test_a_server_that_dies_under_load_is_a_crash_with_its_last_lines(tmp_path: Path) -> None:
    with executor_of(tmp_path, "--dies") as (executor, server):
        outcome = executor.run(candidate(server.launch()))
        assert outcome.ending is Ending.crashed and "out of slots" in outcome.facts["error"], outcome


def test_a_server_that_takes_text_only_gets_prompts_of_exact_length(tmp_path: Path) -> None:
    with executor_of(tmp_path, "--text-only") as (executor, server):
        assert executor.describe(server.launch()).details["prompts"] == "text"
        measured, path = executor.measure_at(server.launch(), 50.0, 4, "alone", cold=False, stops_early=False)
        assert measured.holds and {request.prompt_tokens for request in read_run(path).requests} == {24}


def test_answers_that_are_too_short_cannot_be_measured(tmp_path: Path) -> None:
    with executor_of(tmp_path, "--stops-early") as (executor, server), \
            pytest.raises(EngineFailed, match="ended an answer after 4 of 6 tokens in spite of ignore_eos"):
        executor.measure_at(server.launch(), 50.0, 4, "alone", cold=True, stops_early=False)


def test_knobs_in_a_file_are_read_by_the_server(tmp_path: Path) -> None:
    search = {"file": "knobs.json", "knobs": {"engine.slots": {"values": "choice(2, 8)"}}}
    with executor_of(tmp_path, "--config", "{file}", search=search) as (executor, server):
        config = server.launch(["engine.slots=8"])
        measured, path = executor.measure_at(config, 50.0, 4, "alone", cold=True, stops_early=False)
        assert measured.holds and read_run(path).config_hash == config_hash(config)
        assert '"slots": 8' in (tmp_path / "servers" / "knobs.json").read_text()


def test_a_program_that_goes_away_is_a_wrong_setting(tmp_path: Path) -> None:
    with executor_of(tmp_path) as (executor, _), pytest.raises(ConfigError, match=r"start_command=.*cannot be run"):
        executor.describe(LaunchConfig((str(tmp_path / "none"),), {}))


# --- what is refused --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, fragment", [
    (["url="], "url=null: must be given"), (["url=localhost:80"], "url=localhost:80: must be an address"),
    (["start_command="], "start_command=null: must be given"),
    (["start_command=no-such-server --port 1"], "no-such-server cannot be run"),
    (["start_command='a \"b'"], "is not a command line"),
    (["search={slots: {values: 'choice(1, 2)', flag: '--slots {n}'}}"], "has the unknown placeholder {n}"),
    (["search=default"], "is neither a file of knobs nor one of llama-server, vllm"),
    (["budget.max_slowdown=2"], "budget.max_slowdown=2: is about the steps of servekit's own engine"),
    (["launch.start_timeout_s=0"], "launch.start_timeout_s=0: must be greater than 0"),
    (["launch.modell=x"], "launch.modell=x: must be one of model, start_timeout_s"),
    (["launch.model=other"], "launch.model=other: the server lists fake"),
    (["target=engine", "search=default"], "belongs to another server"),
    (["target=openia"], "target=openia: must be one of engine, openai"),
])
def test_what_cannot_be_honoured_is_one_line(words: list[str], fragment: str, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, *words) == 2
    told = capsys.readouterr()
    assert fragment in told.err and len(told.err.splitlines()) == 1 and not told.out
    assert not (tmp_path / "study" / "study.journal").exists()


def test_somebody_elses_server_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert tune(tmp_path, port=listening.getsockname()[1]) == 2
    assert "something answers there before the server is started" in capsys.readouterr().err


def test_a_command_that_does_not_run_is_told_with_its_last_lines(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert tune(tmp_path, f"start_command={command(port, '--broken')}", port=port) == 3
    told = capsys.readouterr().err
    assert "the base configuration does not run: the server ended with status 1" in told
    assert "not enough memory for the slots" in told
