"""Where the values of a composed configuration came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from servekit.config.errors import ConfigError

T = TypeVar("T")


class Layer(IntEnum):
    """Where a value can come from; the later wins."""

    default = 0
    conf = 1
    preset = 2
    site = 3
    environment = 4
    command_line = 5


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    layer: Layer
    """Its rank among the layers."""
    where: str
    """For people: a file, the name of an environment variable, `command line` or `default`."""

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True)
class Setting:
    """A value that a layer gives to a key."""

    key: str
    value: object
    origin: Origin


DEFAULT = Origin(Layer.default, "default")
COMMAND_LINE = Origin(Layer.command_line, "command line")


@dataclass(frozen=True)
class Composed(Generic[T]):
    """A configuration and how it came to be."""

    config: T
    """Frozen and validated."""
    origins: Mapping[str, Origin]
    """For every key of `flatten(config)`, where its value came from."""
    dropped: tuple[Setting, ...] = ()
    """Options of components that a later layer replaced."""


def blame(error: ConfigError, origin: Origin) -> ConfigError:
    """The same error, with where the value was set, if that is not in front of the user."""
    if origin.layer in (Layer.default, Layer.command_line):
        return error
    return ConfigError(error.key, error.value, f"{error.limit} (set by {origin})", error.remedy)
