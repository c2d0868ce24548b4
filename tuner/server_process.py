"""A server's process: started in a group of its own, its output kept in a file, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_GRACE_S = 15.0
"""Between being asked to end and being killed."""
_TAIL_CHARACTERS = 400
_POLL_S = 0.02


class ServerProcess:
    """One start of a server."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        """Start it. Raises OSError if its program cannot be run."""
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                             start_new_session=True)

    @property
    def exit_status(self) -> int | None:
        """None while it runs; below 0 the signal that ended it."""
        return self._process.poll()

    def tail(self, num_lines: int = 3) -> str:
        """The last lines of its output, as one."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8 * _TAIL_CHARACTERS))
            lines = [" ".join(line.split()) for line in log.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-num_lines:])[-_TAIL_CHARACTERS:]

    @property
    def members(self) -> list[int]:
        """The ids of the processes of its group, on systems that have /proc; elsewhere its own."""
        return list(_members(self._process.pid)) or [self._process.pid]

    def end(self) -> None:
        """End the whole group: asked at first, then killed."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            if self._is_gone_within(_GRACE_S):
                return

    def _is_gone_within(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None and not any(_members(self._process.pid)):
                return True
            time.sleep(_POLL_S)
        return False


def _members(group: int) -> Iterator[int]:
    """The living processes of a group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                yield int(path.parent.name)
