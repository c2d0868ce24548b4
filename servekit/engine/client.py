"""How the server, the load tests and offline users talk to an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import Protocol

from servekit.config.schema import Config
from servekit.core.request import RequestEvent, RequestId, RequestSpec
from servekit.engine.messages import EngineFacts, EngineStats, StepRecord


class EngineState(Enum):
    """Whether an engine can take requests."""

    starting = "starting"
    ready = "ready"
    restarting = "restarting"
    dead = "dead"


class EngineUnavailable(RuntimeError):
    """The engine is not ready (starting, restarting, dead or shutting down): nothing was submitted."""


class StepObserver(Protocol):
    """Called once for each step, in the client's event loop; metrics are one."""

    def __call__(self, stats: EngineStats, step: StepRecord | None) -> None: ...


class EngineClient(Protocol):
    """An engine, in this process or in one of its own.

    All methods belong to one event loop. Every stream returned by `submit` ends with exactly one event whose
    `finish` is set, whatever happens to the engine.
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is ready and has shown a sign of life within engine.heartbeat_timeout_s."""

    @property
    def facts(self) -> EngineFacts:
        """Facts of the running engine. Raises EngineUnavailable before it is ready for the first time."""

    @property
    def stats(self) -> EngineStats: ...

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` for each step from now on."""

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises ConfigError for a setting that cannot be honoured, StartError for anything else.
        """

    def submit(self, specs: Sequence[RequestSpec]) -> Sequence[AsyncIterator[RequestEvent]]:
        """Hand requests over, all or none, and return one stream of events for each.

        A refusal (queue full, too long) is the stream's only event. Raises EngineUnavailable.
        """

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests now; their streams end with FinishReason.abort and deliver nothing more."""

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks were forgotten."""

    async def reconfigure(self, config: Config) -> EngineFacts:
        """Go on with the same weights under other settings, as if the engine had just started.

        Raises ConfigError, and goes on as before, for a setting that needs a fresh engine or does not fit, and while
        requests are in flight; EngineUnavailable when there is no engine.
        """

    async def shutdown(self) -> None:
        """End every request that is left (FinishReason.shutdown) and the engine. May be called twice."""


class StartError(RuntimeError):
    """The engine could not start, for a reason outside the configuration; one line for the person."""
