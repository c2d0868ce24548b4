"""The search space: which settings are varied, over what, and when they matter. A knob is one such setting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import TypeAlias

from servekit.config.describe import COMPONENT_KIND, Key, Root, components, field_types
from servekit.config.errors import ConfigError, show
from servekit.config.resolve import flatten
from servekit.config.roots import serve_root
from servekit.config.schema import Config
from servekit.tuner.launch import Configuration, LaunchConfig

Value: TypeAlias = bool | int | float | str | None
"""A list stands as the text that an override has for it."""


@cache
def engine_settings() -> Root[Config]:
    """Every setting that an engine has. Reading them takes a moment, so it is done once."""
    return serve_root()


# --- what a knob ranges over ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Alternatives without an order."""

    values: tuple[Value, ...]

    def contains(self, value: Value) -> bool:
        """Whether the value is one of them."""
        return any(value == own and type(value) is type(own) for own in self.values)

    def including(self, value: Value) -> Options:
        """The same with one value more."""
        return self if self.contains(value) else Options((*self.values, value))


@dataclass(frozen=True)
class Ladder:
    """Values in ascending order; null, which means no limit, is the last. Steps may be uneven, as in powers of two."""

    values: tuple[Value, ...]

    def contains(self, value: Value) -> bool:
        """Whether the value is one of its steps."""
        return value in self.values

    def including(self, value: Value) -> Ladder:
        """The same with one step more."""
        return self if self.contains(value) else Ladder(tuple(sorted((*self.values, value), key=null_last)))


@dataclass(frozen=True)
class Integers:
    """Every whole number between two, both included."""

    low: int
    high: int
    is_log: bool = False
    """Whether equal factors count as equal distances."""

    def contains(self, value: Value) -> bool:
        """Whether the value lies between the ends."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def including(self, value: Value) -> Integers:
        """The same, extended to a value."""
        assert isinstance(value, int)
        return replace(self, low=min(self.low, value), high=max(self.high, value))


@dataclass(frozen=True)
class Reals:
    """Every number between two, both included."""

    low: float
    high: float
    is_log: bool = False
    """Whether equal factors count as equal distances."""

    def contains(self, value: Value) -> bool:
        """Whether the value lies between the ends."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def including(self, value: Value) -> Reals:
        """The same, extended to a value."""
        assert isinstance(value, int | float)
        return replace(self, low=min(self.low, value), high=max(self.high, value))


Domain: TypeAlias = Options | Ladder | Integers | Reals


def null_last(value: Value) -> tuple[bool, float]:
    """The order of a ladder."""
    assert value is None or isinstance(value, int | float)
    return (value is None, 0.0 if value is None else value)


def words(domain: Domain) -> str:
    """A domain as a person would say it."""
    match domain:
        case Options(values) | Ladder(values):
            return ", ".join(map(show, values))
        case Integers(low, high, is_log) | Reals(low, high, is_log):
            return f"{low:g} to {high:g}{' on a log scale' if is_log else ''}"


def has_alternatives(domain: Domain) -> bool:
    """Whether there is anything to choose."""
    match domain:
        case Options(values) | Ladder(values):
            return len(values) > 1
        case Integers(low, high) | Reals(low, high):
            return low < high


# --- knobs and spaces -------------------------------------------------------------------------------------------------

class Warmth(Enum):
    """What it takes to change a knob."""

    hot = "hot"
    """A live engine takes the new value once it is idle and its caches are reset."""
    cold = "cold"
    """A fresh process."""


@dataclass(frozen=True)
class Condition:
    """A knob matters only while another has one of these values, as a component's options do under its kind."""

    key: str
    kinds: tuple[Value, ...]


@dataclass(frozen=True)
class Knob:
    """One setting that is varied."""

    key: str
    """Dotted name in the configuration; of the choice of a component, that of its `kind`."""
    domain: Domain
    condition: Condition | None = None
    """None: it always matters."""
    warmth: Warmth = Warmth.hot

    def is_active(self, values: Mapping[str, Value]) -> bool:
        """Whether it matters under these values of the other knobs."""
        return self.condition is None or values[self.condition.key] in self.condition.kinds


@dataclass(frozen=True)
class Space:
    """Knobs, and where they start from. A point is a value for each knob, by its key."""

    knobs: tuple[Knob, ...]
    start: Mapping[str, Value] = field(default_factory=dict)
    """The point of the base configuration."""
    left_out: tuple[str, ...] = ()
    """Settings that might be knobs and are not, since they decide less than those that are."""

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that two spaces share exactly when their knobs are equal; nothing else counts."""
        text = json.dumps([repr(knob) for knob in self.knobs])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def active(self, point: Mapping[str, Value]) -> dict[str, Value]:
        """The values that matter: points that differ in others only are the same configuration."""
        return {knob.key: point[knob.key] for knob in self.knobs if knob.is_active(point)}

    def overrides(self, point: Mapping[str, Value]) -> list[str]:
        """What composes the point on top of the base configuration, as on the command line."""
        return [f"{_override_key(key, value)}={show(value)}" for key, value in self.active(point).items()]

    def locate(self, config: Configuration) -> dict[str, Value]:
        """The point of a configuration: its own values of the knobs that it has, `start` for the others.

        Raises:
            ConfigError: one of its values is outside the space.
        """
        values = config.knobs if isinstance(config, LaunchConfig) else flatten(config)
        point = {knob.key: _plain(values.get(knob.key, self.start.get(knob.key))) for knob in self.knobs}
        for knob in self.knobs:
            if knob.is_active(point) and not knob.domain.contains(point[knob.key]):
                raise ConfigError(knob.key, point[knob.key], f"is outside the search space: {words(knob.domain)}",
                                  f"add it to search.{knob.key}")
        return point


def _override_key(key: str, value: Value) -> str:
    """A component is chosen by its file, which may set more than its kind, where there is one of that name."""
    section = key.removesuffix(f".{COMPONENT_KIND}")
    group = engine_settings().groups.get(section)
    return group.name if group and section != key and value in group.option_names else key


def _plain(value: object) -> Value:
    if isinstance(value, list | tuple):
        return show(value)
    assert value is None or isinstance(value, bool | int | float | str)
    return value


# --- from the schema to knobs -----------------------------------------------------------------------------------------

HOT_SECTIONS = ("scheduler", "memory")
"""What a live engine can change: the scheduler, its limits, and the pool of KV blocks."""
_HOT_KEYS = ("engine.graph_batch_sizes",)
"""The same: graphs are captured again for every new pool. The rest needs a process."""


def knob_of(key: Key, domain: Domain) -> Knob:
    """The knob that varies a setting."""
    condition = Condition(f"{key.section}.{COMPONENT_KIND}", key.kinds) if key.kinds and not kinds_of(key) else None
    is_hot = key.name.partition(".")[0] in HOT_SECTIONS or key.name in _HOT_KEYS
    return Knob(key.name, domain, condition, Warmth.hot if is_hot else Warmth.cold)


def kinds_of(key: Key) -> tuple[str, ...]:
    """The components that a setting chooses between; none if it is not such a choice."""
    return tuple(components(engine_settings().sections[key.section])) if key.last_part == COMPONENT_KIND else ()


def base_value(key: Key, base: Config) -> Value:
    """What a configuration gives to a setting; where it has another component, the default. null for a mapping."""
    default = key.default.name if isinstance(key.default, Enum) else key.default
    value = flatten(base).get(key.name, default)
    return _plain(value) if isinstance(value, bool | int | float | str | list | tuple) else None


def refusal(key: Key, value: Value) -> ConfigError | None:
    """What the schema has against a value of an option, by itself. It keeps bounds as checks, so it is asked.

    A section that has others inside also checks how its values go together, which is not to be asked here.
    """
    section = engine_settings().sections[key.section]
    variants = components(section)
    owners = [variants[kind] for kind in key.kinds] if variants else [section]
    for owner in owners:
        if _can_be_made_of_defaults(owner):
            try:
                owner(**{key.last_part: value})
            except ConfigError as error:
                return error
    return None


def _can_be_made_of_defaults(section: type) -> bool:
    return all((f.default is not MISSING or f.default_factory is not MISSING) and not is_dataclass(annotation)
               for f, annotation in zip(fields(section), field_types(section).values(), strict=True))


def space_of(knobs: Iterable[Knob], base: Config) -> Space:
    """The space of the knobs that have alternatives and can matter: not those whose component is never chosen."""
    keys = engine_settings().keys
    varied = {knob.key: knob for knob in knobs if has_alternatives(knob.domain)}
    start = {key: base_value(keys[key], base) for key in varied}
    values = flatten(base)
    kept = []
    for knob in varied.values():
        condition = knob.condition
        if condition is None or condition.key in varied:
            kept.append(knob)
        elif values[condition.key] in condition.kinds:
            kept.append(replace(knob, condition=None))
    return Space(tuple(kept), {knob.key: start[knob.key] for knob in kept})

