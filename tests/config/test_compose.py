"""Composition: layers, groups, provenance, and what a wrong setting is told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from servekit.config.bench import AzureWorkloadConfig, TraceArrivalConfig
from servekit.config.compose import compose, compose_bench, compose_serve, to_yaml
from servekit.config.describe import COMPONENT_KIND, PRESET, Choice, Key, Required, Root, is_tuple, mapping_types
from servekit.config.errors import ConfigError, show
from servekit.config.origin import Composed, Layer
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig
from servekit.config.resolve import as_dict, flatten
from servekit.config.roots import bench_root, serve_root
from servekit.config.schema import Config, ModelConfig, Quantization

DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def serve(*overrides: str, file: Path | None = None, environ: dict[str, str] | None = None) -> Composed[Config]:
    return compose_serve(overrides, file, environ)


def value_and_origin(composed: Composed[Any], key: str) -> tuple[object, str]:
    return flatten(composed.config)[key], str(composed.origins[key])


@pytest.fixture
def site(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "site.yaml"
        path.write_text(text)
        return path
    return write


# --- values ----------------------------------------------------------------------------------------------------------

def test_the_defaults_are_those_of_the_schema() -> None:
    config = serve().config
    assert type(config) is Config
    model = dataclasses.replace(config.model, source="x", name=None, sha256=None, cpu_quantization=Quantization.auto)
    assert dataclasses.replace(config, model=model) == Config(model=ModelConfig("x"))
    assert config.model.sha256 == DEFAULT_SHA256


def test_instances_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        serve().config.scheduler.max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize(("override", "key", "expected"), [
    ("scheduler.max_num_seqs=64", "scheduler.max_num_seqs", 64),
    ("+scheduler.max_num_seqs=64", "scheduler.max_num_seqs", 64),
    ("++scheduler.max_num_seqs=64", "scheduler.max_num_seqs", 64),
    ("scheduler={max_num_seqs:64}", "scheduler.max_num_seqs", 64),
    ("engine.device=cpu", "engine.device", "cpu"),
    ("engine.threads=null", "engine.threads", None),
    ("memory.headroom=0", "memory.headroom", 0.0),
    ("server.dev_endpoints=true", "server.dev_endpoints", True),
    ("server.port=${scheduler.max_num_seqs}", "server.port", 128),
    ('model.name="a=b, c"', "model.name", "a=b, c"),
    ("model.source=hf:org/name", "model.source", "hf:org/name"),
    ("scheduler.prefix_cache=none", "scheduler.prefix_cache.kind", "none"),
    ("scheduler/prefix_cache=none", "scheduler.prefix_cache.kind", "none"),
    ("+scheduler/prefix_cache=none", "scheduler.prefix_cache.kind", "none"),
    ("scheduler.prefix_cache.kind=none", "scheduler.prefix_cache.kind", "none"),
    ("+preset=interactive", "scheduler.max_num_seqs", 32),
    ("preset=interactive", "scheduler.max_num_seqs", 32),
    ("+preset=[interactive,batch]", "scheduler.max_num_seqs", 1024),
    ("+preset=[batch,interactive]", "scheduler.max_num_seqs", 32),
])
def test_override(override: str, key: str, expected: object) -> None:
    assert flatten(serve(override).config)[key] == expected


def test_the_value_of_a_group_is_an_instance_of_the_chosen_component() -> None:
    assert type(serve().config.scheduler.prefix_cache) is HashPrefixCacheConfig
    assert type(serve("scheduler.prefix_cache=none").config.scheduler.prefix_cache) is NoPrefixCacheConfig
    bench = compose_bench(["workload=azure", "workload.path=x.csv", "arrival=trace"]).config
    assert (type(bench.workload), type(bench.arrival)) == (AzureWorkloadConfig, TraceArrivalConfig)


def another_value(key: Key) -> Any:
    """A valid value that differs from the default, by type alone."""
    if types := mapping_types(key.annotation):
        return {7 if types.name is int else "a": another_entry(types.value)}
    if is_tuple(key.annotation):
        return [*key.default, 1024] if isinstance(key.default, tuple) else [100]
    if "bool" in str(key.annotation):
        return not key.default
    if isinstance(key.default, Enum):
        return next((name for name in type(key.default).__members__ if name != key.default.name), key.default.name)
    if isinstance(key.default, int):
        return key.default + 1
    if isinstance(key.default, float):
        return key.default / 2 + 0.001
    if key.default is Required.required or "str" in str(key.annotation):
        return f"{key.default}x" if isinstance(key.default, str) else "other"
    return 2 if "int" in str(key.annotation) else 0.25


def another_entry(annotation: Any) -> Any:
    """A value for an entry of a mapping."""
    if not dataclasses.is_dataclass(annotation):
        return 1.0 if annotation is float else 1
    assert isinstance(annotation, type)
    return as_dict(annotation(**{f.name: 1.0 if "float" in str(f.type) else 1 for f in dataclasses.fields(annotation)
                                 if f.default is dataclasses.MISSING}))


def written(value: object) -> str:
    """A value as it is written in an override."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else show(value)


COMPANIONS = {
    "scheduler.policy.own_batches": ["scheduler/batching=static", "scheduler.policy.preempt=false"],
    "scheduler.batching.preferred_batch_sizes": ["scheduler.max_num_seqs=1024", "scheduler.max_step_tokens=1024"],
    "scheduler.tenants.weights": ["scheduler/policy=vtc"],
}
"""Without which the value that a test gives these keys is refused."""


def choices_for(root: Root[Any], key: Key) -> list[str]:
    """What must be chosen for the key to exist, and to go with the rest."""
    chosen = list(COMPANIONS.get(key.name, []))
    if not key.kinds:
        return chosen
    section, kind = key.section, key.kinds[0]
    chosen.append(f"{section}.{COMPONENT_KIND}={kind}")
    if kind in ("azure", "mooncake") or (section == "arrival" and kind == "trace"):
        chosen += ["workload=azure", "workload.path=x"]
    return chosen


@cache
def composed_once(root: str, chosen: tuple[str, ...]) -> Any:
    """The configuration of these choices: many keys need the same."""
    return compose(serve_root() if root == serve_root().name else bench_root(), list(chosen)).config


@pytest.mark.parametrize(("root", "key"), [
    pytest.param(root, key, id=f"{root.name}-{key.name}") for root in (serve_root(), bench_root())
    for key in root.keys.values() if not key.chooses_component])
def test_every_key_can_be_overridden_and_only_it_changes(root: Root[Any], key: Key) -> None:
    chosen = choices_for(root, key)
    before, value = composed_once(root.name, tuple(chosen)), another_value(key)
    after = compose(root, [*chosen, f"{key.name}={written(value)}"])
    assert value_and_origin(after, key.name) == (value, "command line")
    changed = {name for name, kept in flatten(before).items() if flatten(after.config)[name] != kept}
    described_by_source = {"model.name", "model.sha256", "model.cpu_quantization"}
    assert changed <= {key.name} | (described_by_source if key.name == "model.source" else set())


def every_serve_value() -> dict[str, Any]:
    """A value for every key that the default components have and that needs no companion."""
    return {name: another_value(serve_root().keys[name]) for name in serve().origins
            if not serve_root().keys[name].chooses_component and name not in COMPANIONS}


def test_every_key_can_be_set_in_the_environment() -> None:
    values = every_serve_value()
    environ = {f"SERVEKIT__{key.upper().replace('.', '__')}": written(value) for key, value in values.items()}
    composed = serve(environ=environ)
    for key, value in values.items():
        assert value_and_origin(composed, key) == (value, f"SERVEKIT__{key.upper().replace('.', '__')}")


def test_every_key_can_be_set_in_a_site_file(site: Any) -> None:
    values = every_serve_value()
    path = site(yaml.safe_dump(values))
    composed = serve(file=path)
    for key, value in values.items():
        assert value_and_origin(composed, key) == (value, str(path))


# --- mappings and sequences ------------------------------------------------------------------------------------------

class Reaction(Enum):
    refuse = "refuse"
    wait = "wait"


@dataclass(frozen=True)
class LimitConfig:
    timeout_s: float | None = None
    """Longest wait."""
    reaction: Reaction = Reaction.refuse
    """What then."""


@dataclass(frozen=True)
class QueueConfig:
    limits: dict[int, LimitConfig] = field(default_factory=dict)
    """By class."""
    weights: dict[str, float] = field(default_factory=dict)
    """By tenant."""
    slots: dict[int, int] = field(default_factory=lambda: {0: 4})
    """By class."""
    sizes: tuple[int, ...] = (1, 2)
    """In order."""
    optional_sizes: tuple[int, ...] | None = None
    """The same, or none."""

    def __post_init__(self) -> None:
        for number, limit in self.limits.items():
            if limit.timeout_s is not None and limit.timeout_s < 0:
                raise ConfigError(f"limits.{number}.timeout_s", limit.timeout_s, "must not be negative", "raise it")


def queue(tmp_path: Path, *overrides: str, site: str = "", **environ: str) -> Composed[QueueConfig]:
    (tmp_path / "queue.yaml").write_text("defaults:\n  - _self_\n")
    file = tmp_path / "site.yaml"
    file.write_text(site or "{}")
    root = Root("queue", QueueConfig, conf_dir=tmp_path)
    return compose(root, overrides, file, {f"SERVEKIT__{name}": value for name, value in environ.items()})


@pytest.mark.parametrize(("override", "expected"), [
    ("limits.0.timeout_s=5", QueueConfig(limits={0: LimitConfig(5.0)})),
    ("limits={0:{timeout_s:5,reaction:wait},-1:{}}",
     QueueConfig(limits={0: LimitConfig(5.0, Reaction.wait), -1: LimitConfig()})),
    ("limits.7={reaction:wait}", QueueConfig(limits={7: LimitConfig(reaction=Reaction.wait)})),
    ("limits.7={}", QueueConfig(limits={7: LimitConfig()})),
    ("weights.alice=2", QueueConfig(weights={"alice": 2.0})),
    ("weights={alice:2,b.c@d:0.5}", QueueConfig(weights={"alice": 2.0, "b.c@d": 0.5})),
    ("weights.12=3", QueueConfig(weights={"12": 3.0})),
    ("slots.1=2", QueueConfig(slots={0: 4, 1: 2})),
    ("slots={1:2}", QueueConfig(slots={1: 2})),
    ("sizes=[4,8]", QueueConfig(sizes=(4, 8))),
    ("sizes=[]", QueueConfig(sizes=())),
    ("optional_sizes=[${sizes.1},3]", QueueConfig(optional_sizes=(2, 3))),
])
def test_mappings_and_sequences(tmp_path: Path, override: str, expected: QueueConfig) -> None:
    assert queue(tmp_path, override).config == expected
    key, _, value = override.partition("=")
    assert queue(tmp_path, **{key.upper().replace(".", "__"): value}).config == expected


def test_entries_from_several_layers_make_one_mapping(tmp_path: Path) -> None:
    composed = queue(tmp_path, "limits.0.timeout_s=1", "limits.2.timeout_s=2",
                     site="limits: {0: {timeout_s: 9, reaction: wait}, 1: {}}\nsizes: [3]\n", WEIGHTS__BOB="4")
    assert composed.config == QueueConfig(
        limits={0: LimitConfig(1.0, Reaction.wait), 1: LimitConfig(), 2: LimitConfig(2.0)},
        weights={"bob": 4.0}, sizes=(3,))
    assert str(composed.origins["limits"]) == f"{tmp_path / 'site.yaml'}, command line"
    assert str(composed.origins["weights"]) == "SERVEKIT__WEIGHTS__BOB"
    assert queue(tmp_path, "limits={5:{}}", site="limits: {0: {timeout_s: 9}}\n").config.limits == {5: LimitConfig()}
    assert flatten(composed.config)["limits"] == {
        0: {"timeout_s": 1.0, "reaction": "wait"}, 1: {"timeout_s": None, "reaction": "refuse"},
        2: {"timeout_s": 2.0, "reaction": "refuse"}}
    assert queue(tmp_path, site=to_yaml(composed.config)).config == composed.config


@pytest.mark.parametrize(("override", "message"), [
    ("limits.0.timout_s=5", "limits.0.timout_s=5: there is no such key; did you mean limits.0.timeout_s?"),
    ("limits={0:{timout_s:5}}", "limits.0.timout_s=5: there is no such key; did you mean limits.0.timeout_s?"),
    ("limits.0.q=5", "limits.0.q=5: there is no such key; an entry has timeout_s, reaction"),
    ("limits={0:{timeout_s:soon}}", "limits.0.timeout_s=soon: must be a number or null; the default is "
                                    "limits.0.timeout_s=null"),
    ("limits.0.reaction=wat", "limits.0.reaction=wat: must be one of refuse, wait; did you mean "
                              "limits.0.reaction=wait?"),
    ("limits.vip.timeout_s=5", "limits.vip.timeout_s=5: the name of this entry must be a whole number, not vip; "
                               "for example 0"),
    ("limits={vip:{}}", "limits.vip={}: the name of this entry must be a whole number, not vip; for example 0"),
    ("limits=5", "limits=5: must be a mapping {whole number: settings {timeout_s, reaction}}; the default is "
                 "limits={}"),
    ("limits=${weights}", "limits=${weights}: must be a mapping {whole number: settings {timeout_s, reaction}}; "
                          "the default is limits={}"),
    ("limits.0=5", "limits.0=5: must be settings {timeout_s, reaction}; set limits.0.timeout_s=VALUE"),
    ("limits.0.timeout_s=-1", "limits.0.timeout_s=-1.0: must not be negative; raise it"),
    ("limits={0:{timeout_s:-1}}", "limits.0.timeout_s=-1.0: must not be negative; raise it"),
    ("weights={12:3}", "weights.12=3: the name of this entry must be text, not 12; quote it"),
    ("weights.alice=much", "weights.alice=much: must be a number; set weights.alice=VALUE"),
    ("weights.a.b=1", "weights.a.b=1: an entry of weights is a number; write a name with a dot in it as "
                      "weights={name: VALUE}"),
    ("sizes=[4,x]", "sizes=[4, x]: must be a list [a, b], each a whole number; the default is sizes=[1, 2]"),
    ("sizes=4", "sizes=4: must be a list [a, b], each a whole number; the default is sizes=[1, 2]"),
    ("sizes=null", "sizes=null: must be a list [a, b], each a whole number; the default is sizes=[1, 2]"),
    ("slots.0=${nothing}", "slots.0=${nothing}: Interpolation key 'nothing' not found; correct the ${...} in it"),
])
def test_a_wrong_entry_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        queue(tmp_path, override)
    assert str(caught.value) == message


def test_a_wrong_entry_names_the_layer_that_set_it(tmp_path: Path) -> None:
    site = "limits: {0: {timeout_s: -1}}\n"
    with pytest.raises(ConfigError, match=r"limits\.0\.timeout_s=-1\.0: must not be negative \(set by .*site\.yaml\)"):
        queue(tmp_path, site=site)
    with pytest.raises(ConfigError, match=r"limits\.0\.reaction=x: .*set by SERVEKIT__LIMITS__0__REACTION"):
        queue(tmp_path, LIMITS__0__REACTION="x")


# --- groups and presets ----------------------------------------------------------------------------------------------

PRESETS = serve_root().groups[PRESET].option_names
CHOICES = [(group, option) for group in serve_root().groups.values() if group.key != PRESET
           for option in group.option_names]


def needed_beside(option: str) -> list[str]:
    return ["model.source=/a/model"] if option == "custom" else []


@pytest.mark.parametrize(("number", "group", "option"), [
    pytest.param(number, *choice, id=f"{choice[0].name}={choice[1]}") for number, choice in enumerate(CHOICES)])
def test_presets_compose_with_every_option_or_say_why_not(number: int, group: Any, option: str) -> None:
    """Each option with two presets, so that every preset meets several options."""
    for preset in (PRESETS[number % len(PRESETS)], PRESETS[(5 * number + 3) % len(PRESETS)]):
        try:
            composed = serve(f"+preset={preset}", f"{group.name}={option}", *needed_beside(option))
        except ConfigError as error:
            assert error.key.startswith("scheduler.")
            assert "\n" not in str(error)
            assert group.name.startswith("scheduler/"), "only components contradict a preset"
            continue
        from_preset = [origin for origin in composed.origins.values() if origin.layer is Layer.preset]
        assert from_preset and {str(origin) for origin in from_preset} == {f"conf/preset/{preset}.yaml"}
        assert all(setting.key.startswith(f"{group.key}.") for setting in composed.dropped), "the replaced one's only"


def test_a_preset_that_contradicts_an_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.batching\.kind=static: runs a batch to its end.*priority"):
        serve("+preset=faster-transformer", "scheduler/policy=priority")
    with pytest.raises(ConfigError, match=r"scheduler\.preemption\.kind=none: needs room for every request"):
        serve("+preset=tgi", "scheduler/admission=on_demand")


@pytest.mark.parametrize(("root", "name", "option"), [
    (root, group.name, option) for root in (serve_root(), bench_root())
    for group in root.groups.values() for option in group.option_names if group.key != PRESET])
def test_every_option_has_a_description_and_composes(root: Root[Any], name: str, option: str) -> None:
    group = next(group for group in root.groups.values() if group.name == name)
    assert next(o.doc for o in group.options if o.name == option)
    needed = [*needed_beside(option)]
    if (name, option) == ("scheduler/preemption", "none"):
        needed.append("scheduler/admission=worst_case")
    if option in ("azure", "mooncake"):
        needed.append("workload.path=x")
    if option == "trace":
        needed += ["workload=azure", "workload.path=x"]
    composed = compose(root, [f"{name}={option}", *needed])
    assert f"conf/{name}/{option}.yaml" in {str(origin) for origin in composed.origins.values()}


def test_balanced_is_the_default_by_name() -> None:
    assert serve("+preset=balanced").config == serve().config


def test_a_source_of_ones_own_is_not_checked_against_the_default_models_hash() -> None:
    model = serve("model.source=/a/file.gguf").config.model
    assert (model.source, model.name, model.sha256) == ("/a/file.gguf", None, None)
    assert model.cpu_quantization is Quantization.auto, "it is said of the model it replaces"
    named = serve("model.source=/a/file.gguf", "model.name=mine", "model.sha256=abc").config.model
    assert (named.name, named.sha256) == ("mine", "abc")


def test_a_copy_of_a_chosen_model_is_checked_against_its_hash() -> None:
    model = serve("model=smollm2-135m", "model.source=/a/copy.gguf").config.model
    assert (model.source, model.name, model.sha256) == ("/a/copy.gguf", "smollm2-135m", DEFAULT_SHA256)


def test_a_later_source_drops_the_description_of_an_earlier_one(site: Any) -> None:
    path = site("model: {source: /first, name: first, sha256: abc, dtype: float32}")
    model = serve("model.source=/second", file=path).config.model
    assert (model.source, model.name, model.sha256, model.dtype.name) == ("/second", None, None, "float32")


def test_a_later_choice_of_a_model_replaces_an_earlier_source(site: Any) -> None:
    model = serve("model=smollm2-135m", file=site("model: {source: /first, name: first}")).config.model
    assert (model.name, model.sha256) == ("smollm2-135m", DEFAULT_SHA256)


# --- layers ----------------------------------------------------------------------------------------------------------

KEY, VARIABLE = "scheduler.max_num_seqs", "SERVEKIT__SCHEDULER__MAX_NUM_SEQS"


def test_each_layer_beats_the_one_before(site: Any) -> None:
    path = site("scheduler: {max_num_seqs: 40}\n")
    environ = {VARIABLE: "50"}
    assert value_and_origin(serve(), KEY) == (128, "default")
    assert value_and_origin(serve("+preset=interactive"), KEY) == (32, "conf/preset/interactive.yaml")
    assert value_and_origin(serve("+preset=interactive", file=path), KEY) == (40, str(path))
    assert value_and_origin(serve("+preset=interactive", file=path, environ=environ), KEY) == (50, VARIABLE)
    assert value_and_origin(serve("+preset=interactive", f"{KEY}=60", file=path, environ=environ), KEY) \
        == (60, "command line")


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert serve(f"{KEY}=3", f"{KEY}=4").config.scheduler.max_num_seqs == 4


def test_groups_are_chosen_in_every_layer(site: Any) -> None:
    key = "scheduler.prefix_cache.kind"
    expected = ("none", "conf/scheduler/prefix_cache/none.yaml")
    path = site("preset: interactive\nmodel: smollm2-135m\nscheduler: {policy: fifo, prefix_cache: none}\n")
    assert value_and_origin(serve(file=path), key) == expected
    assert value_and_origin(serve(file=path), KEY) == (32, "conf/preset/interactive.yaml")
    assert value_and_origin(serve(environ={"SERVEKIT__SCHEDULER__PREFIX_CACHE": "none"}), key) == expected
    assert value_and_origin(serve("scheduler.prefix_cache=hash", file=path), key)[0] == "hash"
    assert value_and_origin(serve("+preset=batch", file=path), KEY) == (1024, "conf/preset/batch.yaml")


def test_a_choice_beats_the_kind_of_an_earlier_layer(site: Any) -> None:
    path = site("scheduler: {prefix_cache: {kind: none}}\n")
    assert type(serve(file=path).config.scheduler.prefix_cache) is NoPrefixCacheConfig
    assert type(serve("scheduler.prefix_cache=hash", file=path).config.scheduler.prefix_cache) is HashPrefixCacheConfig


def test_variables_of_another_command_are_not_errors() -> None:
    environ = {VARIABLE: "3", "SERVEKIT__PRESET": "batch", "SERVEKIT__URL": "http://other:1", "OTHER": "x"}
    assert compose_bench(environ=environ).config.url == "http://other:1"
    assert serve(environ=environ).config.scheduler.max_num_seqs == 3


def test_entries_of_a_mapping_are_merged_in_order() -> None:
    composed = compose_bench(["extra_body={a:1}", "extra_body.top_k=5"])
    assert composed.config.extra_body == {"a": 1, "top_k": 5}
    assert str(composed.origins["extra_body"]) == "command line"
    assert compose_bench(["extra_body.top_k=5", "extra_body={a:1}"]).config.extra_body == {"a": 1}


@pytest.mark.parametrize("overrides", [[], ["+preset=batch", "scheduler.prefix_cache=none"],
                                       ["model.source=/x", "engine.threads=2", "server.dev_endpoints=true"]])
def test_the_yaml_of_a_configuration_is_a_site_file_that_gives_it_again(site: Any, overrides: list[str]) -> None:
    config = compose_serve(overrides).config
    assert serve(file=site(to_yaml(config))).config == config


def test_every_value_has_an_origin() -> None:
    composed = serve("+preset=interactive", "model.source=/x")
    assert list(composed.origins) == list(flatten(composed.config))


def test_composing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    serve("+preset=interactive")
    assert list(tmp_path.iterdir()) == []


# --- errors ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("overrides", "fragments"), [
    (["scheduler.max_num_seq=4"], ["scheduler.max_num_seq=4", "no such key", "did you mean scheduler.max_num_seqs?"]),
    (["max_num_seqs=4"], ["did you mean scheduler.max_num_seqs?"]),
    (["frobnicate=4"], ["frobnicate=4", "no such key", "servekit serve --help"]),
    (["scheduler.max_num_seqs=many"], ["scheduler.max_num_seqs=many", "a whole number", "128"]),
    (["scheduler.max_num_seqs=1.5"], ["must be a whole number"]),
    (["scheduler.max_num_seqs=null"], ["scheduler.max_num_seqs=null", "must be a whole number"]),
    (["server.host=[1,2]"], ["server.host", "must be text"]),
    (["model.revision=12e4"], ["model.revision", "must be text", "quote it"]),
    (["engine.device=gpu"], ["engine.device=gpu", "one of auto, cpu, cuda"]),
    (["engine.device=cud"], ["did you mean engine.device=cuda?"]),
    (["scheduler.prefix_cache=hsh"], ["scheduler.prefix_cache=hsh", "one of hash, none, radix", "did you mean"]),
    (["scheduler/prefix_cache=null"], ["one of hash, none, radix"]),
    (["scheduler.prefix_cache.kind=tree"], ["scheduler.prefix_cache.kind=tree", "one of none, hash, radix"]),
    (["model=/a/folder"], ["model=/a/folder", "model.source=/a/folder"]),
    (["model=custom"], ["model.source=???", "must be given", "set model.source=VALUE"]),
    (["+preset=fast"], ["preset=fast", "balanced, batch, economy"]),
    (["scheduler=3"], ["scheduler=3", "section", "scheduler.max_num_seqs"]),
    (["model.source=/data/x=y"], ["/data/x=y", "grammar", """model.source='"/data/x=y"'"""]),
    (["model.source=~/m"], ["grammar", "quote it"]),
    (["server.port=1,2"], ["server.port=1,2", "sweep"]),
    (["~server.port"], ["server.port", "cannot be deleted"]),
    (["server.port"], ["server.port", "not of the form key=value"]),
    (["scheduler/policy@elsewhere=fifo"], ["place of a group is fixed", "scheduler/policy=fifo"]),
    (["model.name=${nothing.here}"], ["model.name=${nothing.here}", "nothing.here", "${...}"]),
    (["scheduler.max_num_seqs=0"], ["scheduler.max_num_seqs=0", "at least 1"]),
    (["scheduler.max_num_seqs=600"], ["scheduler.max_step_tokens=512", "at least scheduler.max_num_seqs=600"]),
    (["scheduler.prefill.chunk_tokens=600"], ["scheduler.prefill.chunk_tokens=600", "must not exceed"]),
    (["server.port=70000"], ["server.port=70000", "65535"]),
    (["scheduler.admission.classes.2.queue_timeout_s=0"], ["scheduler.admission.classes.2.queue_timeout_s=0.0",
                                                           "must be greater than 0"]),
    (["scheduler.admission.classes={2:{max_queue_requests:0}}"], ["classes.2.max_queue_requests=0", "at least 1"]),
    (["scheduler.tenants.quotas.bob.tokens_per_s=-1"], ["scheduler.tenants.quotas.bob.tokens_per_s=-1.0"]),
    (["scheduler.tenants.key=cookie"], ["scheduler.tenants.key=cookie", "one of user, header"]),
    (["scheduler.policy.quantum_s=1"], ["the chosen scheduler.policy has no such option",
                                        "choose scheduler.policy=mlfq"]),
    (["scheduler.policy.class_slots.0=2"], ["scheduler.policy.class_slots.0=2", "choose scheduler.policy=priority"]),
    (["hydra.run.dir=x"], ["hydra.run.dir", "no such key"]),
])
def test_error(overrides: list[str], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_serve(overrides)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)
    assert "set by" not in str(caught.value)


@pytest.mark.parametrize(("text", "fragments"), [
    ("server: {port: [\n", ["site.yaml", "line 2"]),
    ("server: {port: 1}\nserver: {port: 2}\n", ["site.yaml", "line 2", "duplicate"]),
    ("\tserver: 1\n", ["site.yaml", "line 1"]),
    ("- server\n", ["site.yaml", "must hold keys and values"]),
    ("serverr: {port: 3}\n", ["serverr.port=3", "set by", "site.yaml", "did you mean server.port?"]),
    ("server: {port: x}\n", ["server.port=x", "whole number", "(set by", "site.yaml"]),
    ("server: {port: 70000}\n", ["server.port=70000", "65535 (set by", "site.yaml)"]),
    ("scheduler: {policy: fast}\n", ["scheduler.policy=fast", "one of fair, fifo, lpm", "site.yaml"]),
    ("scheduler: null\n", ["scheduler=null", "section"]),
    ("model: {name: 12}\n", ["model.name=12", "must be text", "quote"]),
])
def test_error_in_a_site_file(site: Any, text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(file=site(text))
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            serve(file=path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\xff\xfe")
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        serve(file=path)


@pytest.mark.parametrize(("name", "value", "fragments"), [
    ("SERVEKIT__SERVER__PORT", "x", ["server.port=x", "(set by SERVEKIT__SERVER__PORT)"]),
    ("SERVEKIT__SERVER__PROT", "1", ["(set by SERVEKIT__SERVER__PROT)", "did you mean server.port?"]),
    ("SERVEKIT__MODEL__SOURCE", "/a=b", ["grammar", """SERVEKIT__MODEL__SOURCE='"/a=b"'"""]),
    ("SERVEKIT__SCHEDULER__POLICY", "x", ["one of fair, fifo, lpm", "(set by SERVEKIT__SCHEDULER__POLICY)"]),
    ("SERVEKIT__SCHEDULER__MAX_NUM_SEQS", "0", ["at least 1 (set by SERVEKIT__SCHEDULER__MAX_NUM_SEQS)"]),
])
def test_error_in_the_environment(name: str, value: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(environ={name: value})
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)


def test_a_bound_broken_by_a_preset_names_it() -> None:
    with pytest.raises(ConfigError, match=r"max_step_tokens=256: .*\(set by conf/preset/interactive.yaml\)"):
        serve("+preset=interactive", "scheduler.max_num_seqs=300")


def test_options_of_another_component_are_unknown() -> None:
    with pytest.raises(ConfigError, match=r"workload.num_prefixes=3: the chosen workload has no such option.*"
                                          r"choose workload=shared_prefix"):
        compose_bench(["workload=fixed", "workload.num_prefixes=3"])
    with pytest.raises(ConfigError, match=r"choose workload\.kind=lognormal"):
        compose_bench(["workload=fixed", "workload.prompt_sigma=3"])


def test_a_bad_interpolation_inside_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"extra_body\.a=.*nothing.*correct the \$\{\.\.\.\} in it"):
        compose_bench(["extra_body={a:${nothing}}"])


# --- the mechanism itself, on a root of its own ----------------------------------------------------------------------

class Shape(Enum):
    circle = "circle"
    square = "square"


@dataclass(frozen=True)
class ShapeConfig:
    kind: Shape = Shape.circle
    """Which."""
    colour: str = "red"
    """Paint."""


@dataclass(frozen=True)
class CircleConfig(ShapeConfig):
    radius: int = 1
    """Half the width."""


@dataclass(frozen=True)
class SquareConfig(ShapeConfig):
    kind: Shape = Shape.square
    """Which."""
    side: int = 2
    """The width."""


@dataclass(frozen=True)
class PictureConfig:
    title: str
    """Name."""
    left: ShapeConfig = field(default_factory=CircleConfig)
    """One of two shapes."""
    right: ShapeConfig = field(default_factory=SquareConfig)
    """The other."""


FILES = {
    "picture.yaml": "defaults:\n  - left: circle\n  - right: square\n  - _self_\ntitle: none\n",
    "left/circle.yaml": "# Round.\nkind: circle\n",
    "left/square.yaml": "# Not round.\nkind: square\nside: 5\n",
    "right/circle.yaml": "# Round.\nkind: circle\n",
    "right/square.yaml": "# Not round.\nkind: square\n",
    "preset/big.yaml": "# @package _global_\n# Large.\ntitle: big\nleft: {radius: 10, colour: blue}\n",
    "preset/bigger.yaml": "# @package _global_\ndefaults:\n  - big\n  - override /right: circle\n  - _self_\n"
                          "right: {radius: 20}\n",
}


@pytest.fixture
def picture(tmp_path: Path) -> Root[PictureConfig]:
    for name, text in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Root("picture", PictureConfig, has_presets=True, implied={"title": Choice("left", "circle")},
                conf_dir=tmp_path / "conf")


def test_a_preset_may_build_on_another_and_choose_components(picture: Root[PictureConfig]) -> None:
    composed = compose(picture, ["+preset=bigger"])
    assert as_dict(composed.config) == {
        "title": "big", "left": {"kind": "circle", "colour": "blue", "radius": 10},
        "right": {"kind": "circle", "colour": "red", "radius": 20}}
    assert {key: str(origin) for key, origin in composed.origins.items()} == {
        "title": "conf/preset/big.yaml", "left.kind": "conf/left/circle.yaml",
        "left.colour": "conf/preset/big.yaml", "left.radius": "conf/preset/big.yaml",
        "right.kind": "conf/right/circle.yaml", "right.colour": "default", "right.radius": "conf/preset/bigger.yaml"}


def test_replacing_a_component_drops_the_options_it_had_and_says_so(picture: Root[PictureConfig]) -> None:
    composed = compose(picture, ["+preset=big", "left=square"])
    assert composed.config.left == SquareConfig(colour="blue", side=5)
    assert [(setting.key, setting.value, str(setting.origin)) for setting in composed.dropped] \
        == [("left.radius", 10, "conf/preset/big.yaml")]


def test_within_one_layer_the_options_of_another_component_are_refused(picture: Root[PictureConfig]) -> None:
    with pytest.raises(ConfigError, match=r"left\.radius=3: the chosen left has no such option"):
        compose(picture, ["left=square", "left.radius=3"])
    with pytest.raises(ConfigError, match=r"left\.radius=3.*set by SERVEKIT__LEFT__RADIUS"):
        compose(picture, [], None, {"SERVEKIT__LEFT": "square", "SERVEKIT__LEFT__RADIUS": "3"})


def test_an_implied_choice_yields_to_an_explicit_one_of_the_same_layer_only(picture: Root[PictureConfig]) -> None:
    assert type(compose(picture, ["left=square", "title=x"]).config.left) is SquareConfig
    assert type(compose(picture, ["title=x"], None, {"SERVEKIT__LEFT": "square"}).config.left) is CircleConfig
