"""The one error a wrong setting raises."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be honoured: one line with the key, the value, the limit and the remedy.

    Raised while a configuration is composed, resolved or fitted to the model and the device.
    The command line prints it as it is and exits with status 2.
    """

    def __init__(self, key: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(key, value, limit, remedy)
        self.key = key
        self.value = value
        self.limit = limit
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.key}={show(self.value)}: {self.limit}; {self.remedy}"


def require(condition: bool, key: str, value: object, limit: str, remedy: str) -> None:
    """Raise `ConfigError` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, value, limit, remedy)


def show(value: object) -> str:
    """A value as a person would write it in an override: `null`, `true`, plain text, `[1, 2]`, `{a: 1}`."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(name)}: {show(part)}' for name, part in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
