"""An engine that dies or freezes: nobody waits in silence, health says so, and what can be restarted is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from faults.configurations import BUSY, ENDLESS_TOKENS, TINY
from faults.serving import COMPLETIONS, Served, read_to_end, read_until, served, start, stop, wait_until

STREAM = {"prompt": "x", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def fragile_server(endless_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("fragile"), endless_model, *BUSY, "engine.heartbeat_timeout_s=4",
                "engine.max_restarts=50") as server:
        yield server


@pytest.fixture
def fragile(fragile_server: Served) -> Iterator[Served]:
    """A server whose engine comes back as often as a test ends it."""
    log_start = len(fragile_server.log)
    yield fragile_server
    fragile_server.wait_until(lambda: fragile_server.get("/health").status == 200)
    fragile_server.check_idle(log_start)


def signal_engine(server: Served, number: signal.Signals) -> int:
    """Send the engine a signal; returns its process id."""
    pid = server.engine_pid
    assert pid is not None
    os.kill(pid, number)
    return int(pid)


def check_comes_back(server: Served, old_pid: int) -> None:
    """A new engine takes over."""
    server.wait_until(lambda: server.get("/health").status == 200 and server.engine_pid not in (None, old_pid))
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3}).status == 200


def test_a_stream_whose_engine_dies_ends_with_an_error(fragile: Served) -> None:
    """D07, G09b: after some tokens, one error object and [DONE], never a clean-looking end or a cut connection."""
    with fragile.sent(COMPLETIONS, STREAM) as connection:
        data = read_until(connection, 5)
        pid = signal_engine(fragile, signal.SIGKILL)
        text = read_to_end(connection, data)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and text.count('"error"') == 1 and '"finish_reason":"' not in text
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["type"]) == ("generation_failed", "server_error")
    assert "send it again" in error["message"]
    check_comes_back(fragile, pid)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_token_is_a_status(fragile: Served, stream: bool) -> None:
    """D07, G09a: nothing has been said, so even a stream fails with an HTTP status, and the SDK raises."""
    pid = signal_engine(fragile, signal.SIGSTOP)
    with fragile.sent(COMPLETIONS, {**STREAM, "stream": stream}) as connection:
        assert fragile.get("/version").status == 200
        os.kill(pid, signal.SIGKILL)
        answer = read_until(connection, 1, b'"code"')
    assert answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 503")), answer
    assert b"generation_failed" in answer or b"engine_unavailable" in answer
    check_comes_back(fragile, pid)


def test_health_and_requests_say_so_while_the_engine_is_gone(fragile: Served) -> None:
    """D07: 503 on every probe and request until the new engine is ready; the server itself answers all the time."""
    pid = signal_engine(fragile, signal.SIGKILL)
    fragile.wait_until(lambda: fragile.get("/health").status == 503)
    assert fragile.get("/ready").status == 503
    assert fragile.get("/metrics").status == 200
    reply = fragile.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3})
    if reply.status != 200:
        assert (reply.status, reply.error["type"]) == (503, "server_error") and "retry-after" in reply.headers
    check_comes_back(fragile, pid)


def test_a_frozen_engine_is_found_out_and_replaced(fragile: Served) -> None:
    """D07: SIGSTOP. Health turns bad in time, pending requests get an error, a new engine comes."""
    with fragile.sent(COMPLETIONS, STREAM) as connection:
        data = read_until(connection, 5)
        pid = signal_engine(fragile, signal.SIGSTOP)
        fragile.wait_until(lambda: fragile.get("/health").status == 503)
        text = read_to_end(connection, data)
    assert '"code":"generation_failed"' in text and "silent" in text and text.rstrip().endswith(("[DONE]", "0"))
    check_comes_back(fragile, pid)


def test_the_openai_client_raises_when_a_stream_breaks(fragile: Served) -> None:
    """G09: through the SDK that people use."""
    with fragile.openai() as client:
        stream = client.completions.create(model=fragile.get("/v1/models").json["data"][0]["id"], prompt="x",
                                           max_tokens=ENDLESS_TOKENS, stream=True)
        next(iter(stream))
        pid = signal_engine(fragile, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="send it again"):
            for _ in stream:
                pass
    check_comes_back(fragile, pid)


def test_without_restarts_the_server_stays_and_says_that_its_engine_is_dead(folder: Path) -> None:
    """D07: engine.restart=never. Probes and requests say 503 in OpenAI's form; SIGTERM still ends it well."""
    with served(folder, *TINY, "engine.restart=never") as server:
        with server.sent(COMPLETIONS, {**STREAM, "stream": False, "max_tokens": 2000}) as connection:
            server.wait_until(lambda: server.stats["num_running"] == 1)
            signal_engine(server, signal.SIGKILL)
            assert b" 500 " in connection.recv(65536)
        server.wait_until(lambda: server.get("/health").json == {"status": "dead"})
        assert server.get("/health").status == server.get("/ready").status == 503
        with server.openai() as client, pytest.raises(openai.InternalServerError) as error:
            client.completions.create(model="dummy:tiny", prompt="x")
        assert (error.value.status_code, error.value.code) == (503, "engine_unavailable")
        assert server.stats["num_running"] == 0, "nothing runs in a dead engine"
        assert server.metric("num_requests_running") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert "Traceback" not in server.log


def test_a_server_that_may_not_restart_its_engine_ends_with_status_1(folder: Path) -> None:
    """D07: engine.max_restarts is used up. Requests in flight are told before the process ends."""
    with served(folder, *TINY, "engine.max_restarts=0") as server:
        with server.sent(COMPLETIONS, {**STREAM, "max_tokens": 2000}) as connection:
            data = read_until(connection, 3)
            signal_engine(server, signal.SIGKILL)
            assert '"code":"generation_failed"' in read_to_end(connection, data)
        assert server.exit_status() == 1
        assert "Traceback" not in server.log


def test_an_idle_engine_outlives_the_shortest_heartbeat_timeout(folder: Path) -> None:
    """D08, H04: a value that is accepted works: hiccups well below it do not make a healthy engine silent."""
    process, log_path = start(folder, *TINY, "engine.heartbeat_timeout_s=1")
    try:
        wait_until(lambda: process.poll() is not None or "serving on" in log_path.read_text())
        if process.poll() is not None:
            assert process.returncode == 2 and "engine.heartbeat_timeout_s=1.0: must be" in log_path.read_text()
            return
        server = Served(process, log_path, "")
        pid = server.engine_pid
        for _ in range(5):
            signal_engine(server, signal.SIGSTOP)
            time.sleep(0.3)
            signal_engine(server, signal.SIGCONT)
            time.sleep(0.1)
            assert server.engine_pid == pid and "silent" not in server.log, server.log
    finally:
        stop(process)
