"""The texts of --help, written from the schema and the comments of conf/."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from servekit.config.describe import (
    ANY_ENTRY,
    PRESET,
    Group,
    Key,
    Root,
    allowed_values,
    components,
    field_docs,
)


@dataclass(frozen=True)
class Style:
    """How a text is set: plain in a pipe, with a little emphasis in a terminal."""

    width: int = 100
    is_terminal: bool = False

    @classmethod
    def of_terminal(cls, is_terminal: bool) -> Style:
        """The style for standard output."""
        return cls(min(shutil.get_terminal_size((100, 24)).columns, 120), is_terminal)

    def bold(self, text: str) -> str:
        """Stands out."""
        return f"\x1b[1m{text}\x1b[0m" if self.is_terminal else text

    def dim(self, text: str) -> str:
        """Stands back."""
        return f"\x1b[2m{text}\x1b[0m" if self.is_terminal else text


PRECEDENCE = ("Later wins: schema defaults, conf/, preset, FILE, environment (SERVEKIT__SERVER__PORT=9000), "
              "command line.")


def overview(commands: Mapping[str, str], roots: Iterable[Root[Any]], style: Style) -> str:
    """What `servekit --help` prints: the commands, and the groups of each root."""
    return "\n".join([
        "Assemble an LLM serving engine from named components, serve it, and measure it.",
        "",
        style.bold("usage") + ": servekit COMMAND [FILE.yaml] [key=value | group=option ...]",
        "",
        style.bold("commands"),
        *(_entry(name, doc, 14, style) for name, doc in commands.items()),
        "",
        style.bold("examples"),
        "  servekit serve +preset=interactive scheduler.max_num_seqs=64",
        "  servekit serve site.yaml server.port=9000",
        "  servekit config +preset=batch",
        *(line for root in roots if root.groups for line in ("", *_groups(root, style))),
        "",
        "servekit COMMAND --help lists every key with its default.",
        PRECEDENCE,
    ])


def command_help(root: Root[Any], usage: str, doc: str, style: Style) -> str:
    """What `servekit serve --help` prints: groups with their options, keys with their defaults."""
    return "\n".join([
        doc,
        "",
        style.bold("usage") + f": {usage}",
        "",
        *((*_groups(root, style), "") if root.groups else ()),
        *_sections(root, style),
        PRECEDENCE,
        f"servekit config {root.name} [FILE.yaml] [key=value ...] prints the result and where each value came from.",
    ])


def _groups(root: Root[Any], style: Style) -> Iterator[str]:
    yield style.bold(f"groups of {root.name}")
    for group in root.groups.values():
        yield f"  {_choice(group)}="
        for option in group.options:
            yield _entry(f"  {option.name}", option.doc, 18, style)


def _choice(group: Group) -> str:
    return f"+{group.name}" if group.key == PRESET else group.name


def _sections(root: Root[Any], style: Style) -> Iterator[str]:
    """The keys under their section, each section introduced by the docstring of its dataclass."""
    for section in ("", *root.sections):
        own = [key for key in root.keys.values() if key.section == section and not key.chooses_component]
        if own:
            yield style.bold(f"{section}." if section else "at the top") + f"  {_section_doc(root, section)}"
            for key in own:
                for shown in (key, *_parts_of_entries(root, key)):
                    name = shown.name.removeprefix(f"{section}.")
                    yield _entry(f"{name}={shown.default_text}", _explanation(root, shown), 30, style)
            yield ""


def _parts_of_entries(root: Root[Any], mapping: Key) -> list[Key]:
    """What the entries of a mapping consist of, where they have parts."""
    return [key for key in root.entries.values() if key.name.startswith(f"{mapping.name}.{ANY_ENTRY}.")]


def _section_doc(root: Root[Any], section: str) -> str:
    """What a section is for; of a component group, what the choice decides."""
    schema = root.sections.get(section, root.schema)
    parent, _, name = section.rpartition(".")
    if components(schema):
        return field_docs(root.sections.get(parent, root.schema))[name]
    return (schema.__doc__ or "").splitlines()[0]


def _explanation(root: Root[Any], key: Key) -> str:
    words = [key.doc]
    if choices := [word for word in allowed_values(key.annotation) if word not in ("null", "true", "false")]:
        words.append(f"One of {', '.join(choices)}.")
    base = root.sections.get(key.section)
    if base is not None and len(key.kinds) < len(components(base)):
        words.append(f"Only of {', '.join(key.kinds)}.")
    return " ".join(words)


def _entry(name: str, doc: str, indent: int, style: Style) -> str:
    """`name` and its description in two columns; a long name stands on a line of its own."""
    head = f"  {name}"
    lines = textwrap.wrap(doc, max(20, style.width - indent))
    if len(head) < indent - 1 and lines:
        head = head.ljust(indent) + lines.pop(0)
    return "\n".join([head, *(" " * indent + line for line in lines)])
