"""tuned.yaml: what won, as a plain layer that `servekit serve tuned.yaml` takes on any machine.

It names the groups that were chosen (the preset, the model, the scheduler's components) and then only the settings in
which the winner differs from what these say. Composing it gives the same configuration hash everywhere.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from servekit.config.compose import compose_serve
from servekit.config.describe import COMPONENT_KIND, components
from servekit.config.errors import ConfigError
from servekit.config.resolve import as_dict, config_hash, flatten
from servekit.config.schema import Config
from servekit.tuner.judgement import FinalistFinding, Judgement
from servekit.tuner.space import engine_settings

_WIDTH = 100


@dataclass(frozen=True)
class TunedFor:
    """What the settings were tuned for, as people would say it, one line each."""

    slo: str
    """`ttft.p99 <= 2s, tpot.p99 <= 150ms`."""
    workload: str
    model: str
    device: str
    date: str
    results: Sequence[str] = ()
    """What was confirmed: rates and bounds."""


def tuned_yaml(config: Config, base_overrides: Sequence[str], tuned_for: TunedFor) -> str:
    """The text of tuned.yaml for a configuration that was found from a base that these overrides compose.

    Raises ValueError if no layer gives this configuration: the base came from somewhere else.
    """
    layer = layer_of(config, base_overrides)
    said = [*comments("Settings found by servekit tune. Serve them with: servekit serve tuned.yaml", tuned_for,
                      config_hash(config)), *_source_comment(config)]
    text = "\n".join([*said, "", str(yaml.safe_dump(layer, sort_keys=False))])
    if (found := hash_of_layer(text)) != config_hash(config):
        raise ValueError(f"tuned.yaml composes to {found}, and the configuration is {config_hash(config)}")
    return text


def hash_of_layer(text: str) -> str:
    """The hash of the configuration that the text of a site file composes to. Raises ConfigError."""
    return config_hash(_composed(text))


def _composed(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.yaml"
        path.write_text(text, encoding="utf-8")
        return compose_serve(file=path).config


# --- the settings -----------------------------------------------------------------------------------------------------

def layer_of(config: Config, base_overrides: Sequence[str]) -> dict[str, Any]:
    """Few settings, nested as in a site file, that compose to this configuration.

    Groups come first and the rest is laid over them; groups that contradict each other without that rest cannot be
    composed, and then fewer of them are named, at last none.
    """
    groups = _groups_of(base_overrides)
    for start in (groups, {**groups, **_components_of(config)}, _components_of(config)):
        with suppress(ConfigError):
            return _layer_over(start, config)
    return as_dict(config)


def _layer_over(groups: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """These groups, those of the components that they do not choose, and what still differs."""
    start, wanted = _values(groups), flatten(config)
    layer = {**groups, **{name: kind for name, kind in _components_of(config).items()
                          if start[f"{name.replace('/', '.')}.{COMPONENT_KIND}"] != kind}}
    if start[_SOURCE] != wanted[_SOURCE]:
        layer["model"] = {"source": wanted[_SOURCE]}
    for key, value in _differing(wanted, _values(layer)):
        _put(layer, key, value)
    return layer


_SOURCE = "model.source"


def _groups_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The groups that overrides choose, by their names: `preset`, `model`, `scheduler/policy`."""
    names = {group.name for group in engine_settings().groups.values()}
    given = (text.lstrip("+").partition("=") for text in overrides)
    return {name: yaml.safe_load(option) for key, _, option in given if (name := key.replace(".", "/")) in names}


def _components_of(config: Config) -> dict[str, Any]:
    """The groups that choose this configuration's components, by their names; each file is named as its kind."""
    settings, values = engine_settings(), flatten(config)
    return {settings.groups[key].name: values[f"{key}.{COMPONENT_KIND}"] for key, section in settings.sections.items()
            if key in settings.groups and components(section)}


def _values(layer: Mapping[str, Any]) -> dict[str, object]:
    return flatten(_composed(yaml.safe_dump(dict(layer))))


def _differing(wanted: Mapping[str, object], have: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return ((key, value) for key, value in wanted.items() if key not in have or have[key] != value)


def _put(layer: dict[str, Any], key: str, value: object) -> None:
    """Set a key, nested; dotted where its section is a choice already, as in `model: smollm2-135m`."""
    first, *path = key.split(".")
    if not isinstance(layer.get(first, {}), dict):
        layer[key] = value
        return
    inside = layer.setdefault(first, {})
    for part in path[:-1]:
        inside = inside.setdefault(part, {})
    inside[path[-1]] = value


# --- what is said of them ---------------------------------------------------------------------------------------------

def comments(title: str, tuned_for: TunedFor, found_hash: str) -> Iterator[str]:
    """What was tuned for what, as the comments of a file that gives the configuration with this hash."""
    said = {"objective": tuned_for.slo, "workload": tuned_for.workload, "model": tuned_for.model,
            "device": tuned_for.device, "date": tuned_for.date, "configuration": found_hash}
    yield f"# {title}"
    for name, text in said.items():
        yield from _wrapped(f"{name}: {text}")
    for result in tuned_for.results:
        yield from _wrapped(result)


def _source_comment(config: Config) -> Iterator[str]:
    if Path(config.model.source).is_absolute():
        yield from _wrapped("model.source is a file of the machine that was tuned; the hash above is that of the "
                            "configuration with this very path")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent="# ", subsequent_indent="#   ")


def results_of(judgement: Judgement) -> list[str]:
    """What was confirmed of the winner, in lines: its rate, its promises with their bounds, the default beside it."""
    if judgement.winner is None:
        return ["confirmed: no configuration held the objective"]
    winner = judgement.find(judgement.winner)
    return [f"confirmed: {winner.confirmed_per_s:.3g} requests per second",
            *_promise_lines(winner), *_ratio_lines(judgement)]


def _promise_lines(winner: FinalistFinding) -> Iterator[str]:
    found = winner.at(winner.confirmed_per_s or 0.0)
    assert found is not None
    for promise in found.promises:
        yield (f"{promise.promise}: {promise.num_missed} of {promise.num_requests} requests missed it, "
               f"{promise.num_allowed} may; the true share lies between {promise.share_low:.2%} and "
               f"{promise.share_high:.2%} at 95 % confidence")


def _ratio_lines(judgement: Judgement) -> Iterator[str]:
    default, ratio = judgement.default, judgement.ratio
    if default is None or ratio is None:
        return
    if default.confirmed_per_s is None:
        bound = "" if ratio.low is None else (f"; the lowest is {default.failed_per_s:.3g} requests per second, so the "
                                              f"confirmed rate is more than {ratio.low:.2f} times its own")
        yield f"the default held at no rate that was tried{bound}"
    else:
        low = "an unknown factor" if ratio.low is None else f"{ratio.low:.2f}"
        high = "no known factor" if ratio.high is None else f"{ratio.high:.2f}"
        yield (f"the default was confirmed at {default.confirmed_per_s:.3g} requests per second: {ratio.value:.2f} "
               f"times as many, at least {low}, at most {high}")
