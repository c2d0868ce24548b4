"""The Python packages that servekit needs, as they are installed. Nothing is imported from them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from servekit.doctor.findings import Finding, Section, Status

VersionOf = Callable[[str], str | None]
"""The version of a package; None if it is not installed."""

_SHOWN = ("torch", "triton")
"""Packages whose versions decide what an engine can do."""
_OPTIONAL = ("triton",)
"""What servekit serves without, in another way."""


def installed_version(name: str) -> str | None:
    """The version of a package in this environment."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement]:
    """What servekit requires on this system."""
    found = [Requirement(text) for text in metadata.requires("servekit") or ()]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def examine_packages(needed: list[Requirement], version_of: VersionOf) -> Section:
    """Python, the packages that matter by name, and the others together."""
    return Section("Python", tuple(_findings(needed, version_of)))


def _findings(needed: list[Requirement], version_of: VersionOf) -> Iterator[Finding]:
    yield Finding(Status.ok, "Python", f"{platform.python_version()} ({sys.executable})")
    others = 0
    for requirement in needed:
        version = version_of(requirement.name)
        problem = _problem(requirement, version)
        if problem is not None:
            status = Status.limited if requirement.name in _OPTIONAL else Status.missing
            yield Finding(status, requirement.name, problem, f'pip install "{_bare(requirement)}"')
        elif requirement.name in _SHOWN:
            yield Finding(Status.ok, requirement.name, str(version))
        else:
            others += 1
    yield Finding(Status.ok, "other packages", f"{others} as servekit requires them")


def _problem(requirement: Requirement, version: str | None) -> str | None:
    if version is None:
        return "is not installed"
    is_right = requirement.specifier.contains(version, prereleases=True)
    return None if is_right else f"{version} is installed; servekit requires {requirement.specifier}"


def _bare(requirement: Requirement) -> str:
    """As pip takes it, without the systems that it is for."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"
