"""What is seen while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from servekit.load.driver import LoadRun

_BAR_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 10.0


@asynccontextmanager
async def progress(run: LoadRun, total: int | None, console: Console) -> AsyncIterator[None]:
    """Show how far a run is for as long as the context lasts: a bar on a terminal, a line now and then elsewhere."""
    show = _show_bar if console.is_terminal else _show_lines
    task = asyncio.create_task(show(run, total, console))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _show_bar(run: LoadRun, total: int | None, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        while True:
            bar.update(task, completed=len(run.records), description=_state(run), refresh=True)
            await asyncio.sleep(_BAR_INTERVAL_S)


async def _show_lines(run: LoadRun, total: int | None, console: Console) -> None:
    of_total = "" if total is None else f" of {total}"
    while True:
        await asyncio.sleep(_LINE_INTERVAL_S)
        console.print(f"{run.elapsed_s:.0f} s: {len(run.records)}{of_total} requests ended, {_state(run)}",
                      highlight=False, soft_wrap=True)


def _state(run: LoadRun) -> str:
    return f"{run.num_in_flight} in flight, {run.num_failed} failed"
