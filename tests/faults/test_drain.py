"""SIGTERM: what was accepted is finished or told why not, and the process ends with status 0 and its port free."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.configurations import BUSY, ENDLESS_TOKENS
from faults.serving import COMPLETIONS, Served, read_to_end, read_until, served


@pytest.fixture
def server(endless_model: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A busy server of the test's own."""
    with served(folder, endless_model, *BUSY, f"server.drain_timeout_s={request.param}") as server:
        yield server


def stream_of(num_tokens: int) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


def check_ended(server: Served, engine_pid: int | None) -> None:
    """The server has ended well and left nothing behind."""
    assert server.exit_status() == 0
    assert engine_pid is not None and not Path(f"/proc/{engine_pid}").exists()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(server.address)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("server", [60], indirect=True)
def test_what_was_accepted_is_finished(server: Served) -> None:
    """D06: streams and queue complete; readiness and new requests say 503 at once, while liveness stays."""
    engine_pid = server.engine_pid
    with ExitStack() as stack:
        running = [stack.enter_context(server.sent(COMPLETIONS, stream_of(600))) for _ in range(4)]
        server.wait_until(lambda: server.stats["num_running"] == 4)
        waiting = [stack.enter_context(server.sent(COMPLETIONS, stream_of(30))) for _ in range(4)]
        server.wait_until(lambda: server.stats["num_waiting"] == 4)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/ready").status == 503)
        reply = server.post(COMPLETIONS, {"prompt": "late", "max_tokens": 1})
        assert (reply.status, reply.error["code"]) == (503, "draining") and "retry-after" in reply.headers
        assert server.get("/health").status == 200
        texts = [read_to_end(connection) for connection in (*running, *waiting)]
    for text, num_tokens in zip(texts, [600] * 4 + [30] * 4, strict=True):
        assert text.count('"finish_reason":"length"') == 1 and "data: [DONE]" in text and '"error"' not in text
        assert 10 < text.count("data: ") <= num_tokens + 2
    check_ended(server, engine_pid)


@pytest.mark.parametrize(("server", "num_signals"), [(60, 2), (1, 1)], ids=["second signal", "limit of one second"],
                         indirect=["server"])
def test_what_cannot_be_finished_ends_with_an_error(server: Served, num_signals: int) -> None:
    """D06: after a second signal or the drain's limit, streams get an error and [DONE], not a cut connection."""
    engine_pid = server.engine_pid
    with ExitStack() as stack:
        running = [stack.enter_context(server.sent(COMPLETIONS, stream_of(ENDLESS_TOKENS))) for _ in range(4)]
        beginnings = [read_until(connection, 3) for connection in running]
        waiting = stack.enter_context(server.sent(COMPLETIONS, {**stream_of(5), "stream": False}))
        server.wait_until(lambda: server.stats["num_waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        if num_signals == 2:
            server.wait_until(lambda: server.get("/ready").status == 503)
            server.process.send_signal(signal.SIGTERM)
        texts = [read_to_end(connection, data) for connection, data in zip(running, beginnings, strict=True)]
        answer = read_until(waiting, 1, b"draining")
    for text in texts:
        last = [line for line in text.splitlines() if line.startswith("data: ")][-2:]
        assert '"code":"draining"' in last[0] and last[1] == "data: [DONE]"
        assert '"finish_reason":"' not in text
    assert b" 503 " in answer
    check_ended(server, engine_pid)


@pytest.mark.parametrize("server", [60], indirect=True)
def test_an_idle_server_ends_at_once(server: Served) -> None:
    """D06: nothing to drain."""
    engine_pid = server.engine_pid
    server.process.send_signal(signal.SIGINT)
    check_ended(server, engine_pid)
