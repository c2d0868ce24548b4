"""Bounds that several settings share. Each raises a ConfigError of one line."""

from __future__ import annotations

import math
from enum import Enum

from servekit.config.errors import ConfigError, require


def at_least(section: str, name: str, value: float | None, minimum: float, default: object) -> None:
    if value is not None:
        require(minimum <= value < math.inf, f"{section}.{name}", value, f"must be a number of at least {minimum}",
                f"the default is {section}.{name}={default if default is not None else 'null'}")


def fraction(section: str, name: str, value: float | None, low: float, high: float) -> None:
    if value is not None:
        require(low <= value <= high, f"{section}.{name}", value, f"must lie between {low} and {high}",
                f"set {section}.{name} to a share such as {min(high, max(low, 0.1))}")


def fixed_kind(group: str, given: Enum, own: Enum) -> None:
    """A component's kind follows from its group choice and cannot be set on its own."""
    if given is not own:
        raise ConfigError(f"scheduler.{group}.kind", given.value, f"these are the options of {own.value}",
                          f"choose the component with scheduler/{group}={given.value}")
