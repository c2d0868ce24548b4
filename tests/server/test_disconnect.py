"""Clients that leave: what they asked for ends, wherever it is, and the next request is served."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.fake_engine import LiveServer, Script
from server.raw_http import JSON, request

BODIES = {"/v1/completions": {"prompt": "x", "max_tokens": 200},
          "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}}


@contextmanager
def sent(server: LiveServer, path: str, **fields: object) -> Iterator[socket.socket]:
    """A connection on which a request was sent, closed at the end of the block without reading the answer."""
    body = json.dumps({**BODIES[path], **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


def aborted_total(server: LiveServer) -> float:
    value = server.service.serving.metrics.registry.get_sample_value(
        "servekit:request_success_total", {"model_name": "fake", "finished_reason": "abort"})
    return value or 0.0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("script", [Script(first_delay_s=60), Script(delay_s=0.01)], ids=["waiting", "running"])
def test_leaving_ends_the_request(server: LiveServer, path: str, stream: bool, n: int, script: Script) -> None:
    engine, before = server.engine, aborted_total(server)
    engine.script = lambda _: script
    with sent(server, path, stream=stream, n=n):
        server.wait_until(lambda: len(engine.submitted) == n)
        if not script.first_delay_s:
            server.wait_until(lambda: engine.tokens_made > 0)
    server.wait_until(lambda: engine.num_running == 0)
    assert sorted(engine.aborted) == sorted(spec.request_id for spec in engine.submitted)
    server.wait_until(lambda: aborted_total(server) == before + n)
    engine.script = lambda _: Script()
    assert request(server, "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}).encode())[0] == 200


def test_leaving_in_the_middle_of_a_stream(server: LiveServer) -> None:
    server.engine.script = lambda _: Script(delay_s=0.01)
    with sent(server, "/v1/completions", stream=True) as connection:
        assert b"200 OK" in connection.recv(4096)
    server.wait_until(lambda: len(server.engine.aborted) == 1)


def test_leaving_before_the_body_is_complete(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as 499, and nothing is wrong."""
    def num_left() -> float:
        return server.service.serving.metrics.registry.get_sample_value("servekit:http_requests_total", {
            "method": "POST", "handler": "/v1/completions", "status": "499"}) or 0.0

    before = num_left()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\"")
    server.wait_until(lambda: num_left() == before + 1)
    assert not server.engine.submitted
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_many_that_leave_at_random(server: LiveServer) -> None:
    server.engine.script = lambda _: Script(delay_s=0.002)

    async def one(number: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "x", "max_tokens": 100, "stream": number % 2 == 0}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(number % 7 * 0.02)
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(100)))

    asyncio.run(all_of_them())
    server.wait_until(lambda: server.engine.num_running == 0 and server.service.lifecycle.num_in_flight == 0)
    assert request(server, "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 5}).encode())[0] == 200


def test_a_finished_request_is_not_aborted(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for stream in (False, True):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": stream}), JSON)
        assert connection.getresponse().read()
    connection.close()
    assert server.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_id(server: LiveServer, stream: bool) -> None:
    server.engine.script = lambda _: Script(first_delay_s=60)
    with sent(server, "/v1/completions", request_id="mine", stream=stream, n=2) as connection:
        server.wait_until(lambda: len(server.engine.submitted) == 2)
        assert request(server, "/abort_request", b'{"request_id": "nobody"}') == (200, {"num_aborted": 0})
        assert request(server, "/abort_request", b'{"request_id": "cmpl-mine"}') == (200, {"num_aborted": 2})
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert (reply.status, reply.headers["x-request-id"]) == (499, "mine")
        assert json.loads(reply.read())["error"]["code"] == "request_aborted"
    assert request(server, "/abort_request", b'{"request_id": "mine"}') == (200, {"num_aborted": 0})
