"""The other ranks' processes, as the first rank has them: started, told what to do, watched.

What a rank is told goes through the standard input of its process, which closes when the first rank's process ends,
however it ends; then the rank ends itself.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from servekit.config.schema import Config
from servekit.model.local import LocalModel
from servekit.runner.group import ProcessGroup, RankLost, require_backend
from servekit.runner.inputs import SharedStep
from servekit.runner.queue import WorkQueue

_EXIT_STATUS_S = 5.0
"""How long the end of a process may come after the end of its connections."""

T = TypeVar("T")


@dataclass(frozen=True)
class RankOrder:
    """What a rank's process is told first."""

    rank: int
    config: Config
    local: LocalModel
    cache_dir: Path
    device: str
    """Kind of the device, as torch names it."""
    meeting_file: Path


@dataclass(frozen=True)
class Assemble:
    """Allocate the KV cache and capture graphs under these settings, in place of what was there."""

    config: Config


ToRank = RankOrder | Assemble | SharedStep


class Workers:
    """All ranks but this one, and the group of all."""

    def __init__(self, config: Config, local: LocalModel, cache_dir: Path, device: torch.device) -> None:
        """Start a process for each further rank, and meet them. Raises RankLost if one ends before."""
        size = config.engine.tensor_parallel
        require_backend(device, size)
        self._folder = tempfile.TemporaryDirectory(prefix="servekit-ranks-")
        meeting_file = Path(self._folder.name) / "store"
        self._losses = _Losses()
        self._processes = [_start(RankOrder(rank, config, local, cache_dir, device.type, meeting_file))
                           for rank in range(1, size)]
        weakref.finalize(self, _close, self._processes, self._losses)
        for rank, process in enumerate(self._processes, 1):
            _wait_until_started(rank, process)
        self.group = ProcessGroup(0, size, device, meeting_file, config.engine.startup_timeout_s,
                                  self._losses.explain)
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=_watch, args=(rank, process, self._losses, self.group), daemon=True,
                             name=f"rank-{rank}-watch").start()

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks from 1 on."""
        return [process.pid for process in self._processes]

    def begin(self, step: SharedStep) -> None:
        self._tell(step)

    def assemble(self, config: Config) -> None:
        """Let all ranks do what this one does to change the settings that need no new weights."""
        self._tell(Assemble(config))

    def check(self) -> None:
        """Raise RankLost if a rank has ended."""
        self._losses.check()

    def watched(self, queue: WorkQueue) -> WorkQueue:
        """The queue, whose results count only if every rank has lived on."""
        return _WatchedQueue(queue, self.check)

    def _tell(self, message: ToRank) -> None:
        self.check()
        encoded = _encode(message)
        try:
            for process in self._processes:
                _write(process, encoded)
        except OSError as error:
            raise RankLost(self._losses.explain() or str(error)) from error


class _Losses:
    """Which ranks have ended before they were let go."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_any = threading.Event()
        self.is_expected = False

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._is_any.set()

    def check(self) -> None:
        if self._lines:
            raise RankLost(self._lines[0])

    def explain(self) -> str | None:
        """What has happened, once it is known; None if it does not get known."""
        return self._lines[0] if self._is_any.wait(_EXIT_STATUS_S) else None


@dataclass(frozen=True)
class _WatchedQueue:
    queue: WorkQueue
    check: Callable[[], None]

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        wait = self.queue.submit(work)

        def checked() -> T:
            result = wait()
            self.check()
            return result

        return checked


def _start(order: RankOrder) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "servekit.engine.worker"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    with contextlib.suppress(OSError):  # It has ended already, which is found out when it is waited for.
        _write(process, _encode(order))
    return process


def _wait_until_started(rank: int, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    if not process.stdout.read(1):
        raise RankLost(f"{_ending(rank, process.wait())} while it was starting")


def _watch(rank: int, process: subprocess.Popen[bytes], losses: _Losses, group: ProcessGroup) -> None:
    status = process.wait()
    if not losses.is_expected:
        losses.add(f"{_ending(rank, status)}; the engine ends with it")
        group.abort()


def _ending(rank: int, status: int) -> str:
    return f"rank {rank} {f'was killed by signal {-status}' if status < 0 else f'ended with status {status}'}"


def _close(processes: Sequence[subprocess.Popen[bytes]], losses: _Losses) -> None:
    """Let the ranks go."""
    losses.is_expected = True
    for process in processes:
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _write(process: subprocess.Popen[bytes], encoded: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(encoded)
    process.stdin.flush()


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, in a tenth of the time."""

    dispatch_table: Any = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}  # noqa: RUF012 - as pickle asks


def _encode(message: ToRank) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()
