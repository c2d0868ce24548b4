"""The command line: commands, exit statuses, help, completion."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from servekit.cli import COMMANDS, main
from servekit.completion import candidates
from servekit.config.compose import compose_serve
from servekit.config.describe import Root
from servekit.config.origin import COMMAND_LINE
from servekit.config.resolve import flatten
from servekit.config.roots import ROOTS

EVERY_ROOT = [pytest.param(root(), id=name) for name, root in ROOTS.items()]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, run: Any) -> None:
    """Replace what a command starts, so that only the command line is tested."""
    replacement = ModuleType(module)
    replacement.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, replacement)


# --- commands --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("command", "module", "override", "key"), [
    ("serve", "servekit.server.launch", "server.port=9", "server.port"),
    ("bench", "servekit.load.bench", "num_requests=9", "num_requests")])
def test_a_command_runs_what_it_composed(monkeypatch: pytest.MonkeyPatch, command: str, module: str, override: str,
                                         key: str) -> None:
    ran: list[Any] = []
    stand_in(monkeypatch, module, lambda composed: ran.append(composed) or 7)
    assert main([command, override]) == 7
    assert flatten(ran[0].config)[key] == 9 and ran[0].origins[key] == COMMAND_LINE


def test_a_site_file_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    stand_in(monkeypatch, "servekit.server.launch", lambda composed: ran.append(composed) or 0)
    Path("site.yaml").write_text("server: {port: 9001, host: 0.0.0.0}\n")
    assert main(["serve", "site.yaml", "server.port=9002"]) == 0
    assert (ran[0].config.server.port, ran[0].config.server.host) == (9002, "0.0.0.0")


def test_the_environment_is_a_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SERVEKIT__SERVER__PORT", "9003")
    assert main(["config"]) == 0
    assert re.search(r"^server\.port +9003 +SERVEKIT__SERVER__PORT$", capsys.readouterr().out, re.MULTILINE)


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(composed: Any) -> int:
        raise KeyboardInterrupt
    stand_in(monkeypatch, "servekit.server.launch", interrupted)
    assert main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"servekit \d+\.\d+\.\d+\n", capsys.readouterr().out)


# --- bad input: one line, exit status 2 ------------------------------------------------------------------------------

BAD = [
    (["srve"], ["command=srve", "serve, bench, tune, verify, simulate, plan, config", "did you mean servekit serve?"]),
    (["frobnicate"], ["command=frobnicate", "servekit --help"]),
    (["help", "srve"], ["did you mean servekit serve?"]),
    (["serve", "server.prot=1"], ["server.prot=1", "did you mean server.port?"]),
    (["serve", "server.port=x"], ["server.port=x", "whole number"]),
    (["serve", "server.port=-1"], ["server.port=-1", "between 0 and 65535"]),
    (["serve", "engine.device=tpu"], ["engine.device=tpu", "auto, cpu, cuda"]),
    (["serve", "scheduler.policy=fast"], ["scheduler.policy=fast", "fifo"]),
    (["serve", "model.source=/data/x=y"], ["""model.source='"/data/x=y"'"""]),
    (["serve", "site.yaml"], ["site.yaml", "no such file"]),
    (["serve", "broken.yaml"], ["broken.yaml", "line 2"]),
    (["serve", "server.port=1", "broken.yaml"], ["broken.yaml", "comes first"]),
    (["serve", "--max-num-seqs=3"], ["--max-num-seqs=3", "no such flag", "scheduler.max_num_seqs=VALUE"]),
    (["serve", "--verbose"], ["--verbose", "no such flag"]),
    (["serve", "server.port=a\nb"], ["server.port"]),
    (["config", "serve", "server.port=x"], ["server.port=x"]),
    (["bench", "arrival=poison"], ["arrival=poison", "did you mean arrival=poisson?"]),
    (["completion", "tcsh"], ["tcsh", "bash, zsh, fish"]),
    (["completion"], ["bash, zsh, fish"]),
]


@pytest.mark.parametrize(("argv", "fragments"), BAD)
def test_bad_input(argv: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.yaml").write_text("server:\n  port: ]\n")
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("servekit: ")
    assert [fragment for fragment in fragments if fragment not in err] == [], err


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from servekit.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argv", [["serve", "server.port=x"], ["srve"], ["config", "none.yaml"]])
def test_bad_input_in_a_process_of_its_own(argv: list[str]) -> None:
    result = run(*argv)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = "import sys; from servekit.cli import main; sys.exit(main(['help', 'serve']))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


# --- config ----------------------------------------------------------------------------------------------------------

def test_config_prints_every_value_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "+preset=interactive", "server.port=9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    rows = {key: (value, origin) for key, value, origin in
            (re.split(r" {2,}", line) for line in out.splitlines() if not line.startswith("#"))}
    assert list(rows) == list(flatten(compose_serve().config))
    assert rows["server.port"] == ("9", "command line")
    assert rows["scheduler.max_num_seqs"] == ("32", "conf/preset/interactive.yaml")
    assert rows["engine.threads"] == ("null", "default")


def test_config_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config"])
    lines = capsys.readouterr().out.splitlines()
    assert len({line.rindex("default") for line in lines if line.endswith("  default")}) == 1


def test_config_as_yaml_can_be_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "--yaml", "+preset=batch"])
    Path("site.yaml").write_text(capsys.readouterr().out)
    assert compose_serve([], Path("site.yaml")).config == compose_serve(["+preset=batch"]).config


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "bench", "seed=3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"]["seed"] == 3 and printed["origins"]["seed"] == "command line" and printed["hash"]


def test_config_shows_what_was_dropped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVEKIT__ARRIVAL", "gamma")
    monkeypatch.setenv("SERVEKIT__ARRIVAL__GAP_CV", "3")
    main(["config", "bench", "arrival=poisson"])
    assert "# dropped: arrival.gap_cv=3 (SERVEKIT__ARRIVAL__GAP_CV)" in capsys.readouterr().out


# --- help ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_commands_groups_and_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for command in COMMANDS.values():
        assert command.doc in out
    for root in (root() for root in ROOTS.values()):
        for group in root.groups.values():
            assert f"{group.name}=\n" in out
            assert [name for name in group.option_names if not re.search(rf"^    {name}\b", out, re.MULTILINE)] == []


@pytest.mark.parametrize("root", EVERY_ROOT)
def test_help_of_a_command_lists_every_key_with_default_and_docstring(root: Root[Any],
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    main([root.name, "--help"])
    with_flag = capsys.readouterr().out
    main(["help", root.name])
    assert capsys.readouterr().out == with_flag
    text = " ".join(with_flag.split())
    for key in root.keys.values():
        if not key.chooses_component:
            assert f" {key.last_part}={key.default_text}" in text and key.doc in text
            assert not key.section or f"{key.section}. " in text
    assert max(map(len, with_flag.splitlines())) <= 120


@pytest.mark.parametrize("command", ["config", "completion", "doctor"])
def test_help_of_other_commands_shows_their_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert COMMANDS[command].usage in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["completion", "candidates", "servekit serve "],
                                  ["config"], ["bench", "arrival=x"]])
def test_torch_is_not_imported(argv: list[str]) -> None:
    program = ("import sys; from servekit.cli import main; main(); "
               "sys.exit(bool({'torch', 'fastapi', 'optuna'} & set(sys.modules)))")
    result = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("argv", [["--help"], ["completion", "candidates", "servekit serve sch"]])
def test_help_and_completion_do_not_need_hydra(argv: list[str]) -> None:
    program = "import sys; from servekit.cli import main; main(); sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, timeout=60).returncode == 0


def test_nothing_is_written(tmp_path: Path) -> None:
    assert run("config", "+preset=interactive").returncode == 0
    assert list(tmp_path.iterdir()) == []


# --- completion ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("line", "expected"), [
    ("servekit s", {"serve", "simulate"}),
    ("servekit ", {*COMMANDS, "--help", "--version"}),
    ("servekit completion ", {"bash", "zsh", "fish"}),
    ("servekit serve +", {"+preset="}),
    ("servekit serve +preset=ba", {"+preset=balanced", "+preset=batch"}),
    ("servekit serve site.yaml preset=i", {"preset=interactive"}),
    ("servekit serve sch", {"scheduler."}),
    ("servekit serve scheduler.m", {"scheduler.max_num_seqs=", "scheduler.max_step_tokens="}),
    ("servekit serve scheduler.prefix_cache=", {"scheduler.prefix_cache=none", "scheduler.prefix_cache=hash",
                                               "scheduler.prefix_cache=radix"}),
    ("servekit serve scheduler/prefix", {"scheduler/prefix_cache="}),
    ("servekit serve scheduler/prefix_cache=n", {"scheduler/prefix_cache=none"}),
    ("servekit serve engine.device=c", {"engine.device=cpu", "engine.device=cuda"}),
    ("servekit serve server.dev_endpoints=", {"server.dev_endpoints=true", "server.dev_endpoints=false"}),
    ("servekit bench arr", {"arrival.", "arrival="}),
    ("servekit config b", {"bench"}),
    ("servekit doctor engine.device=c", {"engine.device=cpu", "engine.device=cuda"}),
    ("servekit config bench arrival=p", {"arrival=poisson"}),
    ("servekit config --", {"--json", "--yaml"}),
    ("servekit serve model.source=/", set()),
    ("servekit frobnicate ", set()),
])
def test_candidates(line: str, expected: set[str]) -> None:
    assert set(candidates(line, COMMANDS, ROOTS)) == expected


@pytest.mark.parametrize("root", EVERY_ROOT)
def test_every_key_and_option_can_be_completed_level_by_level(root: Root[Any]) -> None:
    words = {f"{group.name}={name}" for group in root.groups.values() for name in group.option_names}
    words |= {f"{key.name}=" for key in root.keys.values() if not key.chooses_component}
    for word in words:
        typed = f"servekit {root.name} {word[:-1]}"
        assert any(word.startswith(candidate) for candidate in candidates(typed, COMMANDS, ROOTS)), word


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_for_candidates(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "completion candidates" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "expected"), [
    ("servekit serve scheduler.prefix_cache=n", ["none"]),
    ("servekit serve +preset=ba", ["balanced", "batch"]),
    ("servekit serve site.yaml scheduler.max_n", ["scheduler.max_num_seqs="]),
    ("servekit co", ["completion", "config"]),
])
def test_the_bash_script_completes(line: str, expected: list[str], tmp_path: Path) -> None:
    command = tmp_path / "servekit"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom servekit.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    script = (f'eval "$({command} completion bash)"; compopt() {{ :; }}\n'
              f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _servekit {command}\n"
              'printf "%s\\n" "${COMPREPLY[@]}"')
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == expected, result.stderr
