"""How a server that is not servekit's own is launched: what `Config` is for servekit's own engine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from servekit.config.compose import recompose
from servekit.config.errors import ConfigError
from servekit.config.roots import serve_root
from servekit.config.schema import Config

FILE_PLACEHOLDER = "{file}"
"""Stands in a command line for the path of the file of knobs."""


@dataclass(frozen=True)
class KnobFile:
    """A file that a server reads its knobs from."""

    name: str
    """`knobs.yaml`; its suffix says what is in it."""
    text: str


@dataclass(frozen=True)
class LaunchConfig:
    """A command line, and the knobs that it comes from."""

    command: tuple[str, ...]
    """Its words; `{file}` stands for the path of the file of knobs."""
    knobs: dict[str, Any]
    """Values of the knobs that are given, by name; those that are left to the server are not there."""
    file: KnobFile | None = None
    """None: the server reads none."""

    def words(self, folder: Path) -> list[str]:
        """The command line, with the file of knobs in a folder; it is written there."""
        if self.file is None:
            return list(self.command)
        path = folder / self.file.name
        path.write_text(self.file.text, encoding="utf-8")
        return [word.replace(FILE_PLACEHOLDER, str(path)) for word in self.command]

    @property
    def shell_line(self) -> str:
        """The command line for a shell script that lies beside its file of knobs."""
        return " ".join(map(_quoted, self.command))


def _quoted(word: str) -> str:
    """A word as the shell reads it; the path of the file begins with the folder of the script."""
    parts = (shlex.quote(part) if part else "" for part in word.split(FILE_PLACEHOLDER))
    return '"$folder/$file"'.join(parts) or "''"


Configuration: TypeAlias = Config | LaunchConfig
"""What is measured."""


def read_configuration(values: Mapping[str, Any], source: str) -> Configuration:
    """A configuration as `config.resolve.as_dict` wrote it. Raises ConfigError."""
    if "command" not in values:
        config: Config = recompose(serve_root(), values, source)
        return config
    try:
        return msgspec.convert(values, LaunchConfig)
    except msgspec.ValidationError as error:
        raise ConfigError("run", source, f"does not say how a server was launched ({error})",
                          "keep the run folder as it was written") from None


def named(config: LaunchConfig, name: str) -> LaunchConfig:
    """The same with its file of knobs under another name, of the same kind."""
    if config.file is None:
        return config
    return replace(config, file=replace(config.file, name=f"{name}{Path(config.file.name).suffix}"))


def program_of(command: Sequence[str]) -> str:
    """The name of the program that a command line runs, also behind `env NAME=value`."""
    words = (word for word in command if Path(word).name != "env" and "=" not in word)
    return Path(next(words, command[0])).name
