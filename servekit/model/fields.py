"""Typed access to the key-value pairs in which a checkpoint describes its model."""

from __future__ import annotations

from collections.abc import Mapping

from servekit.config.errors import ConfigError, show
from servekit.model.local import ModelFileError

_REMEDY = "choose a Llama, Mistral, Qwen2 or Qwen3 model without it"


class Fields:
    """Key-value pairs of one file, remembering which keys were asked for.

    A key that is missing without a default, or has a value of another type, is a ModelFileError.
    """

    def __init__(self, values: Mapping[str, object], file: str, prefix: str = "", remedy: str = _REMEDY) -> None:
        self._values = values
        self._remedy = remedy
        self.file = file
        self.prefix = prefix
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there, even as null."""
        return self.prefix + key in self._values

    def get(self, key: str) -> object:
        """The value, or None."""
        self._asked.add(self.prefix + key)
        return self._values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; null counts as missing."""
        value = self.get(key) if self.get(key) is not None else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; null counts as missing."""
        value = self.get(key) if self.get(key) is not None else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false; null counts as missing."""
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, or of lists of them; null and a missing key stand for an empty one."""
        value = self.get(key)
        parts = [part for item in ([] if value is None else value if isinstance(value, list) else [None])
                 for part in (item if isinstance(item, list) else [item])]
        if not all(isinstance(part, str) for part in parts):
            raise self._wrong(key, value, "a list of names")
        return tuple(map(str, parts))

    def section(self, key: str, remedy: str | None = None) -> Fields | None:
        """The key-value pairs that a key holds; None for null and a missing key. `remedy` is for its refusals."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.file}{self._separator}{self.prefix}{key}", remedy=remedy or self._remedy)

    def only(self, key: str, *supported: object) -> None:
        """Refuse every value of `key` but the supported ones; a missing key is fine."""
        if self.has(key) and self.get(key) not in supported:
            raise self.refusal(key, f"only {' or '.join(map(show, supported))} can be computed")

    def refusal(self, key: str, limit: str) -> ConfigError:
        """The error for a value that is well-formed but not supported."""
        return ConfigError(f"{self.file}{self._separator}{self.prefix}{key}", self.get(key), limit, self._remedy)

    def refuse_unasked(self) -> None:
        """Refuse a key that nobody has asked for."""
        for key in self.unasked():
            raise self.refusal(key, "this key is not known")

    def unasked(self) -> list[str]:
        """Keys under the prefix that nobody has asked for."""
        return sorted(key for key in self._values if key.startswith(self.prefix) and key not in self._asked)

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        if value is None:
            return ModelFileError(f"{self.file}{self._separator}{self.prefix}{key} is missing; it must be {wanted}")
        return ModelFileError(f"{self.file}{self._separator}{self.prefix}{key}={value!r} must be {wanted}")

    @property
    def _separator(self) -> str:
        """Between a file and its keys, and between a section and its own."""
        return "." if ": " in self.file else ": "
