"""How busy the machine is with other things, from /proc; where there is none, nobody knows and nothing is claimed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)
"""Idle and waiting for I/O, among the numbers of the line `cpu`."""


@dataclass(frozen=True)
class _Reading:
    """Ticks of all processors since the machine started."""

    all_ticks: int
    busy_ticks: int
    own_ticks: int


class MachineUse:
    """Share of the machine's processor time that went to processes other than this one and those it names."""

    def __init__(self, engine_processes: Callable[[], Iterable[int]]) -> None:
        self._engine_processes = engine_processes
        self._started: _Reading | None = None

    def start(self) -> None:
        """Begin to count."""
        self._started = self._read()

    def share_of_others(self) -> float | None:
        """Since `start`; None where it cannot be known."""
        now, before = self._read(), self._started
        if now is None or before is None or now.all_ticks == before.all_ticks:
            return None
        others = (now.busy_ticks - before.busy_ticks) - (now.own_ticks - before.own_ticks)
        return max(0, others) / (now.all_ticks - before.all_ticks)

    def _read(self) -> _Reading | None:
        try:
            ticks = [int(number) for number in _STAT.read_text().splitlines()[0].split()[1:9]]
            own = sum(map(_process_ticks, {os.getpid(), *self._engine_processes()}))
        except (OSError, ValueError, IndexError):
            return None
        idle = sum(ticks[field] for field in _IDLE_FIELDS)
        return _Reading(sum(ticks), sum(ticks) - idle, own)


def _process_ticks(process_id: int) -> int:
    """User and system time of a process and the children it has waited for."""
    text = Path(f"/proc/{process_id}/stat").read_text()
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))
