"""How far a start is: a bar on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0


class LoadingProgress:
    """Shows the stages of a start, and gives the latest as one line to `tell`. Safe to update from a thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._view: _Bars | _Lines = _Bars() if sys.stderr.isatty() else _Lines()

    def __enter__(self) -> LoadingProgress:
        self._view.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._view.stop()

    def bytes_done(self, stage: str, done: int, total: int | None) -> None:
        """A stage whose size is known in bytes, or becomes known."""
        share = f" {100 * done // total} %" if total else ""
        self._tell(f"{stage}{share}")
        self._view.update(stage, done, total, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else "")

    def pieces_done(self, stage: str, done: int, total: int) -> None:
        """A stage of so many pieces."""
        self._tell(f"{stage} {done} of {total}")
        self._view.update(stage, done, total, f"{done} of {total}")

    def stage(self, name: str) -> None:
        """A stage without a size."""
        self._tell(name)
        self._view.update(name, 0, None, "")


class _Bars:
    """One bar a stage, gone when the start is over."""

    def __init__(self) -> None:
        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"),
                                  TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def update(self, stage: str, done: int, total: int | None, amount: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, amount=amount)
        self._progress.update(self._tasks[stage], completed=done, total=total, amount=amount)


class _Lines:
    """A line when a stage begins, then one every few seconds."""

    def __init__(self) -> None:
        self._stage = ""
        self._told_s = 0.0

    def start(self) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """Nothing to clear."""

    def update(self, stage: str, done: int, total: int | None, amount: str) -> None:
        now_s = time.monotonic()
        if stage == self._stage and now_s - self._told_s < LINE_INTERVAL_S:
            return
        self._stage, self._told_s = stage, now_s
        log.info("loading %s: %s" if amount else "loading %s", *filter(None, (stage, amount)))
