"""The routes: an OpenAI-compatible API, and what operators and tools ask a server."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from servekit.config.resolve import config_hash, flatten
from servekit.config.schema import ServerConfig
from servekit.engine.client import EngineUnavailable
from servekit.server import protocol
from servekit.server.answer import ChatStyle, CompletionStyle, respond
from servekit.server.body import read_json
from servekit.server.errors import ApiError, ErrorCode
from servekit.server.gate import Gate
from servekit.server.intake import Ticket
from servekit.server.service import Service
from servekit.server.tenant import tenant_of

PAGE = Path(__file__).with_name("static") / "index.html"
NOT_IMPLEMENTED = ("/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/messages", "/v1/audio/{rest:path}",
                   "/v1/images/{rest:path}", "/v1/files", "/v1/batches", "/v1/fine_tuning/{rest:path}",
                   "/v1/rerank", "/v1/score")
"""What other servers with this API offer; asked for here it gets 501 and its name, rather than a bare 404."""
INLINE_BYTES = 8 * 1024
"""Bodies up to this size are tokenised on the event loop, in a few milliseconds at most."""
BODIES: Mapping[str, Sequence[type[msgspec.Struct]]] = {
    "/v1/completions": [protocol.CompletionBody], "/v1/chat/completions": [protocol.ChatBody],
    "/tokenize": [protocol.TokenizeBody, protocol.TokenizeChatBody], "/detokenize": [protocol.DetokenizeBody],
    "/abort_request": [protocol.AbortBody]}
"""What each POST route takes."""
DESCRIBED = ("/v1/models", "/v1/models/{model:path}", "/version", "/server_info", "/tokenizer_info")
"""GET routes that /openapi.json shows beside the POST routes."""
PRIORITY_MEANING = ("the class of a request, lower is sooner; honoured by scheduler/policy=priority and for the "
                    "classes of scheduler.admission.classes, otherwise refused unless it is 0")
MAX_TOKENS_MEANING = ("an upper bound: output ends with finish_reason length at max_tokens or at max_model_len, "
                      "whichever comes first; a prompt of max_model_len tokens or more is refused")
Result = TypeVar("Result")


def create_app(service: Service) -> FastAPI:
    """The ASGI application of a server."""
    app = FastAPI(title="servekit", version=version(), docs_url=None, redoc_url=None)
    routes = Routes(service)
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    for path, handler, methods in routes.table():
        app.add_api_route(path, handler, methods=methods, include_in_schema=path in DESCRIBED or methods == ["POST"])
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Put the bodies, which msgspec checks, into /openapi.json, which FastAPI writes."""
    place = "#/components/schemas/"
    bodies = [body for kinds in BODIES.values() for body in kinds]
    _, components = msgspec.json.schema_components(bodies, ref_template=place + "{name}")
    document = app.openapi()
    for path, kinds in BODIES.items():
        schema = {"anyOf": [{"$ref": place + kind.__name__} for kind in kinds]}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": schema}}}
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)


def version() -> str:
    """The installed version of servekit."""
    return importlib.metadata.version("servekit")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Routing errors in the same shape as all others."""
    assert isinstance(error, HTTPException)
    code = ErrorCode.method_not_allowed if error.status_code == 405 else ErrorCode.not_found
    text = "does not support this method" if error.status_code == 405 else "no such path"
    return ApiError(code, f"{request.method} {request.url.path[:200]}: {text}",
                    headers=dict(error.headers or {})).response()


Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[tuple[str, Handler, list[str]]]:
        """Path, handler and methods of every route."""
        probe, get, post = ["GET", "HEAD"], ["GET"], ["POST"]
        routes: list[tuple[str, Handler, list[str]]] = [
            ("/", self.page, get),
            ("/health", self.health, probe),
            ("/ping", self.health, probe),
            ("/v2/health/live", self.health, probe),
            ("/ready", self.ready, probe),
            ("/v2/health/ready", self.ready, probe),
            ("/metrics", self.metrics, get),
            ("/version", self.version, get),
            ("/server_info", self.server_info, get),
            ("/tokenizer_info", self.tokenizer_info, get),
            ("/v1/models", self.models, get),
            ("/v1/models/{model:path}", self.model, get),
            ("/v1/completions", self.completions, post),
            ("/v1/chat/completions", self.chat, post),
            ("/tokenize", self.tokenize, post),
            ("/detokenize", self.detokenize, post),
            ("/abort_request", self.abort_request, post),
        ]
        if self._service.config.server.dev_endpoints:
            routes.append(("/reset_prefix_cache", self.reset_prefix_cache, post))
        return routes + [(path, self.not_implemented, ["GET", "POST"]) for path in NOT_IMPLEMENTED]

    # Generation.

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        arrived_s, data = time.monotonic(), await self._json(request)
        body = protocol.parse(protocol.CompletionBody, data, self._server.unknown_fields)
        ticket, serving = self._ticket(request, body, arrived_s), self._service.serving
        job = await self._prepared(request, lambda: serving.intake.completion(body, ticket))
        return await respond(request, job, CompletionStyle(job, serving.model), _stream_of(body), self._service)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrived_s, data = time.monotonic(), await self._json(request)
        body = protocol.parse(protocol.ChatBody, data, self._server.unknown_fields)
        ticket, serving = self._ticket(request, body, arrived_s), self._service.serving
        job = await self._prepared(request, lambda: serving.intake.chat(body, ticket))
        return await respond(request, job, ChatStyle(job, serving.model), _stream_of(body), self._service)

    async def abort_request(self, request: Request) -> Response:
        """End a request by its id."""
        body = protocol.parse(protocol.AbortBody, await self._json(request), self._server.unknown_fields)
        return _json({"num_aborted": self._service.abort(body.request_id)})

    # The model and its tokenizer.

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The same by its name."""
        self._service.serving.intake.check_model(request.path_params["model"])
        return _json(self._card())

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of a conversation after the chat template."""
        data = await self._json(request)
        unknown = self._server.unknown_fields
        body = (protocol.parse(protocol.TokenizeChatBody, data, unknown) if "messages" in data
                else protocol.parse(protocol.TokenizeBody, data, unknown))
        serving = self._service.serving
        serving.intake.check_model(body.model)
        ids = await self._prepared(request, lambda: serving.intake.tokenize(body))
        answer = {"count": len(ids), "max_model_len": serving.model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [serving.model.tokenizer.token_text(token_id) for token_id in ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = protocol.parse(protocol.DetokenizeBody, await self._json(request), self._server.unknown_fields)
        serving = self._service.serving
        serving.intake.check_model(body.model)
        serving.intake.check_token_ids(body.tokens, "tokens")
        return _json({"prompt": serving.model.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and chat template, for tools that tokenise by themselves."""
        model = self._service.serving.model
        special = {f"{role}_token": token.text if token else None
                   for role, token in (("bos", model.tokenizer.bos), ("eos", model.tokenizer.eos),
                                       ("pad", model.tokenizer.pad))}
        return _json({**special, "eos_token_ids": list(model.tokenizer.eos_token_ids),
                      "vocab_size": model.tokenizer.vocab_size, "model_max_length": model.max_model_len,
                      "chat_template": model.chat_template.source if model.chat_template else None})

    # For operators.

    async def health(self, request: Request) -> Response:
        """200 while the engine works, draining or not; 503 while it loads or after it has died."""
        return self._probed(self._service.is_healthy)

    async def ready(self, request: Request) -> Response:
        """200 while requests are taken."""
        return self._probed(self._service.is_ready)

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        body, content_type = self._service.serving.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """The installed version."""
        return _json({"version": version()})

    async def server_info(self, request: Request) -> Response:
        """The resolved configuration, what was measured at the start, and the state of the engine now."""
        serving, config = self._service.serving, self._service.config
        return _json({
            "version": version(),
            "config": flatten(config), "config_hash": config_hash(config),
            "engine": {**asdict(serving.engine.facts), "kv_tokens": serving.engine.facts.kv_tokens},
            "state": serving.engine.state.value, "phase": self._service.lifecycle.phase.value,
            "stats": asdict(serving.engine.stats),
            "priority": PRIORITY_MEANING, "max_tokens": MAX_TOKENS_MEANING})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes; only with server.dev_endpoints."""
        try:
            num_blocks = await self._service.serving.engine.reset_prefix_cache()
        except EngineUnavailable as error:
            raise ApiError(ErrorCode.engine_unavailable, str(error)) from None
        return _json({"num_blocks_forgotten": num_blocks})

    async def page(self, request: Request) -> Response:
        """A page to chat with the model."""
        return FileResponse(PAGE, media_type="text/html")

    async def not_implemented(self, request: Request) -> Response:
        """What other servers of this API have and this one does not."""
        raise ApiError(ErrorCode.not_implemented, f"{request.url.path} is not implemented by this server; it has "
                       "/v1/completions and /v1/chat/completions")

    # Shared steps.

    @property
    def _server(self) -> ServerConfig:
        return self._service.config.server

    def _ticket(self, request: Request, body: protocol.GenerationBody, arrived_s: float) -> Ticket:
        if body.request_id is not None:
            request.state.request_id = body.request_id
        return Ticket(request.state.request_id, self._service.next_engine_id(), arrived_s,
                      tenant_of(request.headers, body.user, self._service.config.scheduler.tenants))

    async def _json(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._server.max_body_bytes)

    async def _prepared(self, request: Request, prepare: Callable[[], Result]) -> Result:
        """The result of `prepare`, which tokenises; for a large body it runs in a thread."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) <= INLINE_BYTES:
            return prepare()
        return await asyncio.get_running_loop().run_in_executor(self._service.tokenising, prepare)

    def _card(self) -> dict[str, object]:
        serving = self._service.serving
        return {"id": serving.model.name, "object": "model", "created": serving.created_s, "owned_by": "servekit",
                "max_model_len": serving.model.max_model_len}

    def _probed(self, is_well: bool) -> Response:
        state = self._service.state_text
        return Response(msgspec.json.encode({"status": "ok" if is_well else state}), 200 if is_well else 503,
                        media_type="application/json")


def _stream_of(body: protocol.GenerationBody) -> protocol.StreamOptions | None:
    """What to stream; None for a whole answer."""
    return (body.stream_options or protocol.StreamOptions()) if body.stream else None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
