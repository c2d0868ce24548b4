"""What an examination finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How it stands with one thing."""

    ok = "ok"
    limited = "limited"
    """It works, but slower or with less than it could."""
    missing = "missing"
    """Nothing can be served without it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    status: Status
    subject: str
    text: str
    remedy: str | None = None
    """What to do: a command, or a setting."""


@dataclass(frozen=True)
class Section:
    """Findings about one matter."""

    title: str
    findings: tuple[Finding, ...]


def can_serve(sections: Iterable[Section]) -> bool:
    """Whether nothing is missing."""
    return all(finding.status is not Status.missing for section in sections for finding in section.findings)
