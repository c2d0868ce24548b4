"""Reading the JSON body of a request strictly: what is malformed or ambiguous is refused, never guessed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from servekit.server.errors import ApiError, ErrorCode

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop; larger ones in a thread, so that probes stay quick."""


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The object in a request's body.

    Raises ApiError: 415 for another media type or a compressed body, 413 above `max_bytes`, 400 for anything but
    one JSON object in UTF-8 with unique keys, finite numbers and whole characters.
    """
    _check_headers(request, max_bytes)
    data = await _read(request, max_bytes)
    if len(data) <= SMALL_BYTES:
        return parse_object(data)
    return await asyncio.to_thread(parse_object, data)


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(ErrorCode.unsupported_media_type,
                       f"Content-Type is {media_type!r}; send application/json (curl: -H 'Content-Type: "
                       "application/json')")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(ErrorCode.unsupported_media_type, f"Content-Encoding {encoding!r} is not supported; send the "
                       "body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorCode.body_too_large, f"the body is larger than server.max_body_bytes={max_bytes}",
                    headers={"connection": "close"})


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object; raises ApiError (400)."""
    if not data:
        raise ApiError(ErrorCode.invalid_json, "the body is empty; send a JSON object")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant,
                           parse_float=_finite_float)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError:
        raise ApiError(ErrorCode.invalid_json, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(ErrorCode.invalid_json, "the body contains half of a surrogate pair (\\ud800 to \\udfff), "
                       "which is not a character") from None
    except UnicodeDecodeError as error:
        raise ApiError(ErrorCode.invalid_json, f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(ErrorCode.invalid_json, f"the body is not JSON: {error.msg} at line {error.lineno}, column "
                       f"{error.colno}") from None
    except ValueError as error:
        raise ApiError(ErrorCode.invalid_json, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(ErrorCode.invalid_json, "the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {ascii(key)[:80]} is given twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
