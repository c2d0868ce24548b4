"""What every HTTP request passes: an id, the API key, the server's phase, a count, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
import re
import secrets
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.server.errors import ApiError, ErrorCode
from servekit.server.service import Service

log = logging.getLogger(__name__)
access_log = logging.getLogger("servekit.access")

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"})
"""Asked every few seconds by machines: public, answered in every phase, and kept out of the access log."""
PUBLIC = PROBES | {"/", "/version", "/favicon.ico"}
"""Paths that need no API key."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._admit(exchange)
            with self._service.lifecycle.request():
                await self._app(scope, receive, exchange.send)
        except ApiError as error:
            await error.response()(scope, receive, exchange.send)
        except ClientDisconnect:
            pass  # it left before its request was complete; there is nobody to answer
        except Exception:
            log.exception("unexpected error in %s %s (request %s)", scope["method"], scope["path"],
                          exchange.request_id)
            if exchange.status is None:
                failure = ApiError(ErrorCode.internal_error, "the server failed to answer; its log says why")
                await failure.response()(scope, receive, exchange.send)
        finally:
            self._record(exchange)

    def _admit(self, exchange: _Exchange) -> None:
        """Give the request its id; raise ApiError for a bad id, a wrong key, or a server that takes no requests."""
        headers, path = Headers(scope=exchange.scope), exchange.scope["path"]
        given = headers.get("x-request-id")
        if given is not None and not REQUEST_ID.fullmatch(given):
            raise ApiError(ErrorCode.invalid_header, "X-Request-Id: must be 1 to 128 visible ASCII characters")
        exchange.state["request_id"] = given or uuid.uuid4().hex
        if path in PUBLIC:
            return
        self._check_key(headers.get("authorization", ""))
        if exchange.scope["method"] == "POST":
            self._service.check_serving()

    def _check_key(self, authorization: str) -> None:
        key = self._service.api_key
        if key is None:
            return
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(ErrorCode.invalid_api_key, "a valid API key is required: send the header Authorization: "
                           "Bearer <key>", headers={"www-authenticate": "Bearer"})

    def _record(self, exchange: _Exchange) -> None:
        """Count and log what was answered; a client that left before its answer shows as 499."""
        scope, status = exchange.scope, exchange.status or 499
        handler = getattr(scope.get("route"), "path", "none")
        self._service.answered(scope["method"], handler, status)
        if scope["path"] not in PROBES:
            duration_s = time.monotonic() - exchange.started_s
            facts = {"status": status, "duration_s": round(duration_s, 4), "request_id": exchange.request_id}
            generation = exchange.state.get("generation")
            if generation is not None:
                facts.update(generation.log_record())
            access_log.info("%s %s", scope["method"], scope["path"], extra={"facts": facts})


class _Exchange:
    """One request and what became of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.state: dict[str, Any] = scope.setdefault("state", {})
        """Shared with the routes: they find the `request_id` there, and may leave a `generation`."""
        self.started_s = time.monotonic()
        self.status: int | None = None
        self._send = send

    @property
    def request_id(self) -> str:
        """The client's, from its header or its body, or ours."""
        return str(self.state.get("request_id", ""))

    async def send(self, message: Message) -> None:
        """Pass a message on; the response's start gets the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.request_id:
                MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)
