"""The command line: a subcommand, a YAML file if there is one, then settings in Hydra's grammar.

Nothing heavy is imported before a command needs it: help and completion must answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from servekit.completion import CANDIDATES, SCRIPTS, candidates
from servekit.config.describe import Root, nearest
from servekit.config.errors import ConfigError, show
from servekit.config.origin import Composed, Layer, Origin
from servekit.config.resolve import as_dict, config_hash, flatten
from servekit.config.roots import ROOTS
from servekit.help import Style, command_help, overview


class ExitCode(IntEnum):
    """What the shell is told."""

    ok = 0
    runtime_failure = 1
    configuration = 2
    startup_failure = 3
    interrupted = 130


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    usage: str
    doc: str
    run: Callable[[Sequence[str]], int]
    guide: str | None = None
    """Module whose TEXT explains the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"servekit: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return ExitCode.configuration
    except KeyboardInterrupt:
        return ExitCode.interrupted


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        return _help([])
    if words[0] in ("-V", "--version"):
        return _print(f"servekit {version('servekit')}")
    command = _command(words[0])
    return _help(words[:1]) if "--help" in words or "-h" in words else command.run(words[1:])


def _command(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    meant = nearest(name, COMMANDS)
    raise ConfigError("command", name, f"must be one of {', '.join(COMMANDS)}",
                      f"did you mean servekit {meant}?" if meant else "servekit --help explains them")


def _serve(words: Sequence[str]) -> int:
    composed = _compose(ROOTS["serve"](), words)
    from servekit.server.launch import run

    return run(composed)


def _bench(words: Sequence[str]) -> int:
    composed = _compose(ROOTS["bench"](), words)
    from servekit.load.bench import run

    return run(composed)


def _simulate(words: Sequence[str]) -> int:
    composed = _compose(ROOTS["simulate"](), words)
    from servekit.sim.command import run

    return run(composed)


def _tune(words: Sequence[str]) -> int:
    # By name: everything under servekit/ can be used without the tuner, and does not know it.
    return int(import_module("servekit.tuner.command").run(words))


def _verify(words: Sequence[str]) -> int:
    return int(import_module("servekit.tuner.certificate").main(words))


def _plan(words: Sequence[str]) -> int:
    composed = _compose(ROOTS["plan"](), words)
    from servekit.plan.command import render

    return _print(render(composed))


def _doctor(words: Sequence[str]) -> int:
    composed = _compose(ROOTS["serve"](), words)
    from servekit.doctor.command import run
    from servekit.model.source import default_cache_dir

    return run(composed, default_cache_dir(os.environ))


def _config(words: Sequence[str]) -> int:
    formats = [word for word in words if word in FORMATS]
    settings = [word for word in words if word not in FORMATS]
    name = settings.pop(0) if settings and settings[0] in ROOTS else "serve"
    composed = _compose(ROOTS[name](), settings)
    return _print(FORMATS[formats[-1]](composed) if formats else _table(composed))


def _completion(words: Sequence[str]) -> int:
    match words:
        case [shell] if shell in SCRIPTS:
            return _print(SCRIPTS[shell].rstrip())
        case [word, line] if word == CANDIDATES:
            return _print("\n".join(candidates(line, COMMANDS, ROOTS)))
    raise ConfigError("completion", " ".join(words), f"must be one of {', '.join(SCRIPTS)}",
                      'for example eval "$(servekit completion bash)"')


def _help(words: Sequence[str]) -> int:
    style = Style.of_terminal(sys.stdout.isatty())
    if not words or words[0] == "help":
        docs = {name: command.doc for name, command in COMMANDS.items()}
        return _print(overview(docs, [root() for root in ROOTS.values()], style))
    command = _command(words[0])
    if words[0] in ROOTS:
        return _print(command_help(ROOTS[words[0]](), command.usage, command.doc, style))
    guide = "" if command.guide is None else f"\n\n{import_module(command.guide).TEXT}"
    return _print(f"{command.doc}\n\n{style.bold('usage')}: {command.usage}{guide}")


SETTINGS_USAGE = "[FILE.yaml] [key=value | group=option ...]"
COMMANDS: Mapping[str, Command] = {
    "serve": Command(f"servekit serve {SETTINGS_USAGE}",
                     "Start an engine and its OpenAI-compatible server.", _serve),
    "bench": Command(f"servekit bench {SETTINGS_USAGE}",
                     "Load any OpenAI-compatible server and measure what its users see.", _bench),
    "tune": Command("servekit tune FILE.yaml [key=value ...]",
                    "Find the settings that hold an objective at the highest load.",
                    _tune, "servekit.tuner.guide"),
    "verify": Command("servekit verify CERTIFICATE.json",
                      "Compute a tuning's statistics again from its raw logs.", _verify),
    "simulate": Command(f"servekit simulate {SETTINGS_USAGE}",
                        "Run the scheduler on a virtual clock and measure it.", _simulate),
    "plan": Command("servekit plan [FILE.yaml] [key=value ...]",
                    "Say how many GPUs a load needs, and which limit decides it.", _plan),
    "config": Command(f"servekit config [serve|bench|simulate|plan] {SETTINGS_USAGE} [--yaml | --json]",
                      "Print the resolved configuration and where each value came from.", _config),
    "doctor": Command(f"servekit doctor {SETTINGS_USAGE}",
                      "Say what this machine can do, what it lacks and how to get it.",
                      _doctor, "servekit.doctor.guide"),
    "completion": Command(f"servekit completion {'|'.join(SCRIPTS)}",
                          "Print a completion script for a shell.", _completion),
    "help": Command("servekit help [COMMAND]", "Print this, or what a command takes.", _help),
}


def _compose(root: Root[Any], words: Sequence[str]) -> Composed[Any]:
    from servekit.config.compose import compose

    has_file = bool(words) and "=" not in words[0] and not words[0].startswith(("-", "~"))
    file = Path(words[0]) if has_file else None
    overrides = words[1:] if has_file else words
    for word in overrides:
        _check_word(root, word)
    return compose(root, overrides, file, os.environ)


def _check_word(root: Root[Any], word: str) -> None:
    if word.startswith("-"):
        meant = nearest(word.lstrip("-").partition("=")[0].replace("-", "_"), root.keys)
        raise ConfigError("argument", word, "there is no such flag; settings are written key=value",
                          f"did you mean {meant}=VALUE?" if meant else f"servekit {root.name} --help lists all keys")
    if "=" not in word and not word.startswith("~"):
        raise ConfigError("argument", word, "is not of the form key=value",
                          "the YAML file, if there is one, comes first, then key=value")


def _table(composed: Composed[Any]) -> str:
    """One line a key: name, value, origin; what nobody set stands back in a terminal."""
    style = Style.of_terminal(sys.stdout.isatty())
    values = {key: show(value) for key, value in flatten(composed.config).items()}
    key_width = max(map(len, values))
    value_width = max(len(value) for value in values.values() if len(value) <= 40)
    rows = (f"{key:{key_width}}  {value:{value_width}}  {composed.origins[key]}" for key, value in values.items())
    lines = [_emphasise(row, composed.origins[key], style) for key, row in zip(values, rows, strict=True)]
    return "\n".join([*lines, *_dropped(composed), f"# configuration {config_hash(composed.config)}"])


def _emphasise(row: str, origin: Origin, style: Style) -> str:
    if origin.layer is Layer.default:
        return style.dim(row)
    return row if origin.layer is Layer.conf else style.bold(row)


def _dropped(composed: Composed[Any]) -> Iterator[str]:
    for setting in composed.dropped:
        section = setting.key.rpartition(".")[0]
        yield (f"# dropped: {setting.key}={show(setting.value)} ({setting.origin}), an option of the {section} "
               "that a later layer replaced")


def _yaml(composed: Composed[Any]) -> str:
    from servekit.config.compose import to_yaml

    return to_yaml(composed.config).rstrip()


def _json(composed: Composed[Any]) -> str:
    origins = {key: str(origin) for key, origin in composed.origins.items()}
    return json.dumps({"hash": config_hash(composed.config), "config": as_dict(composed.config), "origins": origins},
                      indent=2)


FORMATS: Mapping[str, Callable[[Composed[Any]], str]] = {"--yaml": _yaml, "--json": _json}


def _print(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader, such as head, has seen enough; the interpreter must not fail when it flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.ok
