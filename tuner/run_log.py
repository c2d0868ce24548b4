"""The raw log of a run: every request with its times, from which any statistic can be computed again."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from servekit.config.errors import ConfigError
from servekit.config.resolve import as_dict, config_hash
from servekit.load.metrics import RequestLatencies, Timeline, spread_tokens
from servekit.load.records import RequestRecord
from servekit.load.target import FailureKind
from servekit.tuner.launch import Configuration
from servekit.tuner.measure import Measurement

FORMAT_VERSION = 1


class LoggedRequest(msgspec.Struct, frozen=True):
    """One request as it went. Times in seconds since the start of the run."""

    index: int
    is_warmup: bool
    prompt_tokens: int
    wanted_output_tokens: int
    intended_s: float
    sent_s: float
    ended_s: float
    chunk_times_s: list[float]
    chunk_tokens: list[int]
    cached_tokens: int | None
    failure: FailureKind | None
    failure_text: str | None

    @classmethod
    def of(cls, record: RequestRecord) -> LoggedRequest:
        """What is kept of a record."""
        failure = record.failure
        return cls(record.index, record.is_warmup, record.num_prompt_tokens, record.wanted_output_tokens,
                   record.intended_s, record.sent_s, record.ended_s, record.chunk_times_s.tolist(),
                   record.chunk_tokens.tolist(), record.cached_tokens, None if failure is None else failure.kind,
                   None if failure is None else failure.text)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens received."""
        return sum(self.chunk_tokens)

    @property
    def latencies(self) -> RequestLatencies | None:
        """None if it failed, or brought fewer tokens than wanted."""
        if self.failure is not None or self.num_output_tokens < self.wanted_output_tokens:
            return None
        times_s = spread_tokens(self.chunk_times_s, self.chunk_tokens)
        return RequestLatencies.of(Timeline(self.intended_s, times_s, self.ended_s))


class LoggedRun(msgspec.Struct, frozen=True):
    """A run as it is on disk."""

    rate_per_s: float
    stream: str
    """Name of the random stream that its requests come from."""
    warm: str
    num_requests: int
    warmup_requests: int
    config: dict[str, Any]
    config_hash: str
    verdict: str
    stopped_early: bool
    problems: list[str]
    started_at: str
    duration_s: float
    requests: list[LoggedRequest]
    format_version: int = FORMAT_VERSION

    @property
    def measured(self) -> list[LoggedRequest]:
        """The requests that count, in the order of their arrival; those that an early stop cut off are left out."""
        counted = [request for request in self.requests
                   if not request.is_warmup and request.failure is not FailureKind.interrupted]
        return sorted(counted, key=lambda request: request.index)


@dataclass(frozen=True)
class RunLog:
    """A run that is to be written."""

    rate_per_s: float
    stream: str
    warm: str
    num_requests: int
    warmup_requests: int
    config: Configuration
    measured: Measurement
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def write(self, path: Path) -> None:
        """Write it at once or not at all."""
        run = LoggedRun(
            self.rate_per_s, self.stream, self.warm, self.num_requests, self.warmup_requests, as_dict(self.config),
            config_hash(self.config), self.measured.verdict.value, self.measured.is_stopped_early,
            [problem.name for problem in self.measured.problems], self.started_at, self.measured.duration_s,
            [LoggedRequest.of(record) for record in self.measured.records])
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(msgspec.json.encode(run))
        part.replace(path)


def read_run(path: Path) -> LoggedRun:
    """Read what `RunLog.write` wrote. Raises ConfigError for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoggedRun)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("run", path, f"is not the log of a run ({error})", "keep the run folder as it was written"
                          ) from None


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
