"""Errors of the HTTP API: always `{"error": {"message", "type", "param", "code"}}`, on every path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import msgspec
from starlette.responses import Response

from servekit.core.request import FinishReason


@dataclass(frozen=True)
class Treatment:
    """What an error means to HTTP and to a client that may try again."""

    status: int
    retry_after_s: int | None = None
    """For errors that pass by themselves: when to try again, in seconds."""
    is_final: bool = False
    """The same request would fail again, although clients retry this status: tell them not to."""


class ErrorCode(Enum):
    """What went wrong: the `code` of the body, and with it how HTTP treats it."""

    invalid_json = "invalid_json"
    invalid_value = "invalid_value"
    unknown_parameter = "unknown_parameter"
    unsupported_parameter = "unsupported_parameter"
    invalid_header = "invalid_header"
    invalid_prompt = "invalid_prompt"
    context_length_exceeded = "context_length_exceeded"
    invalid_api_key = "invalid_api_key"
    model_not_found = "model_not_found"
    not_found = "not_found"
    method_not_allowed = "method_not_allowed"
    body_too_large = "body_too_large"
    unsupported_media_type = "unsupported_media_type"
    request_aborted = "request_aborted"
    generation_failed = "generation_failed"
    internal_error = "internal_error"
    not_implemented = "not_implemented"
    rate_limit_exceeded = "rate_limit_exceeded"
    queue_full = "queue_full"
    queue_timeout = "queue_timeout"
    loading = "loading"
    draining = "draining"
    engine_unavailable = "engine_unavailable"
    request_timeout = "request_timeout"


BAD_REQUEST = Treatment(400)
TREATMENTS = {
    ErrorCode.invalid_api_key: Treatment(401),
    ErrorCode.model_not_found: Treatment(404),
    ErrorCode.not_found: Treatment(404),
    ErrorCode.method_not_allowed: Treatment(405),
    ErrorCode.body_too_large: Treatment(413),
    ErrorCode.unsupported_media_type: Treatment(415),
    ErrorCode.rate_limit_exceeded: Treatment(429, retry_after_s=1),
    ErrorCode.request_aborted: Treatment(499),
    ErrorCode.generation_failed: Treatment(500),
    ErrorCode.internal_error: Treatment(500),
    ErrorCode.not_implemented: Treatment(501, is_final=True),
    ErrorCode.queue_full: Treatment(503, retry_after_s=1),
    ErrorCode.queue_timeout: Treatment(503, retry_after_s=1),
    ErrorCode.loading: Treatment(503, retry_after_s=5),
    ErrorCode.draining: Treatment(503, retry_after_s=1),
    ErrorCode.engine_unavailable: Treatment(503, retry_after_s=2),
    ErrorCode.request_timeout: Treatment(504, is_final=True),
}
"""Codes that are not listed are mistakes in the request: `BAD_REQUEST`."""

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The `type` of a status; others below 500 are invalid_request_error, others above are server_error."""

FINISH_CODES = {
    FinishReason.abort: ErrorCode.request_aborted,
    FinishReason.queue_timeout: ErrorCode.queue_timeout,
    FinishReason.request_timeout: ErrorCode.request_timeout,
    FinishReason.queue_full: ErrorCode.queue_full,
    FinishReason.over_quota: ErrorCode.rate_limit_exceeded,
    FinishReason.too_long: ErrorCode.context_length_exceeded,
    FinishReason.shutdown: ErrorCode.draining,
    FinishReason.error: ErrorCode.generation_failed,
}
"""The endings of a request that are errors to its client; `stop` and `length` are answers."""


class ApiError(Exception):
    """An error that a client is told about: one line, the field at fault if any, and a code."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None,
                 headers: dict[str, str] | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self._headers = headers or {}
        self._retry_after_s = retry_after_s

    @property
    def treatment(self) -> Treatment:
        """How HTTP treats it."""
        return TREATMENTS.get(self.code, BAD_REQUEST)

    @property
    def body(self) -> bytes:
        """The JSON of the response's body, or of an event in a stream that has begun."""
        status = self.treatment.status
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code.value}})

    def response(self) -> Response:
        """The whole HTTP response."""
        treatment, headers = self.treatment, dict(self._headers)
        retry_after_s = treatment.retry_after_s if self._retry_after_s is None else math.ceil(self._retry_after_s)
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        if treatment.is_final:
            headers["x-should-retry"] = "false"
        return Response(self.body, treatment.status, headers, "application/json")


def error_of_finish(reason: FinishReason, message: str, num_output_tokens: int,
                    retry_after_s: float | None = None) -> ApiError:
    """The error that a request's ending is; `num_output_tokens` had been generated until then."""
    text = message or DEFAULT_MESSAGES[reason]
    if num_output_tokens:
        text += f" (after {num_output_tokens} output tokens)"
    return ApiError(FINISH_CODES[reason], text, retry_after_s=retry_after_s)


DEFAULT_MESSAGES = {
    FinishReason.abort: "the request was aborted",
    FinishReason.queue_timeout: "the request waited too long for its turn",
    FinishReason.request_timeout: "the request took too long",
    FinishReason.queue_full: "too many requests are waiting",
    FinishReason.over_quota: "the tenant has used up its tokens for now",
    FinishReason.too_long: "the prompt does not fit the model's context or the KV cache",
    FinishReason.shutdown: "the server is shutting down",
    FinishReason.error: "the generation failed",
}
