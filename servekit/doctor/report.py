"""Findings as a text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from servekit.doctor.findings import Finding, Section, Status, can_serve
from servekit.help import Style

_STATUS_WIDTH = max(len(status.value) for status in Status)


def write(sections: Sequence[Section], style: Style) -> str:
    """A table for each section, a remedy below what has one, and the verdict."""
    width = max(len(finding.subject) for section in sections for finding in section.findings)
    lines = [line for section in sections for line in _section(section, width, style)]
    return "\n".join([*lines, _verdict(sections)])


def _section(section: Section, width: int, style: Style) -> Iterator[str]:
    yield style.bold(section.title)
    for finding in section.findings:
        yield from _finding(finding, width, style)
    yield ""


def _finding(finding: Finding, width: int, style: Style) -> Iterator[str]:
    indent = 2 + _STATUS_WIDTH + 2 + width + 2
    room = max(30, style.width - indent)
    first, *others = textwrap.wrap(finding.text, room, break_long_words=False, break_on_hyphens=False) or [""]
    status = finding.status.value.ljust(_STATUS_WIDTH)
    yield f"  {status if finding.status is Status.ok else style.bold(status)}  {finding.subject:{width}}  {first}"
    yield from (" " * indent + line for line in others)
    if finding.remedy is not None:
        yield " " * indent + style.bold(f"-> {finding.remedy}")


def _verdict(sections: Sequence[Section]) -> str:
    missing = [finding.subject for section in sections for finding in section.findings
               if finding.status is Status.missing]
    return f"this machine cannot serve it: {', '.join(missing)}" if not can_serve(sections) else (
        "this machine can serve it")
