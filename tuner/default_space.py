"""The default search space: every setting of the scheduler and the memory that speed depends on.

It is read from the schema, so that a component or an option that is added there is searched without a change here.
`NOT_SEARCHED` says what is left out, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from servekit.config.describe import Key, accepts, allowed_values
from servekit.config.resolve import flatten
from servekit.config.schema import Config
from servekit.tuner.space import (
    HOT_SECTIONS,
    Domain,
    Knob,
    Ladder,
    Options,
    Reals,
    Space,
    Value,
    base_value,
    engine_settings,
    kinds_of,
    knob_of,
    refusal,
    space_of,
)


@dataclass(frozen=True)
class Facts:
    """What the device and the model allow."""

    cores: int
    """Processor cores that the engine may use."""
    is_gpu: bool
    max_model_len: int
    """Longest prompt plus output, in tokens."""


NOT_SEARCHED: Mapping[str, str] = {
    "*_timeout_s": "when a request is given up is the owner's decision",
    "*.on_timeout": "what becomes of a request given up is the owner's decision",
    "*.max_queue_*": "how many may wait before others are refused is the owner's decision",
    "scheduler.tenants.*": "who the tenants are and what each may use is the owner's decision",
    "scheduler.policy.prompt_weight": "what a tenant is charged is the owner's decision",
    "scheduler.policy.output_weight": "what a tenant is charged is the owner's decision",
    "scheduler.policy.charge_cached": "what a tenant is charged is the owner's decision",
    "scheduler.prefix_cache.namespace": "who may share what is cached is the owner's decision",
    "memory.memory_fraction": "how much memory may be used is the owner's decision",
    "memory.headroom": "a margin for safety is not to be searched away",
    "memory.num_kv_blocks": "the planner fills the memory that may be used",
    "memory.kv_dtype": "it changes what the model answers",
}
"""Settings, as patterns, that the default space leaves as they are. A space of one's own may name them."""

NOT_OFFERED: Mapping[str, str] = {"oracle": "no engine knows the length of an answer before its end"}
"""Values, by name, that the default space leaves out, and why: they are for studies."""

_LADDERS: Mapping[str, tuple[int, int]] = {
    "scheduler.max_num_seqs": (4, 1024),
    "scheduler.max_step_tokens": (64, 8192),
    "scheduler.prefill.chunk_tokens": (32, 2048),
    "memory.block_size_tokens": (8, 64),
}
"""Ends of the powers of two over which the settings with a known useful range are searched."""
_STEPS_AROUND = 3
"""Doublings and halvings of a setting whose useful range is not known."""


def default_space(base: Config, facts: Facts) -> Space:
    """Every setting of the scheduler and the memory that the schema has and speed depends on, around `base`."""
    knobs = [knob for key in engine_settings().keys.values() if (knob := _default_knob(key, base, facts)) is not None]
    if not facts.is_gpu and facts.cores > 1:
        knobs.append(knob_of(engine_settings().keys["engine.threads"], _thread_counts(facts.cores)))
    return space_of(knobs, base)


def not_searched(base: Config) -> dict[str, str]:
    """The settings of the searched sections that the default space leaves as they are, each with the reason."""
    return {key: reason for key in flatten(base) if _is_in_a_hot_section(key) and (reason := _reason_against(key))}


def _is_in_a_hot_section(key: str) -> bool:
    return key.partition(".")[0] in HOT_SECTIONS


def _reason_against(key: str) -> str | None:
    return next((reason for pattern, reason in NOT_SEARCHED.items() if fnmatchcase(key, pattern)), None)


def _default_knob(key: Key, base: Config, facts: Facts) -> Knob | None:
    if not _is_in_a_hot_section(key.name) or _reason_against(key.name):
        return None
    domain = _default_domain(key, base_value(key, base), facts)
    return None if domain is None else knob_of(key, domain)


def _default_domain(key: Key, value: Value, facts: Facts) -> Domain | None:
    """None for what has no scale to be searched on: text, lists, mappings, numbers that are derived."""
    if kinds := kinds_of(key):
        return Options(kinds)
    if alternatives := [word for word in allowed_values(key.annotation) if word != "null" and word not in NOT_OFFERED]:
        return Options(tuple(_read_word(word) for word in alternatives)).including(value)
    if accepts(key.annotation, int) and (ladder := _integer_ladder(key, value, facts)):
        return ladder.including(value)
    if accepts(key.annotation, float) and isinstance(value, float) and value > 0:
        return _reals_around(key, value)
    return None


def _read_word(word: str) -> Value:
    return {"true": True, "false": False}.get(word, word)


def _integer_ladder(key: Key, value: Value, facts: Facts) -> Ladder | None:
    if key.name in _LADDERS:
        low, high = _LADDERS[key.name]
        if key.last_part == "chunk_tokens":
            high = max(low, min(high, facts.max_model_len))
        steps = powers_of_two(low, high)
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        steps = _steps_around(value)
    else:
        return None
    return Ladder(tuple(step for step in steps if refusal(key, step) is None))


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Those between two numbers, both included."""
    return tuple(1 << exponent for exponent in range(high.bit_length()) if low <= 1 << exponent <= high)


def _steps_around(value: int) -> tuple[int, ...]:
    below = (value >> step for step in range(_STEPS_AROUND, 0, -1) if value >> step)
    return tuple(dict.fromkeys((*below, *(value << step for step in range(_STEPS_AROUND + 1)))))


def _reals_around(key: Key, value: float) -> Reals:
    factors = [2.0 ** step for step in range(-_STEPS_AROUND, _STEPS_AROUND + 1)]
    allowed = [value * factor for factor in factors if refusal(key, value * factor) is None]
    return Reals(min(allowed), max(allowed), is_log=True)


def _thread_counts(cores: int) -> Ladder:
    """null takes all cores."""
    return Ladder((*(count for count in powers_of_two(1, cores) if count < cores), None))
