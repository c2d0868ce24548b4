"""Typed access to the key-value pairs in which a checkpoint describes its model."""

from __future__ import annotations

from collections.abc import Mapping

from servekit.config.errors import ConfigError
from servekit.model.local import ModelFileError


class Fields:
    """Key-value pairs of one file, remembering which keys were asked for.

    A key that is missing without a default, or has a value of another type, is a ModelFileError.
    """

    def __init__(self, values: Mapping[str, object], file: str, prefix: str = "") -> None:
        self._values = values
        self._file = file
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

    def only(self, key: str, *supported: object) -> None:
        """Refuse every value of `key` but the supported ones; a missing key is fine."""
        if self.has(key) and self.get(key) not in supported:
            raise self.refusal(key, f"only {' or '.join(map(str, supported))} can be computed")

    def refusal(self, key: str, limit: str) -> ConfigError:
        """The error for a value that is well-formed but not supported."""
        return ConfigError(f"{self._file}: {self.prefix}{key}", self.get(key), limit,
                           "choose a Llama, Mistral, Qwen2 or Qwen3 model without it")

    def unasked(self) -> list[str]:
        """Keys under the prefix that nobody has asked for."""
        return sorted(key for key in self._values if key.startswith(self.prefix) and key not in self._asked)

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        if value is None:
            return ModelFileError(f"{self._file}: {self.prefix}{key} is missing; it must be {wanted}")
        return ModelFileError(f"{self._file}: {self.prefix}{key}={value!r} must be {wanted}")
