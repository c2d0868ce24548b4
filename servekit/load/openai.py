"""An OpenAI-compatible endpoint as a target of load, over HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from servekit.config.bench import BenchConfig, Endpoint
from servekit.config.errors import ConfigError
from servekit.load.sse import EventParser
from servekit.load.target import Failure, FailureKind, Observation, RequestFailed
from servekit.load.words import COMMON_WORDS
from servekit.load.workload import WorkloadRequest

_PROBE_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
"""Idle connections are dropped before a server drops them (after 5 s and more, usually), so that no request is sent
on a connection that is just being closed."""
_ERROR_TEXT_BYTES = 300
_DONE = b"[DONE]"
_JSON = {"Content-Type": "application/json"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    """Text that a thinking model writes before its answer: output like any other."""


class _Choice(msgspec.Struct):
    text: str | None = None
    """Of a completion."""
    delta: _Delta | None = None
    """Of a chat completion."""
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What every request body has in common."""

    endpoint: Endpoint
    model: str
    ignore_eos: bool = True
    temperature: float | None = 0.0
    continuous_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    tenant_header: str | None = None

    @classmethod
    def of(cls, config: BenchConfig, model: str) -> RequestOptions:
        """The options that a configuration asks for."""
        return cls(config.endpoint, model, config.ignore_eos, config.temperature, config.continuous_usage,
                   config.extra_body, config.tenant_header)

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """The JSON body of one request."""
        prompt: dict[str, Any] = {"prompt": request.prompt_token_ids}
        if self.endpoint is Endpoint.chat:
            prompt = {"messages": [{"role": "user", "content": as_text(request.prompt_token_ids)}]}
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output_tokens, "stream": True,
                "stream_options": {"include_usage": True}, **prompt}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if request.tenant and self.tenant_header is None:
            body["user"] = request.tenant
        if request.priority is not None:
            body["priority"] = request.priority
        if request.predicted_output_tokens is not None:
            body["predicted_output_tokens"] = request.predicted_output_tokens
        return body | self.extra_body

    def headers(self, request: WorkloadRequest) -> dict[str, str]:
        """Its HTTP headers, beside those of the session."""
        named = self.tenant_header is not None and request.tenant != ""
        return {**_JSON, self.tenant_header: request.tenant} if named else _JSON  # type: ignore[dict-item]


def as_text(token_ids: Sequence[int]) -> str:
    """A text of as many common words as there are ids. Equal leading ids give equal leading words."""
    return " ".join(COMMON_WORDS[token_id % len(COMMON_WORDS)] for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself."""

    model: str
    """Model that the requests ask for."""
    version: Any = None
    """Answer of /version; None if there is none."""
    server_info: Any = None
    """Answer of /server_info; None if there is none."""


def open_session(url: str, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session for one server, without a limit on connections, so that no request waits in the client."""
    return aiohttp.ClientSession(
        base_url=url.rstrip("/") + "/",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None))


async def ask_facts(session: aiohttp.ClientSession, config: BenchConfig) -> ServerFacts:
    """Ask a server what it serves. Raises ConfigError if it cannot be reached or names no model."""
    status, answer = await _get(session, "v1/models", config)
    if status in (401, 403):
        raise ConfigError("api_key_env", config.api_key_env, f"the server refuses the key it gets (HTTP {status})",
                          "set api_key_env to the name of the environment variable that holds its key")
    model = config.model or _first_model(status, answer)
    return ServerFacts(model, await _optional(session, "version", config),
                       await _optional(session, "server_info", config))


def _first_model(status: int, answer: bytes) -> str:
    limit = f"the server does not list its models (GET /v1/models: HTTP {status})"
    if status == 200:
        try:
            return msgspec.json.decode(answer, type=_Models).data[0].id
        except (msgspec.MsgspecError, IndexError):
            limit = "the server lists no model (GET /v1/models)"
    raise ConfigError("model", None, limit, "set model to the name that the server knows, or wait until it is ready")


async def _optional(session: aiohttp.ClientSession, path: str, config: BenchConfig) -> Any:
    status, answer = await _get(session, path, config)
    try:
        return msgspec.json.decode(answer) if status == 200 else None
    except msgspec.MsgspecError:
        return None


async def _get(session: aiohttp.ClientSession, path: str, config: BenchConfig) -> tuple[int, bytes]:
    try:
        async with session.get(path, timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
        raise ConfigError("url", config.url, f"cannot be reached ({_reason(error)})",
                          "start the server or correct the URL") from None


def _reason(error: Exception) -> str:
    """Why a connection failed, without aiohttp's own words around it."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class OpenAITarget:
    """The completions of an OpenAI-compatible server as a `Target`."""

    def __init__(self, session: aiohttp.ClientSession, options: RequestOptions) -> None:
        self._session = session
        self._options = options
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Chunk)
        chat = options.endpoint is Endpoint.chat
        self._path = "v1/chat/completions" if chat else "v1/completions"

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        """Send one request and yield an observation for each event; see `Target`."""
        body = self._encoder.encode(self._options.body(request))
        try:
            async with self._session.post(self._path, data=body, headers=self._options.headers(request)) as response:
                if response.status != 200:
                    text = error_text(await response.read())
                    raise RequestFailed(Failure(FailureKind.status, text, response.status))
                events = EventParser()
                async for received in response.content.iter_any():
                    at_s = time.monotonic()
                    for payload in events.feed(received):
                        if payload == _DONE:
                            return
                        yield self._observation(payload, at_s)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(Failure(FailureKind.connection, _reason(error))) from None

    def _observation(self, payload: bytes, at_s: float) -> Observation:
        try:
            chunk = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise RequestFailed(Failure(FailureKind.protocol, f"{error}: {shortened(payload)}", 200)) from None
        if chunk.error is not None:
            raise RequestFailed(Failure(FailureKind.stream, error_text(payload), 200))
        usage = chunk.usage or _Usage()
        details = usage.prompt_tokens_details or _PromptDetails()
        return Observation(at_s, any(choice.has_text for choice in chunk.choices), usage.completion_tokens,
                           usage.prompt_tokens, details.cached_tokens,
                           next((c.finish_reason for c in chunk.choices if c.finish_reason), None))


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


def error_text(body: bytes) -> str:
    """The message of an error body in OpenAI's form, or else the start of the body itself; one line."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return shortened(body)


def shortened(body: bytes) -> str:
    """The start of a body as one line of text."""
    return " ".join(body[:_ERROR_TEXT_BYTES].decode(errors="replace").split())
