"""What settings must satisfy: one check for each kind of limit, one sentence for each refusal. None always passes."""

from __future__ import annotations

from enum import Enum
from math import inf

from servekit.config.errors import ConfigError, require


def at_least(key: str, value: float | None, minimum: float, example: object) -> None:
    """Refuse what is below `minimum`, not finite or not a number."""
    if value is not None:
        require(minimum <= value < inf, key, value, f"must be a number of at least {minimum}",
                f"for example {key}={'null' if example is None else example}")


def above_zero(key: str, value: float | None, example: object) -> None:
    """Refuse what is not greater than zero, not finite or not a number."""
    if value is not None:
        require(0 < value < inf, key, value, "must be greater than 0 and finite", f"for example {key}={example}")


def within(key: str, value: float | None, low: float, high: float, example: object) -> None:
    """Refuse what lies outside `low` to `high`."""
    if value is not None:
        require(low <= value <= high, key, value, f"must lie between {low} and {high}", f"for example {key}={example}")


def fixed_kind(group: str, given: Enum, own: Enum) -> None:
    """A component's kind follows from its group choice and cannot be set on its own."""
    if given is not own:
        raise ConfigError(f"scheduler.{group}.kind", given.value, f"these are the options of {own.value}",
                          f"choose the component with scheduler/{group}={given.value}")
