"""Where requests go: anything that answers one with a stream of observations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from servekit.load.workload import WorkloadRequest


class FailureKind(Enum):
    """Why a request has no valid measurement."""

    status = "status"
    """The server answered with an HTTP status other than 200."""
    connection = "connection"
    """No connection, or it broke."""
    timeout = "timeout"
    """It took longer than timeout_s."""
    stream = "stream"
    """The server reported an error in the middle of its answer."""
    incomplete = "incomplete"
    """The answer ended without a good finish reason or without a single token."""
    protocol = "protocol"
    """The answer is not what the API defines."""
    interrupted = "interrupted"
    """The run was ended while it was in flight."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request failed."""

    kind: FailureKind
    text: str
    status: int | None = None
    """HTTP status, if there was one."""


class RequestFailed(Exception):
    """Raised by a target instead of a further observation."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Observation(NamedTuple):
    """What one piece of an answer said. Counts are totals so far; None where the piece did not say."""

    at_s: float
    """When it was received, on the clock of time.monotonic."""
    has_text: bool
    """Whether it brought new text. An opening piece that only names the role has none."""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None


class Target(Protocol):
    """An endpoint under load."""

    def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        """Send one request and yield what comes back as it comes; raises RequestFailed.

        Closing the generator early abandons the request.
        """
