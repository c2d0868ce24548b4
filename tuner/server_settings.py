"""What a tuning file says of a server that is not servekit's own: where it answers, how it is started, what it takes.

    target: openai
    url: http://127.0.0.1:8080
    start_command: llama-server -m model.gguf --port 8080
    search: llama-server
    launch: {model: null, start_timeout_s: 600}
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from servekit.config.bounds import above_zero
from servekit.config.errors import ConfigError, require
from servekit.tuner.launch import LaunchConfig
from servekit.tuner.server_space import ServerSpace, read_space

KEYS = ("target", "url", "start_command", "launch")
"""The keys of a tuning file that are about the target."""


class TargetKind(Enum):
    """What is tuned."""

    engine = "engine"
    """servekit's own engine."""
    openai = "openai"
    """Any server that answers /v1/completions and takes its knobs when it is started."""


@dataclass(frozen=True)
class ServerOptions:
    """What is known of a server."""

    model: str | None = None
    """Name of the model to ask for; null: the first that the server lists."""
    start_timeout_s: float = 600.0
    """Longest time from its start until it is ready, in seconds."""

    def __post_init__(self) -> None:
        require(self.model is None or isinstance(self.model, str), "launch.model", self.model, "must be a name",
                "leave it out to take the first that the server lists")
        require(isinstance(self.start_timeout_s, int | float), "launch.start_timeout_s", self.start_timeout_s,
                "must be a number of seconds", "for example launch.start_timeout_s=600")
        above_zero("launch.start_timeout_s", self.start_timeout_s, 600)


@dataclass(frozen=True)
class ServerSettings:
    """A server to be tuned."""

    url: str
    """Where it answers, without /v1."""
    start_command: tuple[str, ...]
    """What starts it, without knobs."""
    space: ServerSpace
    options: ServerOptions

    def launch(self, overrides: Sequence[str] = ()) -> LaunchConfig:
        """How it is started with some knobs set; with none, as start_command has it."""
        return self.space.launch(self.start_command, overrides)


def target_kind(given: Mapping[str, Any]) -> TargetKind:
    """What a tuning file is about. Raises ConfigError, also for a key that the target does not have."""
    known = {kind.value: kind for kind in TargetKind}
    name = str(given.get("target", TargetKind.engine.value))
    require(name in known, "target", name, f"must be one of {', '.join(known)}", "for example target=openai")
    for key in KEYS[1:] if known[name] is TargetKind.engine else ():
        require(key not in given, key, given.get(key), "belongs to another server, and servekit's own engine is tuned",
                "add target=openai, or leave it out")
    return known[name]


def parse_server(given: Mapping[str, Any]) -> ServerSettings:
    """The server that a tuning file with `target: openai` describes; its `base` is left aside. Raises ConfigError."""
    budget = given.get("budget")
    slowdown = budget.get("max_slowdown") if isinstance(budget, Mapping) else None
    require(slowdown is None, "budget.max_slowdown", slowdown, "is about the steps of servekit's own engine, and "
            "another server tells nothing of its steps", "leave it out")
    command = _command(given.get("start_command"))
    return ServerSettings(_url(given.get("url")), command, read_space(given.get("search", "default"), command),
                          _options(given.get("launch", {})))


def _url(given: object) -> str:
    require(given is not None, "url", None, "must be given: it says where the server answers",
            "for example url=http://127.0.0.1:8080")
    try:
        parts = urlsplit(str(given))
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    require(is_good, "url", given, "must be an address", "for example url=http://127.0.0.1:8080")
    return str(given).rstrip("/").removesuffix("/v1")


def _command(given: object) -> tuple[str, ...]:
    require(bool(given) and isinstance(given, str), "start_command", given, "must be given: each trial starts the "
            "server anew", "for example start_command='llama-server -m model.gguf --port 8080'")
    try:
        words = tuple(shlex.split(str(given)))
    except ValueError as error:
        raise ConfigError("start_command", given, f"is not a command line: {str(error).lower()}", "correct its quotes"
                          ) from None
    require(bool(words) and shutil.which(words[0]) is not None, "start_command", given,
            f"{words[0] if words else 'it'} cannot be run", "give the path of a program, or install it")
    return words


def _options(given: object) -> ServerOptions:
    require(isinstance(given, Mapping), "launch", given, "must hold keys and values",
            "for example launch: {start_timeout_s: 600}")
    assert isinstance(given, Mapping)
    known = tuple(ServerOptions.__dataclass_fields__)
    for key in given:
        require(key in known, f"launch.{key}", given[key], f"must be one of {', '.join(known)}", "leave it out")
    return ServerOptions(**given)
