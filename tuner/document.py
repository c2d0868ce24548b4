"""A YAML file in which every key knows its line, so that an error can name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from servekit.config.errors import ConfigError


@dataclass(frozen=True)
class Document:
    """What a file says, and where."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    """The line, from 1, of every key by its dotted path."""

    def blame(self, error: ConfigError) -> ConfigError:
        """The same error, with the file and the line of its key, or of the innermost section that has one."""
        key = error.key
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        where = f"{self.path}, line {self.lines[key]}" if key else str(self.path)
        return ConfigError(error.key, error.value, f"{error.limit} ({where})", error.remedy)


def read_document(path: Path) -> Document:
    """Read a file that holds a mapping.

    Raises:
        ConfigError: it is missing, is not YAML or no mapping, or has a key twice; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError("file", path, "there is no such file", "give an existing YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("file", path, f"line {line}: {error.problem}", "correct the YAML there") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("file", path, f"cannot be read: {' '.join(str(error).split())}",
                          "give a YAML file of keys and values") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("file", path, "must hold keys and values", "write it as in `slo: {ttft: {p99: 2s}}`")
    lines: dict[str, int] = {}
    for key, line in _lines(root, ""):
        if key in lines:
            raise ConfigError(key, "...", f"is given twice ({path}, lines {lines[key]} and {line})",
                              "leave one of them out")
        lines[key] = line
    return Document(path, _values(path, text), lines)


def _lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, f"{name}.")


def _values(path: Path, text: str) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("file", path, f"cannot be read: {' '.join(str(error).split())}",
                          "give a YAML file of plain values") from None
    assert isinstance(values, Mapping)
    return values
