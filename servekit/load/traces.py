"""Readers of request traces: one entry a line, in the order of the file, never more than a line in memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import msgspec

from servekit.config.errors import ConfigError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
EXTRA_COLUMNS = ("Tenant", "Priority", "PredictedTokens")
"""What a trace may have beside them, in this order."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace."""

    at_s: float
    """Seconds since the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()
    """Identity of each prompt block, the last one perhaps partial; empty where the trace has none."""
    tenant: str | None = None
    """None where the trace does not say; so are the next two."""
    priority: int | None = None
    predicted_tokens: int | None = None
    """How long its output was expected to be."""


class BadLine(ValueError):
    """Why a line of a trace cannot be used."""


def read_azure(path: str) -> Iterator[TraceEntry]:
    """Read a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference traces).

    After these there may be some of the columns Tenant, Priority and PredictedTokens.

    Raises ConfigError with file, line number and reason.
    """
    with _opened(path) as lines:
        rows = csv.reader(lines)
        with _at_line(path, 1):
            header = next(rows, [])
            extra = _extra_columns(header)
        start: datetime | None = None
        previous_s = 0.0
        for row in rows:
            with _at_line(path, rows.line_num):
                line = _azure_line(row, extra)
                start = start or line.timestamp
                entry = TraceEntry((line.timestamp - start).total_seconds(), line.prompt_tokens, line.output_tokens,
                                   (), line.tenant, line.priority, line.predicted_tokens)
                _require_usable(entry, previous_s)
            previous_s = entry.at_s
            yield entry


def _extra_columns(header: Sequence[str]) -> Sequence[str]:
    required, extra = tuple(header[:3]), header[3:]
    if required != AZURE_COLUMNS or list(extra) != [name for name in EXTRA_COLUMNS if name in extra]:
        raise BadLine(f"the columns are {','.join(header) or 'missing'}, not {','.join(AZURE_COLUMNS)} and any of "
                      f"{','.join(EXTRA_COLUMNS)}")
    return extra


@dataclass(frozen=True, slots=True)
class _AzureLine:
    timestamp: datetime
    prompt_tokens: int
    output_tokens: int
    tenant: str | None
    priority: int | None
    predicted_tokens: int | None


def _azure_line(row: list[str], extra: Sequence[str]) -> _AzureLine:
    if len(row) != len(AZURE_COLUMNS) + len(extra):
        raise BadLine(f"it has {len(row)} fields, not {len(AZURE_COLUMNS) + len(extra)}")
    said = dict(zip(extra, row[len(AZURE_COLUMNS):], strict=True))
    try:
        timestamp, prompt_tokens, output_tokens = datetime.fromisoformat(row[0]), int(row[1]), int(row[2])
        priority, predicted = (int(said[name]) if said.get(name) else None for name in ("Priority", "PredictedTokens"))
    except ValueError as error:
        raise BadLine(str(error)) from None
    timestamp = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
    return _AzureLine(timestamp, prompt_tokens, output_tokens, said.get("Tenant"), priority, predicted)


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: str | None = None
    priority: int | None = None
    predicted_length: int | None = None


def read_mooncake(path: str, block_tokens: int) -> Iterator[TraceEntry]:
    """Read a JSONL with timestamp (ms), input_length, output_length and hash_ids (Mooncake traces).

    Each of the hash_ids stands for `block_tokens` prompt tokens together with all that come before them. A line may
    also have a tenant, a priority and a predicted_length.
    Raises ConfigError with file, line number and reason.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    start_ms: float | None = None
    previous_s = 0.0
    with _opened(path) as lines:
        for number, text in enumerate(lines, start=1):
            with _at_line(path, number):
                line = _mooncake_line(decoder, text, block_tokens)
                start_ms = line.timestamp if start_ms is None else start_ms
                entry = TraceEntry((line.timestamp - start_ms) / 1000.0, line.input_length, line.output_length,
                                   line.hash_ids, line.tenant, line.priority, line.predicted_length)
                _require_usable(entry, previous_s)
            previous_s = entry.at_s
            yield entry


def _mooncake_line(decoder: msgspec.json.Decoder[_MooncakeLine], text: str, block_tokens: int) -> _MooncakeLine:
    try:
        line = decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise BadLine(str(error)) from None
    blocks = -(-line.input_length // block_tokens)
    if len(line.hash_ids) != blocks:
        raise BadLine(f"input_length {line.input_length} makes {blocks} blocks of {block_tokens} tokens, "
                      f"but it has {len(line.hash_ids)} hash_ids")
    if line.hash_ids and min(line.hash_ids) < 0:
        raise BadLine(f"hash id {min(line.hash_ids)} is negative")
    return line


def _require_usable(entry: TraceEntry, previous_s: float) -> None:
    if entry.prompt_tokens < 1 or entry.output_tokens < 1:
        raise BadLine(f"{entry.prompt_tokens} prompt and {entry.output_tokens} output tokens: "
                      "both must be at least 1")
    if entry.predicted_tokens is not None and entry.predicted_tokens < 1:
        raise BadLine(f"{entry.predicted_tokens} predicted tokens: there must be at least 1")
    if entry.at_s < previous_s:
        raise BadLine(f"its time lies {previous_s - entry.at_s:g} s before that of the line above")


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    try:
        with Path(path).open(encoding="utf-8", newline="") as lines:
            yield lines
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("workload.path", path, f"cannot be read ({reason})", "name a readable trace file") from None


@contextmanager
def _at_line(path: str, number: int) -> Iterator[None]:
    try:
        yield
    except BadLine as error:
        raise ConfigError("workload.path", f"{path}:{number}", str(error),
                          "correct the line, or end the window before it with num_requests") from None
