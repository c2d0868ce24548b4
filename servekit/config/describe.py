"""What there is to configure: the keys of the schema, the groups of conf/, and their descriptions.

Everything is read from where it is defined (dataclasses, their docstrings, the first comment of each YAML file), so
that composing, help and shell completion cannot disagree. Standard library only: help must appear at once.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import servekit.conf
from servekit.config.errors import show

T = TypeVar("T")
CONF_DIR = Path(str(servekit.conf.__file__)).parent
_NO_GROUPS = ("slo",)
"""Folders of conf/ with the name of a section that hold no options of it: conf/slo has whole tuning files."""
COMPONENT_KIND = "kind"
PRESET = "preset"
ANY_ENTRY = "*"
"""Stands in a dotted name for whatever the entries of a mapping are called."""


class Required(Enum):
    """The default of a key that has none."""

    required = "required"


@dataclass(frozen=True)
class Choice:
    """One option of one group, as in `scheduler/policy=fifo`."""

    group: str
    option: str


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str
    """Dotted name, as in an override."""
    annotation: Any
    """Declared type."""
    default: object
    """Value when nothing sets it; `Required.required` if something must."""
    doc: str
    """Its docstring, on one line."""
    kinds: tuple[str, ...] = ()
    """For an option of components: the kinds that have it."""

    @property
    def section(self) -> str:
        """Dotted name of the section that it is in; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def last_part(self) -> str:
        """Its name inside its section."""
        return self.name.rpartition(".")[2]

    @property
    def chooses_component(self) -> bool:
        """Whether it names a component, which is chosen by its group."""
        return bool(self.kinds) and self.last_part == COMPONENT_KIND

    @property
    def default_text(self) -> str:
        """The default as it would be written in an override, `...` if there is none."""
        if self.default is Required.required:
            return "..."
        return show(self.default.name if isinstance(self.default, Enum) else self.default)


@dataclass(frozen=True)
class Option:
    """One file of a group."""

    name: str
    doc: str


@dataclass(frozen=True)
class Group:
    """A folder of conf/ whose files are alternatives."""

    name: str
    """Path inside conf/, as in `scheduler/policy`."""
    options: tuple[Option, ...]

    @property
    def key(self) -> str:
        """Dotted name of the section that the group fills."""
        return self.name.replace("/", ".")

    @property
    def option_names(self) -> tuple[str, ...]:
        """What may be chosen."""
        return tuple(option.name for option in self.options)


@dataclass(frozen=True)
class Root(Generic[T]):
    """A configuration that can be composed: conf/<name>.yaml, checked against a dataclass."""

    name: str
    """Name of the root file, and of the subcommand that it configures."""
    schema: type[T]
    """The dataclass that is composed."""
    has_presets: bool = False
    """Whether conf/preset applies to it."""
    implied: Mapping[str, Choice] = field(default_factory=dict)
    """Keys whose setting chooses an option of their group, unless the same layer chooses one itself."""
    conf_dir: Path = CONF_DIR
    """Folder of the YAML files."""

    @cached_property
    def sections(self) -> Mapping[str, type]:
        """The dotted keys that hold a dataclass, outermost first, with its declared class."""
        return dict(_sections(self.schema, ""))

    @cached_property
    def keys(self) -> Mapping[str, Key]:
        """Every setting that any choice of components can have, by dotted name, in the order of the schema."""
        found: dict[str, Key] = {}
        for key in _keys(self.schema, "", ()):
            found[key.name] = _merged(found.get(key.name, key), key)
        return found

    @cached_property
    def entries(self) -> Mapping[str, Key]:
        """What the mappings of the user's own names hold: one key with `*` for the name stands for all entries."""
        return {key.name: key for mapping in self.keys.values() for key in _entry_keys(mapping)}

    def mapping_of(self, name: str) -> Key | None:
        """The mapping inside which a dotted name lies."""
        return next((self.keys[outer] for outer in _outer_names(name)
                     if outer in self.keys and is_mapping(self.keys[outer].annotation)), None)

    def find(self, name: str) -> Key | None:
        """The setting of a dotted name, be it an entry of a mapping or part of one; None if there is none."""
        mapping = self.mapping_of(name)
        if mapping is None:
            return self.keys.get(name)
        _, part = split_entry(mapping, name)
        found = self.entries.get(f"{mapping.name}.{ANY_ENTRY}.{part}".removesuffix("."))
        return None if found is None else replace(found, name=name)

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        """The groups that apply, by the dotted key that they fill: those of sections, and the presets."""
        sections = [section for section in self.sections if section not in _NO_GROUPS]
        folders = [*sections, *([PRESET] if self.has_presets else [])]
        found = (_group(self.conf_dir, key.replace(".", "/")) for key in folders)
        return {group.key: group for group in found if group.options}


def _outer_names(name: str) -> Iterator[str]:
    """The sections around a dotted name, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def split_entry(mapping: Key, name: str) -> tuple[str, str]:
    """Of a dotted name inside a mapping, the entry's own name and the part of it; no part for the whole entry."""
    entry, _, part = name.removeprefix(f"{mapping.name}.").partition(".")
    return entry, part


def _entry_keys(mapping: Key) -> Iterator[Key]:
    types = mapping_types(mapping.annotation)
    if types is not None:
        name = f"{mapping.name}.{ANY_ENTRY}"
        yield Key(name, types.value, Required.required, mapping.doc, mapping.kinds)
        if is_dataclass(types.value):
            assert isinstance(types.value, type)
            yield from _keys(types.value, f"{name}.", mapping.kinds)


def _merged(earlier: Key, later: Key) -> Key:
    """One entry for an option that several components have."""
    doc = earlier.doc if later.doc in earlier.doc else f"{earlier.doc} {later.doc}"
    return replace(earlier, doc=doc, kinds=tuple(dict.fromkeys(earlier.kinds + later.kinds)))


def _group(conf_dir: Path, name: str) -> Group:
    paths = sorted((conf_dir / name).glob("*.yaml"))
    return Group(name, tuple(Option(path.stem, first_comment(path)) for path in paths))


def components(base: type[Any]) -> Mapping[str, type]:
    """The subclasses of a component's base class by the name of their kind; empty for a plain section."""
    return {_default_kind(cls).name: cls for cls in base.__subclasses__()}


def component_class(base: type, kind: object = None) -> type:
    """The class whose options a component of this kind has; the base's own kind if none is given."""
    variants = components(base)
    if not variants:
        return base
    name = kind.name if isinstance(kind, Enum) else kind
    return variants.get(str(name), variants[_default_kind(base).name])


def _default_kind(cls: type) -> Enum:
    kind = next(f.default for f in fields(cls) if f.name == COMPONENT_KIND)
    assert isinstance(kind, Enum)
    return kind


def _variants(base: type) -> list[tuple[tuple[str, ...], type]]:
    """The classes that a section can have, each with the name of its kind; a plain section has one, without a kind."""
    return [((kind,), cls) for kind, cls in components(base).items()] or [((), base)]


def _sections(schema: type, prefix: str) -> Iterator[tuple[str, type]]:
    for name, annotation in field_types(schema).items():
        if is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield prefix + name, annotation
            for _, cls in _variants(annotation):
                yield from _sections(cls, f"{prefix}{name}.")


def _keys(schema: type, prefix: str, kinds: tuple[str, ...]) -> Iterator[Key]:
    docs = field_docs(schema)
    for f in fields(schema):
        annotation = field_types(schema)[f.name]
        if not is_dataclass(annotation):
            yield Key(prefix + f.name, annotation, _default(f), docs.get(f.name, ""), kinds)
            continue
        assert isinstance(annotation, type)
        for kind, cls in _variants(annotation):
            yield from _keys(cls, f"{prefix}{f.name}.", kind or kinds)


def field_types(schema: type) -> Mapping[str, Any]:
    """The declared type of every field."""
    hints = get_type_hints(schema)
    return {f.name: hints[f.name] for f in fields(schema)}


def _default(f: Field[Any]) -> object:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else Required.required


@cache
def field_docs(schema: type) -> Mapping[str, str]:
    """The docstring under each field, its own or inherited, on one line."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if is_dataclass(cls):
            docs |= _own_field_docs(cls)
    return docs


def _own_field_docs(cls: type) -> Mapping[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value.value if _is_text(following) else None  # type: ignore[attr-defined]
            if text is not None:
                docs[statement.target.id] = " ".join(text.split())
    return docs


def _is_text(statement: ast.stmt) -> bool:
    return (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str))


def first_comment(path: Path) -> str:
    """The first comment line of a YAML file that is not a directive such as `# @package`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("#") and not text.startswith("@"):
            return text
    return ""


def allowed_values(annotation: Any) -> tuple[str, ...]:
    """The words that a key of this type accepts; empty if there are too many to list."""
    words: list[str] = []
    for member in _members(annotation):
        if member is NoneType:
            words.append("null")
        elif member is bool:
            words += ["true", "false"]
        elif isinstance(member, type) and issubclass(member, Enum):
            words += member.__members__
    return tuple(words)


def type_words(annotation: Any) -> str:
    """A type as a person would say it: `a whole number or null`, `one of auto, cpu, cuda`."""
    return " or ".join(_word(member) for member in _members(annotation))


def accepts(annotation: Any, kind: type) -> bool:
    """Whether values of this Python type may be given."""
    return kind in _members(annotation)


@dataclass(frozen=True)
class MappingTypes:
    """The declared types of a mapping's names and values."""

    name: type
    value: Any


def mapping_types(annotation: Any) -> MappingTypes | None:
    """What a mapping with names of the user's own holds; None for any other type."""
    found = next((member for member in _members(annotation) if get_origin(member) is dict), None)
    return None if found is None else MappingTypes(*get_args(found))


def is_mapping(annotation: Any) -> bool:
    """Whether the key holds a mapping with names of the user's own."""
    return mapping_types(annotation) is not None


def has_parts(annotation: Any) -> bool:
    """Whether the key holds a mapping, a sequence or settings of its own, and not one plain value."""
    return any(get_origin(member) in (dict, list, tuple) or is_dataclass(member) for member in _members(annotation))


def is_tuple(annotation: Any) -> bool:
    """Whether the key holds a sequence that cannot be changed."""
    return any(get_origin(member) is tuple for member in _members(annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null",
          Any: "a value"}


def _word(member: Any) -> str:
    if isinstance(member, type) and issubclass(member, Enum):
        return f"one of {', '.join(member.__members__)}"
    if is_dataclass(member):
        assert isinstance(member, type)
        return f"settings {{{', '.join(field_types(member))}}}"
    if get_origin(member) in (list, tuple):
        return f"a list [a, b], each {type_words(get_args(member)[0])}"
    if types := mapping_types(member):
        name, value = (type_words(part).removeprefix("a ") for part in (types.name, types.value))
        return f"a mapping {{{name}: {value}}}"
    return _WORDS.get(member, str(member))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` was probably meant to be: by its whole, else by its last part."""
    names = list(known)
    by_last_part = {_last_part(name): name for name in reversed(names)}
    if whole := difflib.get_close_matches(word, names, n=1, cutoff=0.75):
        return whole[0]
    last = difflib.get_close_matches(_last_part(word), by_last_part, n=1, cutoff=0.7)
    return by_last_part[last[0]] if last else None


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
