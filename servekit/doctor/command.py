"""`servekit doctor`: examine, print, and say by the exit status whether this machine can serve."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.config.schema import Config
from servekit.doctor.findings import Finding, Section, Status, can_serve
from servekit.doctor.packages import examine_packages, installed_version, requirements
from servekit.doctor.report import write
from servekit.help import Style

if TYPE_CHECKING:
    from servekit.config.compose import Composed

EXIT_CAN_SERVE, EXIT_CANNOT_SERVE = 0, 3


def run(composed: Composed[Config], cache_dir: Path) -> int:
    """Examine this machine for a configuration; returns the exit status, 0 if it can be served here, else 3."""
    sections = list(examine(composed.config, cache_dir))
    print(write(sections, Style.of_terminal(sys.stdout.isatty())))
    return EXIT_CAN_SERVE if can_serve(sections) else EXIT_CANNOT_SERVE


def examine(config: Config, cache_dir: Path) -> Iterator[Section]:
    """The sections in the order in which each depends on those before it; without torch only the first."""
    packages = examine_packages(requirements(), installed_version)
    yield packages
    if can_serve([packages]):
        torch = _import_torch()
        if torch is not None:
            yield Section("torch", (torch,))
            return
        from servekit.doctor.examination import examine_engine

        yield from examine_engine(config, cache_dir)


def _import_torch() -> Finding | None:
    """Why torch, which is installed, cannot be imported; None if it can."""
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        return Finding(Status.missing, "torch", f"cannot be imported: {' '.join(str(error).split())}",
                       "pip install --force-reinstall torch")
    return None
