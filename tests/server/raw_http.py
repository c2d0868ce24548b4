"""Requests without a client library, for what a library would not send and to see what one would not show."""

from __future__ import annotations

import http.client
import json
from typing import Any

from server.fake_engine import LiveServer

JSON = {"content-type": "application/json"}
Reply = tuple[int, dict[str, Any]]


def request(server: LiveServer, path: str, body: bytes | None, method: str = "POST",
            headers: dict[str, str] | None = None) -> Reply:
    """Status, and the error object or else the whole answer, of one request."""
    status, text, _ = exchange(server, path, method, body, JSON if headers is None else headers)
    return status, json.loads(text)["error"] if status >= 400 else json.loads(text)


def post(server: LiveServer, path: str, **body: object) -> Any:
    """The answer to a request that succeeds."""
    status, answer = request(server, path, json.dumps(body).encode())
    assert status == 200, answer
    return answer


def get(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers."""
    return exchange(server, path, method, None, headers)


def get_json(server: LiveServer, path: str) -> Any:
    """The answer to a GET that succeeds."""
    status, body, _ = get(server, path)
    assert status == 200
    return json.loads(body)


def exchange(server: LiveServer, path: str, method: str, body: bytes | None,
             headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers (their names in lower case) of one request on a connection of its own."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), {k.lower(): v for k, v in response.getheaders()}
    finally:
        connection.close()
