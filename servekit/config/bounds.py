"""What numbers must satisfy: one check for each kind of limit, one sentence for each refusal. None always passes."""

from __future__ import annotations

from math import inf

from servekit.config.errors import require


def at_least(key: str, value: float | None, minimum: float, example: object) -> None:
    """Refuse what is below `minimum`, not finite or not a number."""
    if value is not None:
        require(minimum <= value < inf, key, value, f"must be at least {minimum} and finite",
                f"for example {key}={example}")


def above_zero(key: str, value: float | None, example: object) -> None:
    """Refuse what is not greater than zero, not finite or not a number."""
    if value is not None:
        require(0 < value < inf, key, value, "must be greater than 0 and finite", f"for example {key}={example}")


def within(key: str, value: float | None, low: float, high: float, example: object) -> None:
    """Refuse what lies outside `low` to `high`."""
    if value is not None:
        require(low <= value <= high, key, value, f"must lie between {low} and {high}", f"for example {key}={example}")
