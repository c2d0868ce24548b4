"""Pure functions of a composed configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def flatten(config: object) -> dict[str, object]:
    """Every value of a configuration by its dotted key, in the order of the schema.

    Values are plain (numbers, text, booleans, None, lists and mappings of these); Enum members are their names.
    """
    return dict(_flatten(config, ""))


def as_dict(config: object) -> dict[str, Any]:
    """The same values as `flatten`, nested as in a YAML file."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def config_hash(config: object) -> str:
    """Twelve hex digits that two configurations share exactly when all their values are equal."""
    text = json.dumps(flatten(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _flatten(config: Any, prefix: str) -> Iterator[tuple[str, object]]:
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from _flatten(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, _plain(value)


def _plain(value: Any) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
