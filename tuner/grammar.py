"""A search space of one's own, in Hydra's override grammar.

    scheduler.policy: choice(fifo, sjf)
    scheduler.max_num_seqs: range(16, 129, 16)
    scheduler.prefill.chunk_tokens: tag(log, interval(32, 1024))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep
from hydra.errors import HydraException

from servekit.config.describe import COMPONENT_KIND, Key, accepts, allowed_values, components, nearest, type_words
from servekit.config.errors import ConfigError, require, show
from servekit.config.schema import Config
from servekit.tuner.default_space import Breadth, Facts, default_space
from servekit.tuner.space import (
    Domain,
    Integers,
    Knob,
    Ladder,
    Options,
    Reals,
    Space,
    Value,
    engine_settings,
    has_alternatives,
    kinds_of,
    knob_of,
    null_last,
    refusal,
    space_of,
    words,
)

SEARCH = "search"
LOG_TAG = "log"


def parse_space(value: object, base: Config, facts: Facts) -> Space:
    """The space that `search` in a tuning file describes: `default`, `all`, or knobs in Hydra's override grammar.

    Raises:
        ConfigError: an unknown key, a value that the key does not take, or nothing to search; keys below `search`.
    """
    if value in [breadth.value for breadth in Breadth]:
        return default_space(base, facts, Breadth(value))
    remedy = f"write {SEARCH}=default, {SEARCH}=all, or knobs such as scheduler.max_num_seqs: choice(32, 64, 128)"
    require(isinstance(value, Mapping) and len(value) > 0, SEARCH, value, "names no knob", remedy)
    assert isinstance(value, Mapping)
    knobs: dict[str, Knob] = {}
    for name, text in value.items():
        knob = _parse_knob(str(name), text)
        require(knob.key not in knobs, f"{SEARCH}.{name}", text, f"{knob.key} is given twice", "leave one of them out")
        knobs[knob.key] = knob
    space = space_of(knobs.values(), base)
    for key, knob in knobs.items():
        require(key in space.start, f"{SEARCH}.{key}", words(knob.domain),
                f"never matters: the base configuration has none of {_kinds(knob)}",
                f"search {knob.condition.key if knob.condition else key} as well, or leave it out")
    return space


def _kinds(knob: Knob) -> str:
    return ", ".join(map(show, knob.condition.kinds)) if knob.condition else ""


def _parse_knob(name: str, text: object) -> Knob:
    path = f"{SEARCH}.{name}"
    key = _known_key(path, name, text)
    domain = _parse_domain(path, key, str(text))
    require(has_alternatives(domain), path, text, "leaves nothing to search", f"set {key.name} in the base "
            "configuration instead, or give several values")
    return knob_of(key, domain)


def _known_key(path: str, name: str, text: object) -> Key:
    root = engine_settings()
    dotted = name.replace("/", ".")
    if dotted in root.sections and components(root.sections[dotted]):
        dotted = f"{dotted}.{COMPONENT_KIND}"
    require(dotted in root.keys or dotted not in root.groups, path, text, "does not belong to a component of the "
            "scheduler", f"choose {name} in the base configuration")
    if dotted not in root.keys:
        meant = nearest(name, [*root.keys, *root.groups])
        raise ConfigError(path, text, "there is no such setting",
                          f"did you mean {meant}?" if meant else "servekit serve --help lists all settings")
    return root.keys[dotted]


def _parse_domain(path: str, key: Key, text: str) -> Domain:
    match _parse_sweep(path, text):
        case ChoiceSweep() as sweep:
            return _choice(path, key, sweep.list)
        case RangeSweep() as sweep:
            return _choice(path, key, list(sweep.range()))
        case sweep:
            return _interval(path, key, text, sweep)


def parse_values(path: str, text: object) -> tuple[Value, ...]:
    """The values that a choice(...) or a range(...) names, in order, for a knob that no schema describes.

    Raises ConfigError at `path`: an interval, one value alone, or one given twice.
    """
    match _parse_sweep(path, str(text)):
        case ChoiceSweep() as sweep:
            values = _plain_values(sweep.list)
        case RangeSweep() as sweep:
            values = _plain_values(sweep.range())
        case _:
            raise ConfigError(path, text, "is an interval, in which a knob that is left out has no place",
                              "give several values: choice(...) or range(...)")
    _require_different(path, values)
    return values


def _parse_sweep(path: str, text: str) -> ChoiceSweep | RangeSweep | IntervalSweep:
    try:
        sweep = OverridesParser.create().parse_override(f"knob={text}").value()
    except HydraException as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(path, text, f"is not in Hydra's override grammar: {reason}",
                          "for example choice(32, 64), or 32,64,null with a null") from None
    tags = sorted(sweep.tags) if isinstance(sweep, ChoiceSweep | RangeSweep | IntervalSweep) else ()
    allowed_tags = {LOG_TAG} if isinstance(sweep, IntervalSweep) else set()
    require(set(tags) <= allowed_tags, path, text, f"the tag {', '.join(tags)} says nothing here",
            f"only tag({LOG_TAG}, interval(low, high)) means something")
    match sweep:
        case ChoiceSweep(shuffle=True) | RangeSweep(shuffle=True):
            raise ConfigError(path, text, "the order of a search is the sampler's", "leave out shuffle(...)")
        case ChoiceSweep() | RangeSweep() | IntervalSweep():
            return sweep
        case _:
            raise ConfigError(path, text, "is one value, or a pattern", "give several: choice(...), range(...) or "
                              "interval(...)")


def _choice(path: str, key: Key, given: Iterable[Any]) -> Domain:
    values = _plain_values(given)
    for value in values:
        _check_value(path, key, value)
    _require_different(path, values)
    return domain_of(values)


def domain_of(values: Sequence[Value]) -> Domain:
    """Numbers have an order, null included; anything else has none."""
    if all(value is None or _is_number(value) for value in values):
        return Ladder(tuple(sorted(values, key=null_last)))
    return Options(tuple(values))


def _plain_values(given: Iterable[Any]) -> tuple[Value, ...]:
    return tuple(getattr(value, "text", value) for value in given)


def _require_different(path: str, values: tuple[Value, ...]) -> None:
    repeated = next((value for i, value in enumerate(values) if Options(values[:i]).contains(value)), None)
    require(repeated is None, path, ", ".join(map(show, values)), f"names {show(repeated)} twice", "leave one out")


def _interval(path: str, key: Key, text: str, sweep: IntervalSweep) -> Domain:
    low, high, is_log = sweep.start, sweep.end, LOG_TAG in sweep.tags
    assert low is not None and high is not None
    require(low <= high, path, text, "ends before it begins", f"write interval({high:g}, {low:g})")
    require(low > 0 or not is_log, path, text, "a log scale has no zero", "begin above 0, or leave out tag(log, ...)")
    for end in (low, high):
        _check_bounds(path, key, end)
    if accepts(key.annotation, int):
        require(low == int(low) and high == int(high), path, text, f"{key.name} takes whole numbers",
                "give whole ends")
        return Integers(int(low), int(high), is_log)
    require(accepts(key.annotation, float), path, text, f"{key.name} takes {type_words(key.annotation)}",
            "give a choice(...)")
    return Reals(low, high, is_log)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_value(path: str, key: Key, value: object) -> None:
    if kinds := kinds_of(key):
        require(value in kinds, path, value, f"{key.name} takes one of {', '.join(kinds)}", "correct that value")
        return
    require(not isinstance(value, list | dict), path, value, "a list cannot be searched by its name",
            f"set {key.name} in the base configuration, or leave it to {SEARCH}=default")
    is_word = show(value) in allowed_values(key.annotation)
    is_whole = isinstance(value, int) and accepts(key.annotation, float)
    require(is_word or is_whole or accepts(key.annotation, type(value)), path, value,
            f"{key.name} takes {type_words(key.annotation)}", "correct that value")
    if not is_word:
        _check_bounds(path, key, value)


def _check_bounds(path: str, key: Key, value: Any) -> None:
    if (error := refusal(key, value)) is not None:
        raise ConfigError(path, value, error.limit, error.remedy)

