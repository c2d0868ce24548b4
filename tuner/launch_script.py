"""tuned.sh: what won, as a script that starts a server with the knobs that were found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from servekit.config.resolve import config_hash
from servekit.tuner.emission import TunedFor, comments
from servekit.tuner.launch import LaunchConfig, named

SCRIPT = "tuned.sh"
_STEM = "tuned.knobs"
"""Of the name of the file of knobs."""


def launch_files(config: LaunchConfig, tuned_for: TunedFor) -> dict[str, str]:
    """The texts of the script and of its file of knobs, by their names."""
    own = named(config, _STEM)
    said = comments("Launch command found by servekit tune. Start the server with: sh tuned.sh", tuned_for,
                    config_hash(config))
    files = {SCRIPT: "\n".join(["#!/bin/sh", *said, "", *launch_lines(config), ""])}
    return files if own.file is None else {**files, own.file.name: own.file.text}


def launch_lines(config: LaunchConfig) -> list[str]:
    """The lines of the script that do something."""
    return list(_launch_lines(named(config, _STEM)))


def _launch_lines(config: LaunchConfig) -> Iterator[str]:
    if config.file is not None:
        yield 'folder=$(dirname "$0")'
        yield f"file={config.file.name}"
    yield f'exec {config.shell_line} "$@"'


def script_problems(folder: Path, config: LaunchConfig) -> Iterator[str]:
    """Where the files in a folder do not launch a configuration."""
    for name, text in _wanted(config).items():
        written = (folder / name).read_text(encoding="utf-8")
        if _without_comments(written) != text:
            yield f"{name}: does not launch the winner"


def _wanted(config: LaunchConfig) -> Mapping[str, list[str]]:
    own = named(config, _STEM)
    files = {SCRIPT: launch_lines(config)}
    return files if own.file is None else {**files, own.file.name: _without_comments(own.file.text)}


def _without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]
