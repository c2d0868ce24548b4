"""A server that speaks just enough of the OpenAI API, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import web

Answer = Callable[["Exchange"], Awaitable[web.StreamResponse]]


class Exchange:
    """One request to the mock and the means to answer it."""

    def __init__(self, request: web.Request, body: dict[str, Any], index: int) -> None:
        self.request = request
        self.body = body
        self.index = index
        """Its place among the requests that the server got."""
        self._response: web.StreamResponse | None = None

    async def send(self, payload: object) -> None:
        """Send one event."""
        await self.send_raw(b"data: " + json.dumps(payload).encode() + b"\n\n")

    async def send_raw(self, content: bytes) -> None:
        """Send bytes as they are."""
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._response.prepare(self.request)
        await self._response.write(content)

    async def done(self) -> web.StreamResponse:
        """End the answer as the API does."""
        await self.send_raw(b"data: [DONE]\n\n")
        assert self._response is not None
        return self._response

    def cut(self) -> web.StreamResponse:
        """Close the socket in the middle of the answer."""
        assert self.request.transport is not None and self._response is not None
        self.request.transport.close()
        return self._response

    @property
    def response(self) -> web.StreamResponse:
        """The answer so far; returning it ends the stream cleanly."""
        assert self._response is not None
        return self._response


def text(content: str, finish_reason: str | None = None, **usage: int) -> dict[str, Any]:
    """A chunk of a completion, with the usage so far if one is given."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]}
    return chunk | ({"usage": usage} if usage else {})


async def one_token_a_chunk(exchange: Exchange) -> web.StreamResponse:
    """What a well-behaved server answers: every token with the usage so far, then the total."""
    wanted, prompt = exchange.body["max_tokens"], len(exchange.body["prompt"])
    for i in range(wanted):
        await exchange.send(text(" a", "length" if i == wanted - 1 else None,
                                 prompt_tokens=prompt, completion_tokens=i + 1))
    await exchange.send({"choices": [], "usage": {
        "prompt_tokens": prompt, "completion_tokens": wanted, "prompt_tokens_details": {"cached_tokens": 3}}})
    return await exchange.done()


class MockOpenAI:
    """The server, on a free port, in a thread of its own so that it shares no event loop with its client."""

    def __init__(self, answer: Answer = one_token_a_chunk) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> MockOpenAI:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        stuck = asyncio.all_tasks() - {asyncio.current_task()}
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock"}, {"id": "other"}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return await self._answer(Exchange(request, self.bodies[-1], len(self.bodies) - 1))
