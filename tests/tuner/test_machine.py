"""How much of the machine others use, read from /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.tuner import machine
from servekit.tuner.machine import MachineUse

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that works for half a second of processor time when it is given a line, and then says so."""
    code = ("import sys, time\nfor _ in sys.stdin:\n    t = time.process_time()\n"
            "    while time.process_time() - t < 0.5: pass\n    print(flush=True)")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def work(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    worker.stdout.readline()


def test_an_engines_own_work_does_not_count_as_that_of_others(worker: subprocess.Popen[bytes]) -> None:
    """Whatever else goes on here, both look at the same moments: the difference is the worker's half second."""
    with_it, without = MachineUse(lambda: [worker.pid]), MachineUse(list)
    with_it.start()
    without.start()
    work(worker)
    shares = with_it.share_of_others(), without.share_of_others()
    assert None not in shares
    assert 0 <= shares[0] < shares[1] <= 1  # type: ignore[operator]


def test_nothing_is_claimed_without_a_start() -> None:
    assert MachineUse(list).share_of_others() is None


def test_nothing_is_claimed_of_a_process_that_is_gone() -> None:
    use = MachineUse(lambda: [2 ** 22 + 1])
    use.start()
    assert use.share_of_others() is None


def test_nothing_is_claimed_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    use = MachineUse(list)
    use.start()
    assert use.share_of_others() is None
