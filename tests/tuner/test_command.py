"""`servekit tune` as a process, with a tiny model of random weights: plan, trials, Ctrl-C and going on, exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from servekit.cli import main
from servekit.tuner.certificate import read_certificate, verify
from servekit.tuner.run_log import read_run

FILE = """\
slo: {ttft: {p50: 30s}}
workload: {name: fixed, prompt_tokens: 24, output_tokens: 4, rate: 40}
base: {model: {source: "dummy:tiny", max_model_len: 256}, engine.threads: 1,
       memory.num_kv_blocks: 64, scheduler.max_num_seqs: 16}
search: {scheduler.max_num_seqs: "choice(4, 8, 16)"}
budget:
  minutes: 10
  trials: 3
  requests: 10
  confirm_requests: 10
  min_run_s: 0
  warmup_requests: 1
  max_busy_share: null
  max_slowdown: null
folder: FOLDER
"""
LIMIT_S = 240.0


@dataclass
class Tuned:
    """A process that has ended."""

    status: int
    out: str
    err: str


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "servekit", "tune", str(file), *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], said: str = "") -> Tuned:
    assert process.stdout is not None and process.stderr is not None
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    out, err = process.stdout.read(), process.stderr.read()
    watchdog.cancel()
    return Tuned(process.wait(), said + out, err)


def tune(file: Path, *words: str) -> Tuned:
    return ended(start(file, *words))


def write(folder: Path, text: str = FILE) -> Path:
    file = folder / "tune.yaml"
    file.write_text(text.replace("FOLDER", str(folder / "study")))
    return file


def trials_of(told: Tuned) -> list[str]:
    """The lines of trials that were measured, without those that were disturbed and repeated.

    A line that is being printed when the signal arrives may come twice.
    """
    lines = (line for line in told.out.splitlines() if line.startswith("trial ") and ": holds at" in line)
    return list(dict.fromkeys(lines))


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """Everything that was printed up to the first line that begins like this."""
    assert process.stdout is not None
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith(beginning):
            break
    watchdog.cancel()
    assert said.splitlines()[-1:] and said.splitlines()[-1].startswith(beginning), said
    return said


@dataclass
class Interrupted:
    """A study that was interrupted after its first trial, and went on until its end."""

    file: Path
    folder: Path
    first: Tuned
    second: Tuned


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("tune")
    file = write(folder)
    process = start(file)
    said = read_until(process, "trial ")
    process.send_signal(signal.SIGINT)
    first = ended(process, said)
    return Interrupted(file, folder / "study", first, tune(file))


def test_the_plan_is_said_before_the_first_trial(study: Interrupted) -> None:
    plan = study.first.out.partition("\ntrial ")[0]
    for part in ("objective: ttft.p50 (ttft 30000 ms)", "engine: dummy:tiny, float32", "one request alone: TTFT ",
                 "searched: 1 knobs", "scheduler.max_num_seqs: 4, 8, 16", "a run of a trial: 10 requests",
                 "budget: 10 minutes, 40% of them for the confirmation", "; no more than 3, as budget.trials says",
                 "of 6.0 minutes for the search, a configuration that holds nothing gets about 36 s (10%)"):
        assert part in plan


def test_an_interrupt_keeps_everything_and_the_same_command_goes_on(study: Interrupted) -> None:
    assert study.first.status == 130, study.first.err
    assert "the same command goes on from here" in study.first.out
    assert "trials are there already" not in study.first.out
    assert study.second.status == 0, study.second.out + study.second.err
    assert "trials are there already" in study.second.out
    numbers = [[int(line.split()[1].rstrip(",:")) for line in trials_of(told)] for told in (study.first, study.second)]
    assert numbers[0] and numbers[1] and max(numbers[0]) < min(numbers[1])


def test_every_configuration_is_measured_once(study: Interrupted) -> None:
    told = trials_of(study.first) + trials_of(study.second)
    values = [line.rpartition("[")[2].rstrip("]") for line in told]
    assert sorted(values) == ["max_num_seqs=16", "max_num_seqs=4", "max_num_seqs=8"], "\n".join(told)


def test_what_is_left_in_the_folder(study: Interrupted) -> None:
    assert (study.folder / "tuned.yaml").exists()
    settings = json.loads((study.folder / "settings.json").read_text())
    assert settings["settings"]["budget"]["trials"] == 3
    runs = [read_run(path) for path in (study.folder / "runs").glob("*.json")]
    assert {"alone", "crowd", "trial 0 run 0"} <= {run.stream for run in runs}


@pytest.mark.parametrize("word, part", [
    ("slo.ttft.p50=20s", "slo"), ("search={scheduler.max_num_seqs: 'choice(8, 16)'}", "space")])
def test_a_study_of_something_else_is_left_alone(study: Interrupted, word: str, part: str) -> None:
    kept = {path: path.read_bytes() for path in study.folder.rglob("*") if path.is_file()}
    refused = tune(study.file, word)
    assert refused.status == 2 and f"was made for another {part}" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize("search, fragment", [
    ("{scheduler.max_num_seqs: 'choice(4, 8)'}", "scheduler.max_num_seqs=16: is outside the search space: 4, 8"),
    ("{}", "search={}: names no knob"),
    ("{scheduler.max_num_sequences: 'choice(4, 8)'}", "did you mean scheduler.max_num_seqs?"),
    ("{scheduler.max_num_seqs: 'choice(4, 8'}", "is not in Hydra's override grammar"),
])
def test_a_bad_search_space_is_refused_before_anything_is_started(search: str, fragment: str, tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(write(tmp_path)), f"search={search}"]) == 2
    told = capsys.readouterr()
    assert fragment in told.err and len(told.err.splitlines()) == 1 and not told.out
    assert not (tmp_path / "study").exists()


def test_an_impossible_objective_is_refused(tmp_path: Path) -> None:
    refused = tune(write(tmp_path), "slo={tpot: {p99: 1us}}")
    assert refused.status == 2 and len(refused.err.splitlines()) == 1
    assert "slo.tpot.p99=0.001ms: a request alone on this device has a tpot of" in refused.err
    assert not (tmp_path / "study" / "study.journal").exists()


def test_when_nothing_holds_it_says_what_binds(tmp_path: Path) -> None:
    """Every other answer has more than one token, and no machine makes tokens as fast as that; the first ones are
    answered as soon as they have begun, so that the objective is not refused for what a request alone takes. A second
    trial is allowed, since the first may be disturbed if this machine is busy.
    """
    lengths = [1] * 6 + [1, 24] * 20
    rows = (f"2024-05-10 00:00:{i:02},16,{length}" for i, length in enumerate(lengths))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    told = tune(write(tmp_path), "slo={tpot: {p90: 1us}}", "budget.trials=2", "budget.minutes=2", "budget.requests=30",
                f"workload={{trace: {tmp_path / 'trace.csv'}, rate: 120}}")
    assert told.status == 4, told.out + told.err
    assert "breaks tpot.p90" in told.out
    said = told.out.partition("nothing holds the objective. Closest: trial ")[2]
    assert "which breaks tpot.p90; most of its steps were bound by " in said
    folder = tmp_path / "study"
    assert not (folder / "tuned.yaml").exists()
    assert "bound by" in (folder / "report.html").read_text()
    proven = read_certificate(folder / "certificate.json")
    assert verify(folder / "certificate.json").problems == [] and proven.judgement.winner is None
    assert "default" in proven.claim.failures
    assert "held the objective at no rate that was tried" in proven.claim.failures.values()


def test_a_model_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    told = tune(write(tmp_path), f"base.model.source={tmp_path / 'none.gguf'}")
    assert told.status == 2 and len(told.err.splitlines()) == 1 and not told.out


@pytest.mark.parametrize("words, fragment", [
    ([], "file=null: must be a tuning file"), (["budget.minutes=5"], "must be a tuning file"),
    (["chatt"], "did you mean servekit tune chat?"), (["none.yaml"], "there is no such file")])
def test_a_file_is_needed(words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    assert fragment in capsys.readouterr().err


def test_help_explains_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    told = capsys.readouterr().out
    for part in ("slo:", "workload:", "base:", "search:", "budget:", "study:", "servekit tune chat", "batch, chat",
                 "exit status"):
        assert part in told
