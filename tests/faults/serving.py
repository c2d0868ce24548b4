"""Real `servekit serve` processes with a tiny random model, seen from outside: HTTP, metrics, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0
"""How long a test waits for what must happen; only a failure takes that long."""
COMMAND = (sys.executable, "-c", "import sys; from servekit.cli import main; sys.exit(main())")
"""`servekit`, of the environment that runs the tests."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Json:
        """The body's error, which has OpenAI's shape."""
        error: Json = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"], error
        return error

    @property
    def events(self) -> list[Json]:
        """What a stream said; [DONE] must be its last word."""
        lines = [line for line in self.text.split("\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-3:]
        assert all(line.startswith("data: ") for line in lines), lines
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass
class Served:
    """A server and how to ask it."""

    process: subprocess.Popen[bytes]
    log_path: Path
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    # Asking.

    def get(self, path: str) -> Reply:
        return self._ask(urllib.request.Request(self.url + path, headers=self.headers))

    def post(self, path: str, body: Json | bytes, headers: Mapping[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask(urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **self.headers, **(headers or {})}))

    def _ask(self, request: urllib.request.Request) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return _reply(answer.status, answer.headers.items(), answer.read())
        except urllib.error.HTTPError as error:
            return _reply(error.code, error.headers.items(), error.read())

    def together(self, bodies: Sequence[Json], path: str = COMPLETIONS) -> list[Reply]:
        """The answers to requests that are all sent at once."""
        return asyncio.run(self._together([(path, body) for body in bodies]))

    def together_anywhere(self, requests: Sequence[tuple[str, Json]]) -> list[Reply]:
        """The same for (path, body)."""
        return asyncio.run(self._together(requests))

    async def _together(self, requests: Sequence[tuple[str, Json]]) -> list[Reply]:
        async with self.session() as session:
            return await asyncio.gather(*(post(session, path, body) for path, body in requests))

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, headers=self.headers, connector=aiohttp.TCPConnector(limit=0),
                                     timeout=aiohttp.ClientTimeout(PATIENCE_S))

    @contextmanager
    def sent(self, path: str, body: Json) -> Iterator[socket.socket]:
        """A connection on which a request was sent; closed at the end of the block, whatever has been read."""
        data = json.dumps(body).encode()
        head = (f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n")
        with socket.create_connection(self.address, timeout=PATIENCE_S) as connection:
            connection.sendall(head.encode() + data)
            yield connection

    @contextmanager
    def openai(self) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield client

    # Looking inside.

    @property
    def info(self) -> Json:
        reply = self.get("/server_info")
        assert reply.status == 200, reply.text
        info: Json = reply.json
        return info

    @property
    def stats(self) -> Json:
        """Counters and gauges of the engine."""
        stats: Json = self.info["stats"]
        return stats

    @property
    def num_in_engine(self) -> int:
        """Requests that run or wait."""
        stats = self.stats
        return int(stats["num_running"] + stats["num_waiting"])

    def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics, 0 if it is not there."""
        return metric_in(self.get("/metrics").text, name, **labels)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, if there is one."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _is_engine_of(folder, self.process.pid):
                return int(folder.name)
        return None

    @property
    def rss_bytes(self) -> int:
        """Memory of the server and its engine."""
        return sum(_rss_bytes(pid) for pid in (self.process.pid, self.engine_pid) if pid is not None)

    # Waiting.

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: self.log[-3000:])

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits and no KV block is held."""
        def is_idle() -> bool:
            stats = self.stats
            return not any(stats[name] for name in ("num_running", "num_waiting", "num_waiting_tokens",
                                                    "kv_blocks_used"))

        self.wait_until(is_idle)

    def check_idle(self, log_start: int = 0) -> None:
        """The invariant that holds after everything: nothing is left, the server serves, and no traceback was logged.

        Args:
            log_start: Characters of the log that are older than the test.
        """
        self.wait_until_idle()
        metrics = self.get("/metrics").text
        assert metric_in(metrics, "num_requests_running") == metric_in(metrics, "num_requests_waiting") == 0
        assert metric_in(metrics, "kv_cache_usage_perc") == 0
        assert self.get("/health").status == self.get("/ready").status == 200
        reply = self.post(COMPLETIONS, {"prompt": "still there?", "max_tokens": 2, "ignore_eos": True})
        assert reply.status == 200 and reply.json["usage"]["completion_tokens"] == 2, reply.text
        _, found, traceback = self.log[log_start:].partition("Traceback")
        assert not found, traceback[:5000]

    def exit_status(self) -> int:
        """The status with which the server ends by itself."""
        return self.process.wait(PATIENCE_S)


def metric_in(text: str, name: str, **labels: str) -> float:
    """A value of a scrape, 0 if it is not there."""
    full_name = f"servekit:{name}"
    lines = [line for line in text.splitlines() if line.startswith(full_name)]
    samples = [sample for family in text_string_to_metric_families("\n".join(lines)) for sample in family.samples]
    return next((float(sample.value) for sample in samples
                 if sample.name == full_name and labels.items() <= sample.labels.items()), 0.0)


def wait_until(condition: Callable[[], bool], context: Callable[[], str] = lambda: "") -> None:
    """Wait for what must happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, context()
        time.sleep(0.02)


@contextmanager
def served(folder: Path, *settings: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server with these settings; what it logs goes to a file in `folder`."""
    process, log_path = start(folder, *settings, environment=environment)
    try:
        server = Served(process, log_path, _wait_for_url(process, log_path))
        yield server
    finally:
        stop(process)


def start(folder: Path, *settings: str,
          environment: Mapping[str, str] | None = None) -> tuple[subprocess.Popen[bytes], Path]:
    """Begin `servekit serve`."""
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", *settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **(environment or {})})
    return process, log_path


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, at once if need be."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def refusal(folder: Path, *settings: str) -> tuple[int, str]:
    """Exit status and last line of a server that does not start."""
    process, log_path = start(folder, *settings)
    try:
        status = process.wait(PATIENCE_S)
    finally:
        stop(process)
    return status, log_path.read_text().rstrip().rpartition("\n")[2]


def _wait_for_url(process: subprocess.Popen[bytes], log_path: Path) -> str:
    found: list[str] = []

    def is_serving() -> bool:
        found[:] = re.findall(r'serving on (http://[^\s"]+)', log_path.read_text(errors="replace"))
        assert process.poll() is None, log_path.read_text(errors="replace")
        return bool(found)

    wait_until(is_serving, lambda: log_path.read_text(errors="replace"))
    return found[0]


async def post(session: aiohttp.ClientSession, path: str, body: Json) -> Reply:
    async with session.post(path, json=body) as answer:
        return _reply(answer.status, answer.headers.items(), await answer.read())


def run(body: Awaitable[None]) -> None:
    """Run a test's coroutine, but not for ever."""
    asyncio.run(asyncio.wait_for(body, 2 * PATIENCE_S))


def read_until(connection: socket.socket, count: int, what: bytes = b"data: ") -> bytes:
    """What comes on a connection until `what` has come `count` times."""
    data = b""
    while data.count(what) < count:
        received = connection.recv(65536)
        assert received, data
        data += received
    return data


def read_to_end(connection: socket.socket, data: bytes = b"") -> str:
    """Everything that comes until the stream's last word or the end of the connection."""
    while b"data: [DONE]" not in data and (received := connection.recv(65536)):
        data += received
    return data.decode()


def _reply(status: int, headers: Any, body: bytes) -> Reply:
    return Reply(status, {name.lower(): value for name, value in headers}, body.decode())


def _is_engine_of(folder: Path, parent: int) -> bool:
    try:
        status = (folder / "status").read_text()
        command = (folder / "cmdline").read_bytes()
    except OSError:
        return False  # it has ended meanwhile
    return f"\nPPid:\t{parent}\n" in status and b"servekit.engine.process" in command and "State:\tZ" not in status


def _rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
