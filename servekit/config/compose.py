"""Composes a configuration from its layers and remembers where each value came from.

    schema defaults < conf/ < preset < site file < environment < command line

Hydra reads the overrides (its grammar) and decides which files of conf/ take part and in which order (its defaults
list). The values are then laid over each other here, one key at a time, because Hydra does not keep their origin,
and checked against the frozen dataclasses of the schema, which OmegaConf fills.

Two rules go beyond "the later layer wins":

- The file of an option counts in the layer that chose it. `model=smollm2-135m` on the command line therefore replaces
  the source that a site file names. Only presets keep their place, below the site file, whoever chose them.
- When a later layer chooses another component, the options that earlier layers gave to the one it replaces, and that
  it does not have, go with it. They are listed in `Composed.dropped`. Within one layer they are an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from servekit.config.describe import (
    COMPONENT_KIND,
    PRESET,
    Group,
    Key,
    MappingTypes,
    Required,
    Root,
    accepts,
    allowed_values,
    component_class,
    field_types,
    has_parts,
    is_tuple,
    mapping_types,
    nearest,
    split_entry,
    type_words,
)
from servekit.config.errors import ConfigError, show
from servekit.config.origin import COMMAND_LINE, DEFAULT, Composed, Layer, Origin, Setting, blame
from servekit.config.resolve import as_dict, flatten
from servekit.config.roots import ROOTS, bench_root, plan_root, serve_root
from servekit.config.schema import Config

if TYPE_CHECKING:
    from servekit.config.bench import BenchConfig
    from servekit.config.plan import PlanConfig

__all__ = ["Composed", "compose", "compose_bench", "compose_plan", "compose_serve", "recompose", "to_yaml"]

T = TypeVar("T")
ENVIRONMENT_PREFIX = "SERVEKIT__"


def compose_serve(overrides: Sequence[str] = (), file: Path | None = None,
                  environ: Mapping[str, str] | None = None) -> Composed[Config]:
    """The configuration of an engine and its server. Raises `ConfigError`."""
    return compose(serve_root(), overrides, file, environ)


def compose_bench(overrides: Sequence[str] = (), file: Path | None = None,
                  environ: Mapping[str, str] | None = None) -> Composed[BenchConfig]:
    """The configuration of a benchmark run. Raises `ConfigError`."""
    return compose(bench_root(), overrides, file, environ)


def compose_plan(overrides: Sequence[str] = (), file: Path | None = None,
                 environ: Mapping[str, str] | None = None) -> Composed[PlanConfig]:
    """The configuration of a capacity plan. Raises `ConfigError`."""
    return compose(plan_root(), overrides, file, environ)


def compose(root: Root[T], overrides: Sequence[str] = (), file: Path | None = None,
            environ: Mapping[str, str] | None = None) -> Composed[T]:
    """Compose `root` from conf/, a site file, environment variables (`SERVEKIT__…`) and Hydra overrides.

    Raises:
        ConfigError: a key, value, option or file that cannot be honoured.
    """
    given = [*_site_settings(root, file), *_environment_settings(root, environ or {}),
             *(_parse_override(text, COMMAND_LINE) for text in overrides)]
    given = [part for setting in given for part in _flat(root, setting)]
    choices = _choices(root, given)
    values = [setting for setting in given if setting.key not in root.groups]
    return _typed(root, _latest([*_conf_settings(root, choices), *values]))


def recompose(root: Root[T], values: Mapping[str, Any], where: str) -> T:
    """The configuration whose values `as_dict` gave; nothing is taken from conf/. `where` they are from, for errors.

    Raises:
        ConfigError: a key, value or option that this version does not have.
    """
    return _typed(root, _latest(_flat(root, Setting("", dict(values), Origin(Layer.site, where))))).config


def to_yaml(config: object) -> str:
    """A configuration as a site file: composing this text alone gives an equal configuration."""
    return str(OmegaConf.to_yaml(OmegaConf.create(as_dict(config))))


# --- what each layer says --------------------------------------------------------------------------------------------

def _site_settings(root: Root[Any], file: Path | None) -> Iterator[Setting]:
    if file is not None:
        for key, value in _load_yaml(file).items():
            yield Setting(str(key).replace("/", "."), value, Origin(Layer.site, str(file)))


def _environment_settings(root: Root[Any], environ: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            if not _belongs_to_another_command(root, key):
                yield _parse_override(f"{key}={environ[name]}", Origin(Layer.environment, name))


def _belongs_to_another_command(root: Root[Any], key: str) -> bool:
    """One environment may configure several commands: `bench` does not stumble over `serve`'s variables.

    A key that only another command has is the other's, even where both have a section of that name.
    """
    top = key.partition(".")[0]
    others = [other() for other in ROOTS.values()]
    if top not in _top_level(root):
        return any(top in _top_level(other) for other in others)
    return not _has(root, key) and any(_has(other, key) for other in others)


def _has(root: Root[Any], key: str) -> bool:
    return root.find(key) is not None or key in root.groups


def _top_level(root: Root[Any]) -> set[str]:
    return {*field_types(root.schema), *root.groups}


def _parse_override(text: str, origin: Origin) -> Setting:
    """One override in Hydra's grammar. A leading `+` or `++` changes nothing: the schema knows every key."""
    key, equals, value = text.partition("=")
    key = key.lstrip("+")
    if text.startswith("~"):
        raise blame(ConfigError(text.lstrip("~"), "~", "a setting cannot be deleted",
                                "leave it out for its default, or set it to null for no limit"), origin)
    if not equals:
        raise blame(ConfigError("override", text, "is not of the form key=value", f"write {text}=VALUE"), origin)
    quote = _quoting_hint(key, value, origin)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise blame(ConfigError(key, value, "is not in Hydra's override grammar", quote), origin) from None
    if override.is_sweep_override():
        raise blame(ConfigError(key, value, "asks for a sweep, and one configuration is run",
                                f"give one value, or {quote}"), origin)
    if override.package is not None:
        raise blame(ConfigError(key, value, "the place of a group is fixed",
                                f"write {override.key_or_group}={value}"), origin)
    return Setting(override.key_or_group.replace("/", "."), override.value(), origin)


def _quoting_hint(key: str, value: str, origin: Origin) -> str:
    name = origin.where if origin.layer is Layer.environment else key
    return f"""quote it: {name}='"{value}"'"""


def _flat(root: Root[Any], setting: Setting) -> Iterator[Setting]:
    """A nested value as one setting for each key of the schema; a mapping stays whole."""
    if root.find(setting.key) is None and isinstance(setting.value, dict):
        for name, value in setting.value.items():
            yield from _flat(root, Setting(f"{setting.key}.{name}".lstrip("."), value, setting.origin))
    else:
        yield setting


def _load_yaml(path: Path) -> dict[Any, Any]:
    """A YAML file that holds a mapping; interpolations stay as they are."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError("file", path, "there is no such file", "give an existing YAML file, or key=value") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("file", path, f"line {line}: {error.problem}", "correct the YAML there") from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError("file", path, f"cannot be read: {' '.join(str(error).split())}",
                          "give a YAML file of keys and values") from None
    if not isinstance(loaded, dict):
        raise ConfigError("file", path, "must hold keys and values", "write it as in `server: {port: 9000}`")
    return loaded


# --- groups and the files of conf/ -----------------------------------------------------------------------------------

def _choices(root: Root[Any], given: Sequence[Setting]) -> Mapping[str, Setting]:
    """The options that the user chose, by the key of their group; a later layer's choice replaces an earlier one's."""
    chosen: dict[str, Setting] = {}
    for layer in Layer:
        own = [setting for setting in given if setting.origin.layer is layer]
        for setting in own:
            if implied := root.implied.get(setting.key):
                chosen[implied.group] = Setting(implied.group, implied.option, setting.origin)
        for setting in own:
            if group := root.groups.get(setting.key):
                _check_choice(root, group, setting)
                chosen[setting.key] = setting
    return chosen


def _check_choice(root: Root[Any], group: Group, setting: Setting) -> None:
    for option in _options(setting):
        if option not in group.option_names:
            raise blame(ConfigError(setting.key, option, f"must be one of {', '.join(group.option_names)}",
                                     _remedy_for_option(root, group, str(option))), setting.origin)


def _options(setting: Setting) -> Sequence[object]:
    """Presets may be several: `+preset=[interactive,mine]`."""
    is_list = setting.key == PRESET and isinstance(setting.value, list)
    return cast(list[object], setting.value) if is_list else [setting.value]


def _remedy_for_option(root: Root[Any], group: Group, option: str) -> str:
    if meant := nearest(option, group.option_names):
        return f"did you mean {group.name}={meant}?"
    own = next((key for key, implied in root.implied.items() if implied.group == group.key), None)
    return f"set {own}={option} for one of your own" if own else f"for example {group.name}={group.option_names[0]}"


def _conf_settings(root: Root[Any], choices: Mapping[str, Setting]) -> Iterator[Setting]:
    """What the files of conf/ say, in the order of Hydra's defaults list."""
    overrides = [_hydra_choice(choice) for choice in choices.values()]
    # Hydra 1.3 warns without a version base, 1.4 warns with one.
    version_base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    with initialize_config_dir(str(root.conf_dir.resolve()), **version_base):
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(root.name, overrides, RunMode.RUN).defaults
    for default in defaults:
        if default.config_path is not None and not default.config_path.startswith("hydra"):
            content = _load_yaml(root.conf_dir / f"{default.config_path}.yaml")
            content.pop("defaults", None)
            origin = Origin(_layer_of(default.config_path, choices), f"conf/{default.config_path}.yaml")
            yield from _flat(root, Setting(default.package or "", content, origin))


def _hydra_choice(choice: Setting) -> str:
    prefix = "+" if choice.key == PRESET else ""
    options = [str(option) for option in _options(choice)]
    value = options[0] if len(options) == 1 else f"[{','.join(options)}]"
    return f"{prefix}{choice.key.replace('.', '/')}={value}"


def _layer_of(config_path: str, choices: Mapping[str, Setting]) -> Layer:
    group = config_path.rpartition("/")[0].replace("/", ".")
    if group == PRESET:
        return Layer.preset
    return choices[group].origin.layer if group in choices else Layer.conf


def _latest(settings: Iterable[Setting]) -> Mapping[str, Setting]:
    """For each key the setting of its last layer, in the order in which they apply."""
    latest: dict[str, Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.origin.layer):
        for replaced in [key for key in latest if f"{key}.".startswith(f"{setting.key}.")]:
            del latest[replaced]
        latest[setting.key] = setting
    return latest


# --- the schema ------------------------------------------------------------------------------------------------------

def _typed(root: Root[T], settings: Mapping[str, Setting]) -> Composed[T]:
    classes = _classes(root.schema, settings)
    node = _skeleton(root.schema, classes, "")
    dropped = []
    for setting in settings.values():
        if _is_known(root, setting.key, classes):
            _assign(root, node, setting)
        elif _was_replaced(root, setting, settings):
            dropped.append(setting)
        else:
            raise blame(_unknown_key(root, setting, classes), setting.origin)
    config = cast(T, _made(node, "", settings))
    return Composed(config, {key: _origin(key, settings) for key in flatten(config)}, tuple(dropped))


def _classes(schema: type, settings: Mapping[str, Setting], section: str = "") -> dict[str, type]:
    """For each section the class whose options it has; of a component, the one of the kind that was chosen."""
    found = {section: schema}
    for name, annotation in field_types(schema).items():
        if is_dataclass(annotation):
            key = f"{section}.{name}".lstrip(".")
            kind = settings.get(f"{key}.{COMPONENT_KIND}")
            assert isinstance(annotation, type)
            found |= _classes(component_class(annotation, kind.value if kind else None), settings, key)
    return found


def _skeleton(schema: type, classes: Mapping[str, type], section: str) -> DictConfig:
    """A typed node that accepts exactly the keys of these classes.

    OmegaConf makes the node of a frozen dataclass read-only, which would forbid composing it: the flag is cleared,
    and the instances made of the node in the end are frozen all the same.
    """
    node = OmegaConf.structured(schema)
    OmegaConf.set_readonly(node, None)
    for name, annotation in field_types(schema).items():
        if is_dataclass(annotation):
            key = f"{section}.{name}".lstrip(".")
            node[name] = _skeleton(classes[key], classes, key)
    assert isinstance(node, DictConfig)
    return node


def _is_known(root: Root[Any], name: str, classes: Mapping[str, type]) -> bool:
    """Whether the chosen components have this key, or the mapping that it lies in."""
    owner = root.mapping_of(name) or root.keys.get(name)
    return (owner is not None and root.find(name) is not None
            and owner.last_part in field_types(classes.get(owner.section, _Nothing)))


@dataclass(frozen=True)
class _Nothing:
    """A section that the chosen components do not have."""


def _assign(root: Root[Any], node: DictConfig, setting: Setting) -> None:
    """Set one key of the tree, be it an entry of a mapping or a part of one."""
    mapping = root.mapping_of(setting.key)
    key = mapping or root.keys[setting.key]
    section = OmegaConf.select(node, key.section) if key.section else node
    if mapping is None:
        _put(root, section, key.last_part, key.annotation, setting)
        return
    types = mapping_types(mapping.annotation)
    assert types is not None
    if section[mapping.last_part] is None:
        section[mapping.last_part] = {}
    entries, (text, part) = section[mapping.last_part], split_entry(mapping, setting.key)
    entry = _entry_name(types, text, setting)
    if not part:
        _put(root, entries, entry, types.value, setting)
        return
    if entry not in entries:
        entries[entry] = _skeleton(types.value, {}, setting.key)
    _put(root, entries[entry], part, field_types(types.value)[part], setting)


def _put(root: Root[Any], node: DictConfig, name: Any, annotation: Any, setting: Setting) -> None:
    """Give `node[name]` a value of its declared type; a mapping part by part, so that an error names the part."""
    value, types = setting.value, mapping_types(annotation)
    if types is not None and isinstance(value, dict):
        node[name] = {}
        for entry, part in value.items():
            inner = _inside(setting, entry, part)
            _put(root, node[name], _entry_name(types, entry, inner), types.value, inner)
    elif is_dataclass(annotation) and isinstance(value, dict):
        assert isinstance(annotation, type)
        node[name] = _skeleton(annotation, {}, setting.key)
        for field, part in value.items():
            inner = _inside(setting, field, part)
            if field not in field_types(annotation):
                raise blame(_unknown_part(inner, annotation), setting.origin)
            _put(root, node[name], field, field_types(annotation)[field], inner)
    else:
        _put_plain(root, node, name, annotation, setting)


def _inside(setting: Setting, name: object, value: object) -> Setting:
    return Setting(f"{setting.key}.{name}", value, setting.origin)


def _put_plain(root: Root[Any], node: DictConfig, name: Any, annotation: Any, setting: Setting) -> None:
    if _is_number_for_text(annotation, setting.value):
        raise blame(ConfigError(setting.key, setting.value, f"must be {type_words(annotation)}",
                                f"""quote it, as in {setting.key}='"VALUE"'"""), setting.origin)
    # An interpolation could stand for a container of any content: only values of one piece may be one.
    is_whole = isinstance(setting.value, str) and has_parts(annotation)
    try:
        if is_whole:
            raise ValidationError
        node[name] = setting.value
    except OmegaConfBaseException:
        raise blame(_wrong_type(root, setting, annotation), setting.origin) from None


def _entry_name(types: MappingTypes, given: object, setting: Setting) -> str | int:
    """The name of an entry in the type that its mapping declares."""
    if types.name is int and re.fullmatch("-?[0-9]+", str(given)):
        return int(str(given))
    if types.name is str and isinstance(given, str):
        return given
    remedy = "quote it" if types.name is str else "for example 0"
    raise blame(ConfigError(setting.key, setting.value, f"the name of this entry must be {type_words(types.name)}, "
                            f"not {show(given)}", remedy), setting.origin)


def _unknown_part(setting: Setting, schema: type) -> ConfigError:
    section, _, name = setting.key.rpartition(".")
    meant, known = nearest(name, field_types(schema)), ", ".join(field_types(schema))
    return ConfigError(setting.key, setting.value, "there is no such key",
                       f"did you mean {section}.{meant}?" if meant else f"an entry has {known}")


def _is_number_for_text(annotation: Any, value: object) -> bool:
    """Such a number may have been written differently (a commit 12e45), so it is not turned back into text."""
    return isinstance(value, bool | int | float) and accepts(annotation, str) and not accepts(annotation, type(value))


def _wrong_type(root: Root[Any], setting: Setting, annotation: Any) -> ConfigError:
    name, value = setting.key, setting.value
    meant = nearest(str(value), allowed_values(annotation))
    return ConfigError(name, value, f"must be {type_words(annotation)}",
                       f"did you mean {name}={meant}?" if meant else _remedy_for_value(root, name, annotation))


def _remedy_for_value(root: Root[Any], name: str, annotation: Any) -> str:
    key = root.find(name)
    if key is not None and key.default is not Required.required:
        return f"the default is {name}={key.default_text}"
    if isinstance(annotation, type) and is_dataclass(annotation):
        return f"set {name}.{next(iter(field_types(annotation)))}=VALUE"
    return f"set {name}=VALUE"


def _was_replaced(root: Root[Any], setting: Setting, settings: Mapping[str, Setting]) -> bool:
    owner = root.mapping_of(setting.key) or root.keys.get(setting.key)
    kind = settings.get(f"{owner.section}.{COMPONENT_KIND}") if owner is not None else None
    return kind is not None and setting.origin.layer < kind.origin.layer


def _unknown_key(root: Root[Any], setting: Setting, classes: Mapping[str, type]) -> ConfigError:
    known = root.mapping_of(setting.key) or root.keys.get(setting.key)
    if known is not None and root.find(setting.key) is not None:
        return ConfigError(setting.key, setting.value, f"the chosen {known.section} has no such option",
                           f"choose {_kinds(root, known)}, or leave the option out")
    if known is not None:
        return _unknown_entry(setting, known)
    if setting.key in root.sections:
        inside = next(key for key in root.keys if key.startswith(f"{setting.key}."))
        return ConfigError(setting.key, setting.value, "is a section and has no value of its own",
                           f"set one of its keys, such as {inside}")
    if meant := nearest(setting.key, [*root.keys, *root.groups]):
        return ConfigError(setting.key, setting.value, "there is no such key", f"did you mean {meant}?")
    return ConfigError(setting.key, setting.value, "there is no such key",
                       _where_it_is_known(setting.key) or f"{_help_command(root)} lists all keys")


def _where_it_is_known(name: str) -> str | None:
    """The command that has a key of this name, or one that ends so."""
    return next((f"servekit {other.name} has {key}" for other in (make() for make in ROOTS.values())
                 for key in other.keys if f".{key}".endswith(f".{name}")), None)


def _unknown_entry(setting: Setting, mapping: Key) -> ConfigError:
    """A part that the entries of a mapping do not have."""
    types = mapping_types(mapping.annotation)
    assert types is not None
    if isinstance(types.value, type) and is_dataclass(types.value):
        return _unknown_part(setting, types.value)
    return ConfigError(setting.key, setting.value, f"an entry of {mapping.name} is {type_words(types.value)}",
                       f"write a name with a dot in it as {mapping.name}={{name: VALUE}}")


def _kinds(root: Root[Any], key: Key) -> str:
    """How to choose a component that has this option: by the name of a file, where one has the name of the kind."""
    section = key.section
    options = root.groups[section].option_names if section in root.groups else ()
    return " or ".join(f"{section}={kind}" if kind in options else f"{section}.{COMPONENT_KIND}={kind}"
                       for kind in key.kinds)


def _help_command(root: Root[Any]) -> str:
    return f"servekit {root.name} --help"


def _made(node: DictConfig, key: str, settings: Mapping[str, Setting]) -> object:
    """The frozen instance of a node of the tree, which checks its bounds; interpolations are resolved."""
    schema = OmegaConf.get_type(node)
    assert schema is not None
    values = {name: _value(node, name, annotation, f"{key}.{name}".lstrip("."), settings)
              for name, annotation in field_types(schema).items()}
    try:
        return schema(**values)
    except ConfigError as error:
        raise blame(error, _origin(error.key, settings)) from None


def _value(node: DictConfig, name: Any, annotation: Any, key: str, settings: Mapping[str, Setting]) -> object:
    """What a node holds under a name, as the declared type says."""
    if OmegaConf.is_missing(node, name):
        raise blame(ConfigError(key, "???", "must be given", f"set {key}=VALUE"), _origin(key, settings))
    value, types = _read(node, name, key, settings), mapping_types(annotation)
    if is_dataclass(annotation):
        return _made(value, key, settings)
    if types is not None and value is not None:
        return {entry: _value(value, entry, types.value, f"{key}.{entry}", settings) for entry in value}
    return tuple(value) if is_tuple(annotation) and value is not None else value


def _read(node: DictConfig, name: Any, key: str, settings: Mapping[str, Setting]) -> Any:
    """An item of a node; containers of plain values as plain containers."""
    try:
        value = node[name]
        return value if isinstance(value, DictConfig) or not OmegaConf.is_config(value) else (
            OmegaConf.to_container(value, resolve=True))
    except OmegaConfBaseException as error:
        written = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index]
        raise blame(ConfigError(key, written, str(error).splitlines()[0], "correct the ${...} in it"),
                    _origin(key, settings)) from None


def _origin(key: str, settings: Mapping[str, Setting]) -> Origin:
    """Where a key's value came from; of a mapping, where each of the settings that it is made of did."""
    parts = [setting.origin for name, setting in settings.items()
             if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")]
    if not parts:
        return DEFAULT
    return Origin(max(part.layer for part in parts), ", ".join(dict.fromkeys(part.where for part in parts)))
