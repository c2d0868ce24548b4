"""Starts real servers and loads them, one run after the other; what has been measured is not measured again."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from setups import CAPACITY, LENGTH, SHARES, Load, Setup, closed_load, open_load

_START_LIMIT_S, _STOP_LIMIT_S = 600.0, 60.0


class Row(msgspec.Struct):
    """One request of a result file, as far as the comparison needs it."""

    intended_s: float
    sent_s: float
    ended_s: float
    is_warmup: bool
    output_tokens: int | None
    ttft_s: float | None
    tpot_s: float | None


class Measured(msgspec.Struct):
    """A run's result file, as `servekit bench out=` writes it, and the words it was run with."""

    words: list[str]
    log_offset_bytes: int
    """Where in the setup's step log it begins."""
    summary: dict[str, Any]
    requests: list[Row]


def folder_of(out: Path, setup: Setup) -> Path:
    return out / setup.name.replace(",", "").replace(" ", "-")


def step_log(out: Path, setup: Setup) -> Path:
    return folder_of(out, setup) / "steps.jsonl"


def run_path(out: Path, setup: Setup, load: str) -> Path:
    return folder_of(out, setup) / f"{load}.json"


def measured(out: Path, setup: Setup, load: str) -> Measured:
    return msgspec.json.decode(run_path(out, setup, load).read_bytes(), type=Measured)


def is_measured(out: Path, setup: Setup) -> bool:
    names = (CAPACITY, *(open_load(setup, share, 1.0, 1.0, 0).name for share in SHARES))
    return all(run_path(out, setup, name).exists() for name in names)


def measure(out: Path, setup: Setup, settings: list[str], seconds: float, seed: int, is_over: Any) -> None:
    """All loads of one setup against one server. `is_over()`: whether no further run may begin."""
    if is_measured(out, setup):
        return
    folder_of(out, setup).mkdir(parents=True, exist_ok=True)
    with _server(out, setup, settings) as url:
        _bench(out, closed_load(setup, seconds, seed), url)
        capacity_per_s = measured(out, setup, CAPACITY).summary["throughput"]["requests_per_s"]
        for number, share in enumerate(SHARES, start=1):
            if is_over():
                return
            _bench(out, open_load(setup, share, capacity_per_s, seconds, seed + number), url)


@contextmanager
def _server(out: Path, setup: Setup, settings: list[str]) -> Iterator[str]:
    """A server that is ready; its steps are appended to the setup's log."""
    port = _free_port()
    words = [*LENGTH, *setup.scheduler, *settings, f"server.port={port}", f"engine.step_log={step_log(out, setup)}"]
    with (folder_of(out, setup) / "server.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "servekit", "serve", *words], stdout=log, stderr=log)
        try:
            _wait_until_ready(process, port, setup)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_LIMIT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, setup: Setup) -> None:
    ends_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise SystemExit(f"the server of {setup.name!r} ended with status {process.returncode}; see its server.log")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise SystemExit(f"the server of {setup.name!r} was not ready after {_START_LIMIT_S:.0f} s; see its server.log")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _bench(out: Path, load: Load, url: str) -> None:
    """One run, unless it is there. What bench prints goes to bench.log."""
    path = run_path(out, load.setup, load.name)
    if path.exists():
        return
    print(f"{time.strftime('%H:%M:%S')}  {load.setup.name}, load {load.name}: {load.num_requests} requests, "
          f"{shlex.join(load.arrival)}", flush=True)
    log_offset_bytes = step_log(out, load.setup).stat().st_size
    raw = path.with_suffix(".raw")
    words = ["bench", f"url={url}", *load.words, f"out={raw}", "overwrite=true"]
    with (folder_of(out, load.setup) / "bench.log").open("ab") as log:
        subprocess.run([sys.executable, "-m", "servekit", *words], stdout=log, stderr=log, check=True)
    document = json.loads(raw.read_bytes())
    rows = [msgspec.convert(row, Row) for row in document["requests"]]
    path.write_bytes(msgspec.json.encode(Measured(load.words, log_offset_bytes, document["summary"], rows)))
    raw.unlink()
