"""Search spaces of other servers: flags, switches, files, conditions, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from servekit.config.errors import ConfigError
from servekit.config.resolve import as_dict, config_hash
from servekit.tuner.launch import LaunchConfig, read_configuration
from servekit.tuner.server_space import SPACES, ServerSpace, read_space
from servekit.tuner.space import Ladder, Options

COMMAND = ("server", "-m", "a model.gguf")
KNOBS = {
    "slots": {"values": "choice(4, 1, 2)", "flag": "--slots {value} --shared"},
    "eager": {"values": "choice(true, false)", "flag": "--eager"},
    "reuse": {"values": "choice(true, false)", "flag": {True: "--reuse", False: "--no-reuse"}},
    "chunk": {"values": "range(64, 257, 64)", "flag": "--chunk={value}", "when": {"reuse": True}},
}


def space_of(knobs: Mapping[str, Any] = KNOBS) -> ServerSpace:
    return read_space(knobs, COMMAND)


def launched(space: ServerSpace, **point: Any) -> LaunchConfig:
    """The launch of a point, whose other knobs are left out, as the study makes it."""
    return space.launch(COMMAND, space.space.overrides({**space.space.start, **point}))


def flags(space: ServerSpace, **point: Any) -> str:
    return shlex.join(launched(space, **point).command[len(COMMAND):])


def test_a_space_starts_from_the_command_as_it_is() -> None:
    space = space_of()
    assert space.space.start == {"slots": None, "eager": False, "reuse": None, "chunk": None}
    assert launched(space) == LaunchConfig(COMMAND, {})
    domains = {knob.key: knob.domain for knob in space.space.knobs}
    assert domains["slots"] == Ladder((1, 2, 4, None)) and domains["chunk"] == Ladder((64, 128, 192, 256, None))
    assert domains["eager"] == Options((True, False)) and domains["reuse"] == Options((True, False, None))


def test_knobs_become_flags() -> None:
    space = space_of()
    assert flags(space, slots=4) == "--slots 4 --shared"
    assert flags(space, eager=True) == "--eager" and flags(space, eager=False) == ""
    assert flags(space, reuse=True) == "--reuse" and flags(space, reuse=False) == "--no-reuse"
    assert flags(space, slots=1, eager=True, reuse=True, chunk=64) == "--slots 1 --shared --eager --reuse --chunk=64"


def test_values_above_the_cores_of_the_machine_are_left_out() -> None:
    (knob,) = space_of({"threads": {"values": "choice(1, 4096)", "most": "cores", "flag": "-t {value}"}}).space.knobs
    assert knob.domain == Ladder((1, None))


def test_a_knob_matters_under_its_condition_alone() -> None:
    space = space_of()
    assert flags(space, reuse=False, chunk=64) == "--no-reuse" and flags(space, chunk=64) == ""
    assert config_hash(launched(space, reuse=False, chunk=64)) == config_hash(launched(space, reuse=False))


def test_a_launch_is_a_point_again_and_survives_its_log() -> None:
    space = space_of()
    config = launched(space, slots=2, reuse=True, chunk=128)
    assert space.space.locate(config) == {"slots": 2, "eager": False, "reuse": True, "chunk": 128}
    assert read_configuration(json.loads(json.dumps(as_dict(config))), "log") == config


@pytest.mark.parametrize("name, read", [("knobs.yaml", yaml.safe_load), ("knobs.json", json.loads)])
def test_knobs_without_a_flag_go_into_a_file(name: str, read: Any, tmp_path: Path) -> None:
    command = ("server", "--config={file}")
    space = read_space({"file": name, "knobs": {"engine.slots": {"values": "choice(1, 2)"}, **KNOBS}}, command)
    config = space.launch(command, space.space.overrides({**space.space.start, "engine.slots": 2, "eager": True}))
    assert config.words(tmp_path) == ["server", f"--config={tmp_path / name}", "--eager"]
    assert read((tmp_path / name).read_text()) == {"engine": {"slots": 2}}
    assert config_hash(config) != config_hash(space.launch(command, ["eager=true"]))
    assert config.shell_line == 'server --config="$folder/$file" --eager'


def test_equal_knobs_with_other_flags_are_another_space() -> None:
    other = {**KNOBS, "slots": {**KNOBS["slots"], "flag": "--parallel {value} --shared"}}
    assert space_of().space.fingerprint == space_of(other).space.fingerprint
    assert space_of().fingerprint != space_of(other).fingerprint


@pytest.mark.parametrize("path", sorted(SPACES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_spaces_that_are_shipped_can_be_read(path: Path) -> None:
    space = read_space(path.stem, ("server",))
    assert len(space.knobs) >= 8
    for knob in space.knobs:
        assert knob.flag is not None
        for value in getattr(knob.knob.domain, "values", ()):
            if value not in (None, False):
                assert knob.flag.words(value)[0].startswith("--")


def test_the_default_is_the_space_of_the_program() -> None:
    assert read_space("default", ("/opt/bin/llama-server", "-m", "x")) == read_space("llama-server", COMMAND)


@pytest.mark.parametrize("search, fragment", [
    ({}, "search={}: names no knob"),
    ({"slots": "choice(1, 2)"}, "search.slots=choice(1, 2): must have values"),
    ({"slots": {"flag": "--slots {value}"}}, "has no values"),
    ({"slots": {"values": "choice(1, 2)", "flag": "--slots {n}"}},
     "search.slots.flag=--slots {n}: has the unknown placeholder {n}; write {value} for the value"),
    ({"slots": {"values": "choice(1, 2)", "flag": "--slots"}}, "does not say where the value goes"),
    ({"slots": {"values": "choice(1, 2)", "flag": "--slots '{value}"}}, "is not a piece of a command line"),
    ({"slots": {"values": "choice(1, 2)"}}, "search.slots=null: has no flag, and there is no file"),
    ({"slots": {"values": "choice(1, 2)", "flag": "--slots {value}", "default": 1}},
     "must be one of values, most, flag, when"),
    ({"slots": {"values": "choice(1, 2)", "flag": "--slots {value}", "most": 4}}, "search.slots.most=4: must be cores"),
    ({"slots": {"values": "choice(a, b)", "flag": "--slots {value}", "most": "cores"}}, "is about whole numbers"),
    ({"slots": {"values": "interval(1, 9)", "flag": "--slots {value}"}}, "search.slots.values=interval(1, 9): is an"),
    ({"slots": {"values": "choice(1, 1)", "flag": "--slots {value}"}}, "names 1 twice"),
    ({"slots": {"values": "choice(1, 2", "flag": "--slots {value}"}}, "is not in Hydra's override grammar"),
    ({"eager": {"values": "choice(true, false)", "flag": {True: "--eager"}}},
     "must have a flag for each of true, false"),
    ({**KNOBS, "more": {"values": "choice(1, 2)", "flag": "-x {value}", "when": {"none": True}}},
     "there is no knob none"),
    ({**KNOBS, "more": {"values": "choice(1, 2)", "flag": "-x {value}", "when": {"slots": 3}}}, "slots is never 3"),
    ({**KNOBS, "more": {"values": "choice(1, 2)", "flag": "-x {value}", "when": {"chunk": 64}}},
     "chunk depends on another knob itself"),
    ({"file": "knobs.toml", "knobs": KNOBS}, "must be the name of a .yaml or .json file"),
    ({"file": "knobs.yaml", "knobs": KNOBS}, "does not read knobs.yaml; write {file}"),
    ("lama-server", "did you mean search=llama-server?"), ("default", "server is neither a file of knobs nor one of"),
    ("none.yaml", "there is no such file"),
])
def test_a_space_that_cannot_be_honoured_is_refused(search: object, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_space(search, COMMAND)
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_in_a_file_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("knobs:\n  slots:\n    values: choice(1, 2)\n    flag: --slots {n}\n")
    with pytest.raises(ConfigError, match=r"search\.slots\.flag=--slots \{n\}: .*own\.yaml, line 4"):
        read_space(str(path), COMMAND)
