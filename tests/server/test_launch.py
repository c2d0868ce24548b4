"""`servekit serve` as a process with a real engine: loading, draining, ending, and why it cannot start."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

STARTUP_LIMIT_S = 120.0
SETTINGS = ("model=custom", "model.source=dummy:tiny", "memory.num_kv_blocks=256", "engine.threads=1")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def get(self, path: str) -> int:
        """The status of a GET; 0 if nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def post(self, **body: object) -> tuple[int, str]:
        """Status and body of a completion request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def wait_for(self, path: str, status: int) -> None:
        deadline_s = time.monotonic() + STARTUP_LIMIT_S
        while self.get(path) != status:
            assert self.process.poll() is None, f"it ended: {self.log}"
            assert time.monotonic() < deadline_s, f"no {status} from {path}: {self.log}"
            time.sleep(0.02)

    def exit_status(self) -> int:
        return self.process.wait(60)

    @property
    def log(self) -> str:
        return "".join(self.lines)


def start(*settings: str, port: int, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    program = "import sys; from servekit.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", *SETTINGS, f"server.port={port}", *settings]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, **(env or {})})


@contextlib.contextmanager
def served(*settings: str) -> Iterator[Served]:
    """A server process, killed at the end of the block unless it has ended."""
    port = free_port()
    process = start(*settings, port=port)
    server = Served(process, port)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: server.lines.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(10)


def in_thread(server: Served, results: list[tuple[int, str]], **body: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(server.post(**body)))
    thread.start()
    return thread


def test_from_loading_to_the_end_of_a_drain() -> None:
    with served("scheduler.max_num_seqs=2", "server.stats_interval_s=0.2") as server:
        server.wait_for("/health", 503)
        assert server.get("/ready") == 503
        assert server.post(prompt="x")[0] == 503
        server.wait_for("/ready", 200)
        status, body = server.post(prompt="x", max_tokens=5, temperature=0)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 5)

        results: list[tuple[int, str]] = []
        threads = [in_thread(server, results, prompt="x", max_tokens=600, ignore_eos=True, stream=stream)
                   for stream in (False, True, False, True)]
        while "running 2" not in server.log:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("/ready", 503)
        assert server.get("/health") == 200
        status, body = server.post(prompt="x")
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        for thread in threads:
            thread.join()
        assert [status for status, _ in results] == [200] * 4
        for _, text in results:
            assert text.endswith("data: [DONE]\n\n") or json.loads(text)["usage"]["completion_tokens"] == 600
        assert server.exit_status() == 0
        assert server.get("/health") == 0
    assert f"serving on http://127.0.0.1:{server.port}" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("ending", ["limit", "second signal"])
def test_a_drain_that_is_cut_short(ending: str) -> None:
    limit = "0.3" if ending == "limit" else "60"
    with served(f"server.drain_timeout_s={limit}") as server:
        server.wait_for("/ready", 200)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.read1(1000)[:6]) == (200, b"data: ")
        server.process.send_signal(signal.SIGINT)
        if ending == "second signal":
            server.wait_for("/ready", 503)
            server.process.send_signal(signal.SIGINT)
        *_, error, done, _ = response.read().split(b"\n\n")
        assert server.exit_status() == 0
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "draining"
    assert done == b"data: [DONE]"


def test_a_signal_while_loading() -> None:
    with served() as server:
        server.wait_for("/health", 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0


def test_an_engine_that_is_lost_for_good_ends_the_server() -> None:
    with served("engine.max_restarts=0") as server:
        server.wait_for("/ready", 200)
        processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
        (engine,) = [int(path.name) for path in processes if is_child(path, server)]
        os.kill(engine, signal.SIGKILL)
        assert server.exit_status() == 1


def is_child(process: Path, server: Served) -> bool:
    try:
        return f"PPid:\t{server.process.pid}\n" in (process / "status").read_text()
    except OSError:
        return False


def one_line(process: subprocess.Popen[str], status: int) -> str:
    """The line that a server which cannot start ends with."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output.splitlines()[-1]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = one_line(start(port=port), 3)
    assert f"server.port={port}" in line
    assert "another process listens" in line


def test_an_address_of_another_machine() -> None:
    assert "server.host=192.0.2.1" in one_line(start("server.host=192.0.2.1", port=0), 3)


def test_a_key_that_is_not_set() -> None:
    line = one_line(start("server.api_key_env=NO_SUCH_VARIABLE", port=0), 2)
    assert line.startswith("servekit: server.api_key_env=NO_SUCH_VARIABLE")


def test_a_model_that_is_not_there() -> None:
    assert "model.source" in one_line(start("model.source=/no/such/model.gguf", port=0), 2)


def test_the_server_process_never_imports_torch() -> None:
    code = "import sys, servekit.server.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
