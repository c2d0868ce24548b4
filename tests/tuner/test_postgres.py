"""Two processes that share one study in a real PostgreSQL, where there is one."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

pytest.importorskip("psycopg")
INITDB = shutil.which("initdb")
pytestmark = pytest.mark.skipif(INITDB is None, reason="PostgreSQL is not installed")

WORKER = """
import sys
sys.path[:0] = [sys.argv[1]]
from test_study import *
with opened(Path("."), storage=sys.argv[2], seed=int(sys.argv[3])) as study:
    study.enqueue(BASE, Origin.base)
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(candidate.config_hash for candidate in search(study, 8)))
"""


@pytest.fixture
def url() -> Iterator[str]:
    """A server of its own on a socket in a folder of its own. It refuses to run as root."""
    assert INITDB is not None
    user = next((name for name in ("postgres", "nobody") if os.getuid() == 0 and has_user(name)), None)
    folder = Path(tempfile.mkdtemp())
    if user is not None:
        shutil.chown(folder, user)
    binaries = Path(INITDB).resolve().parent
    subprocess.run([INITDB, "-D", folder / "data", "-U", "tuner", "-A", "trust", "--no-sync"], check=True, user=user,
                   stdout=subprocess.DEVNULL, cwd=folder)
    with (folder / "log").open("w") as log, subprocess.Popen(
            [binaries / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-F"],
            stdout=log, stderr=log, user=user, cwd=folder) as server:
        try:
            wait_until_ready(binaries / "pg_isready", folder)
            yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    shutil.rmtree(folder)


def has_user(name: str) -> bool:
    return any(entry.pw_name == name for entry in pwd.getpwall())


def wait_until_ready(pg_isready: Path, folder: Path) -> None:
    for _ in range(200):
        if subprocess.run([pg_isready, "-h", folder], stdout=subprocess.DEVNULL, check=False).returncode == 0:
            return
        subprocess.run(["sleep", "0.2"], check=True)
    raise AssertionError((folder / "log").read_text())


def test_two_processes_share_a_study(url: str, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    command = [sys.executable, program, Path(__file__).parent, url]
    workers = []
    for seed in ("1", "2"):
        workers.append(subprocess.Popen([*command, seed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        cwd=tmp_path))
        assert workers[-1].stdout is not None
        assert workers[-1].stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    measured = [worker.communicate(timeout=200)[0].split() for worker in workers]
    assert [len(hashes) for hashes in measured] == [8, 8]
    both = [*measured[0], *measured[1]]
    assert len(set(both)) >= len(both) - 1, "only two that began at the same moment may be equal"
    trials = optuna.load_study(study_name="tune", storage=url).trials
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    assert sum(trial.user_attrs.get("origin") == "base" for trial in trials) == 1
