"""What the garbage collector has to look through while requests wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def take_for_permanent() -> None:
    """Have the collector leave alone all that lives now: looking through it stops a process with torch for 90 ms.

    For the end of a start. What is made later is collected as before.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def left_alone() -> Iterator[None]:
    """The same for as long as something is timed: a pause of a load generator looks like one of the engine."""
    take_for_permanent()
    try:
        yield
    finally:
        gc.unfreeze()
