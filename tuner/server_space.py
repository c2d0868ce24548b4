"""The knobs of a server that is not servekit's own, and how each is written on its command line or in its file.

    knobs:
      max_num_seqs: {values: "choice(16, 64, 256)", flag: "--max-num-seqs {value}"}
      prefix_caching:
        values: choice(true, false)
        flag: {true: --enable-prefix-caching, false: --no-enable-prefix-caching}
      reuse: {values: "choice(64, 256)", flag: "--cache-reuse {value}", when: {prefix_caching: true}}

Every knob can also be left out, and then the server decides; that is where a search starts from. With `most: cores`,
values above the number of this machine's processor cores are left out. A flag without
`{value}` is a switch: it is there for true, and for false it is left out. A knob without a flag goes into the file that
`file: NAME.yaml` or `file: NAME.json` names, whose path takes the place of `{file}` in start_command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from servekit.config.describe import CONF_DIR, nearest
from servekit.config.errors import ConfigError, require, show
from servekit.config.resolve import config_hash
from servekit.tuner.document import read_document
from servekit.tuner.grammar import SEARCH, domain_of, parse_values
from servekit.tuner.launch import FILE_PLACEHOLDER, KnobFile, LaunchConfig, program_of
from servekit.tuner.space import Condition, Knob, Space, Value, Warmth

SPACES = CONF_DIR / "target"
"""Those that come with servekit."""
VALUE = "{value}"
_PLACEHOLDER = re.compile(r"{\w*}")


# --- flags ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Template:
    """A flag that takes the value: `--parallel {value}`."""

    text: str

    def words(self, value: Value) -> list[str]:
        """On the command line."""
        return [word.replace(VALUE, show(value)) for word in shlex.split(self.text)]


@dataclass(frozen=True)
class Switch:
    """A flag that is there for true, and absent for false."""

    text: str

    def words(self, value: Value) -> list[str]:
        """On the command line."""
        return shlex.split(self.text) if value is True else []


@dataclass(frozen=True)
class Alternatives:
    """A flag for each value: `--cont-batching` or `--no-cont-batching`."""

    texts: tuple[tuple[Value, str], ...]

    def words(self, value: Value) -> list[str]:
        """On the command line."""
        return next(shlex.split(text) for own, text in self.texts if own == value and type(own) is type(value))


Flag: TypeAlias = Template | Switch | Alternatives


@dataclass(frozen=True)
class ServerKnob:
    """A knob, and where it goes."""

    knob: Knob
    flag: Flag | None
    """None: into the file."""

    @property
    def left_out(self) -> Value:
        """The value for which the server decides."""
        return False if isinstance(self.flag, Switch) else None


# --- spaces -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ServerSpace:
    """What is searched of a server, and what a point of it looks like on the command line."""

    knobs: tuple[ServerKnob, ...]
    file_name: str | None = None
    """Of the file of knobs; None: all are flags."""

    @property
    def space(self) -> Space:
        """The knobs, starting from where all are left out."""
        return Space(tuple(knob.knob for knob in self.knobs), {knob.knob.key: knob.left_out for knob in self.knobs})

    @property
    def fingerprint(self) -> str:
        """Equal exactly for equal knobs and flags."""
        return config_hash(self)

    def launch(self, command: Sequence[str], overrides: Sequence[str]) -> LaunchConfig:
        """A command with the knobs that some overrides set, as `Space.overrides` writes them."""
        texts = dict(override.split("=", 1) for override in overrides)
        given = {knob.knob.key: value for knob in self.knobs if knob.knob.key in texts
                 and (value := _value_of(knob, texts[knob.knob.key])) != knob.left_out}
        flags = [word for knob in self.knobs if knob.flag is not None and knob.knob.key in given
                 for word in knob.flag.words(given[knob.knob.key])]
        return LaunchConfig((*command, *flags), given, self._file(given))

    def _file(self, given: Mapping[str, Value]) -> KnobFile | None:
        if self.file_name is None:
            return None
        inside: dict[str, Any] = {}
        for knob in self.knobs:
            if knob.flag is None and knob.knob.key in given:
                _put(inside, knob.knob.key.split("."), given[knob.knob.key])
        is_json = self.file_name.endswith(".json")
        text = f"{json.dumps(inside, indent=2)}\n" if is_json else str(yaml.safe_dump(inside, sort_keys=False))
        return KnobFile(self.file_name, text)


def _value_of(knob: ServerKnob, text: str) -> Value:
    values: Sequence[Value] = getattr(knob.knob.domain, "values", ())
    return next(value for value in values if show(value) == text)


def _put(inside: dict[str, Any], path: Sequence[str], value: Value) -> None:
    for part in path[:-1]:
        inside = inside.setdefault(part, {})
    inside[path[-1]] = value


# --- reading one ------------------------------------------------------------------------------------------------------

def read_space(search: object, command: Sequence[str]) -> ServerSpace:
    """The space that `search` names: one of conf/target, a file, knobs themselves, or that of the command's program.

    Raises ConfigError; keys below `search`.
    """
    if isinstance(search, Mapping):
        return _parse(search if "knobs" in search else {"knobs": search}, command)
    path = _find(search, command)
    document = read_document(path)
    try:
        return _parse(document.values, command)
    except ConfigError as error:
        inside = error.key.removeprefix(f"{SEARCH}.")
        place = document.blame(ConfigError(f"knobs.{inside}", error.value, error.limit, error.remedy))
        raise ConfigError(error.key, error.value, place.limit, error.remedy) from None


def _find(search: object, command: Sequence[str]) -> Path:
    known = sorted(file.stem for file in SPACES.glob("*.yaml"))
    name = program_of(command) if search == "default" else str(search)
    if Path(name).suffix:
        return Path(name)
    meant = nearest(name, known)
    require(name in known, SEARCH, search, f"{name} is neither a file of knobs nor one of {', '.join(known)}",
            f"did you mean search={meant}?" if meant else f"write search={known[0]}, a file, or the knobs themselves")
    return SPACES / f"{name}.yaml"


def _parse(values: Mapping[str, Any], command: Sequence[str]) -> ServerSpace:
    for key in values:
        require(key in ("knobs", "file"), f"{SEARCH}.{key}", values[key], "must be one of knobs, file", "leave it out")
    given, file_name = values.get("knobs"), values.get("file")
    require(isinstance(given, Mapping) and len(given) > 0, SEARCH, given, "names no knob",
            'for example search={parallel: {values: "choice(1, 2, 4)", flag: "--parallel {value}"}}')
    assert isinstance(given, Mapping)
    knobs = tuple(_parse_knob(str(name), text, given) for name, text in given.items())
    _check_file(knobs, file_name, command)
    return ServerSpace(knobs, file_name)


def _check_file(knobs: Sequence[ServerKnob], file_name: object, command: Sequence[str]) -> None:
    is_named = any(FILE_PLACEHOLDER in word for word in command)
    require(file_name is None or (isinstance(file_name, str) and file_name.endswith((".yaml", ".yml", ".json"))),
            f"{SEARCH}.file", file_name, "must be the name of a .yaml or .json file", "for example file: knobs.yaml")
    for knob in knobs:
        require(knob.flag is not None or file_name is not None, f"{SEARCH}.{knob.knob.key}", None,
                "has no flag, and there is no file to write it to",
                f'give it a flag such as "--{knob.knob.key} {VALUE}"')
    require(file_name is None or is_named, "start_command", shlex.join(command), f"does not read {file_name}",
            f"write {FILE_PLACEHOLDER} where the path of that file belongs")
    require(file_name is not None or not is_named, "start_command", shlex.join(command),
            f"has {FILE_PLACEHOLDER}, and the search space names no file", "add file: knobs.yaml to the search space")


def _parse_knob(name: str, given: Any, all_given: Mapping[str, Any]) -> ServerKnob:
    path = f"{SEARCH}.{name}"
    require(isinstance(given, Mapping), path, given, "must have values, and a flag unless it goes into a file",
            f'for example {name}: {{values: "choice(1, 2, 4)", flag: "--{name} {VALUE}"}}')
    for key in given:
        require(key in _KNOB_KEYS, f"{path}.{key}", given[key], f"must be one of {', '.join(_KNOB_KEYS)}",
                "leave it out")
    values = _values(path, given)
    flag = _parse_flag(f"{path}.flag", given.get("flag"), values)
    left_out = False if isinstance(flag, Switch) else None
    domain = domain_of(values if left_out in values else (*values, left_out))
    return ServerKnob(Knob(name, domain, _parse_condition(path, given.get("when"), all_given), Warmth.cold), flag)


_KNOB_KEYS = ("values", "most", "flag", "when")


def _values(path: str, given: Mapping[str, Any]) -> tuple[Value, ...]:
    require("values" in given, path, given, "has no values", 'for example values: "choice(1, 2, 4)"')
    values, most = parse_values(f"{path}.values", given["values"]), given.get("most")
    if most is None:
        return values
    require(most == "cores", f"{path}.most", most, "must be cores", "leave out the values that are too high")
    require(all(isinstance(value, int) for value in values), f"{path}.most", most, "is about whole numbers",
            "leave it out")
    cores = len(os.sched_getaffinity(0))
    return tuple(value for value in values if isinstance(value, int) and value <= cores)


def _parse_flag(path: str, given: Any, values: Sequence[Value]) -> Flag | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        wanted = {show(value): value for value in values if value is not None}
        texts = {show(value): str(text) for value, text in given.items()}
        require(texts.keys() == wanted.keys(), path, given, f"must have a flag for each of {', '.join(wanted)}",
                "give each value its flag")
        return Alternatives(tuple((value, _checked(path, texts[name], ())) for name, value in wanted.items()))
    text = _checked(path, str(given), (VALUE,))
    if VALUE in text:
        return Template(text)
    require(set(values) <= {True, False} and all(isinstance(value, bool) for value in values), path, given,
            "does not say where the value goes, and is no switch: its values are not true and false",
            f"write {VALUE} in it")
    return Switch(text)


def _checked(path: str, text: str, allowed: Sequence[str]) -> str:
    unknown = [found for found in _PLACEHOLDER.findall(text) if found not in allowed]
    require(not unknown, path, text, f"has the unknown placeholder {unknown[0] if unknown else ''}",
            f"write {VALUE} for the value" if allowed else "write the flag of this value as it is")
    try:
        shlex.split(text)
    except ValueError as error:
        raise ConfigError(path, text, f"is not a piece of a command line: {str(error).lower()}",
                          "correct its quotes") from None
    return text


def _parse_condition(path: str, given: Any, all_given: Mapping[str, Any]) -> Condition | None:
    if given is None:
        return None
    is_one = isinstance(given, Mapping) and len(given) == 1
    require(is_one, f"{path}.when", given, "must name one knob and the values for which this one matters",
            "for example when: {prefix_caching: true}")
    (other, wanted), = given.items()
    require(other in all_given, f"{path}.when", given, f"there is no knob {other}",
            f"name one of {', '.join(name for name in all_given if f'{SEARCH}.{name}' != path)}")
    values = tuple(wanted) if isinstance(wanted, list) else (wanted,)
    known = parse_values(f"{SEARCH}.{other}.values", all_given[other].get("values"))
    for value in _unknown(values, known):
        raise ConfigError(f"{path}.when", given, f"{other} is never {show(value)}", "name values that it has")
    require("when" not in all_given[other], f"{path}.when", given, f"{other} depends on another knob itself",
            "name the knob that it depends on")
    return Condition(other, values)


def _unknown(values: Sequence[Value], known: Sequence[Value]) -> Iterator[Value]:
    return (value for value in values if not any(value == own and type(value) is type(own) for own in known))
