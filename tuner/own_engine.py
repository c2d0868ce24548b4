"""servekit's own engine for measurements; its model's files are fetched first, with a bar meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from servekit.config.schema import Config
from servekit.engine.client import StartError
from servekit.model.local import LocalModel, ModelFileError
from servekit.model.source import default_cache_dir, fetch
from servekit.tuner.engine_host import EngineHost


def engine_for(base: Config) -> EngineHost:
    """A host for a configuration and others of its model. Raises StartError if the model's files cannot be had."""
    cache_dir = default_cache_dir(os.environ)
    return EngineHost(_fetched(base, cache_dir), cache_dir)


def _fetched(base: Config, cache_dir: Path) -> LocalModel:
    console = Console(stderr=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console,
                  transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("model files")
        try:
            return fetch(base.model, cache_dir,
                         lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total))
        except ModelFileError as error:
            raise StartError(str(error)) from error
