"""What the routes work with: the configuration, the phase, and the engine with its model once they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from servekit.config.schema import Config
from servekit.core.request import RequestId
from servekit.engine.client import EngineClient, EngineState
from servekit.server.errors import ApiError, ErrorCode
from servekit.server.intake import Intake, ModelFacts
from servekit.server.lifecycle import Lifecycle, Phase
from servekit.server.metrics import Metrics

TOKENISING_THREADS = 4
"""More than one, so that a prompt need not wait until a longer one has been tokenised."""


@dataclass(frozen=True)
class Serving:
    """An engine, its model, and what was built for them."""

    engine: EngineClient
    model: ModelFacts
    intake: Intake
    metrics: Metrics
    created_s: int
    """When the model began to be served, in seconds since 1970."""


class Service:
    """The state of one server."""

    def __init__(self, config: Config, api_key: str | None) -> None:
        self.config = config
        self.api_key = api_key
        self.lifecycle = Lifecycle()
        self.tokenising = ThreadPoolExecutor(max_workers=TOKENISING_THREADS, thread_name_prefix="tokenise")
        """Where long prompts are tokenised, so that probes are answered meanwhile."""
        self._serving: Serving | None = None
        self._serial = itertools.count()
        self._active: dict[str, list[RequestId]] = {}

    @property
    def serving(self) -> Serving:
        """The engine and its model. Raises ApiError (503) while they load."""
        if self._serving is None:
            raise ApiError(ErrorCode.loading, f"the model is loading: {self.lifecycle.progress}")
        return self._serving

    @property
    def is_healthy(self) -> bool:
        """Whether the engine works, draining or not."""
        return self._serving is not None and self._serving.engine.is_healthy

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.is_healthy and self.lifecycle.phase is Phase.serving

    @property
    def state_text(self) -> str:
        """Why requests are not taken, in one word or line; `ok` if they are."""
        if self._serving is None:
            return f"loading: {self.lifecycle.progress}"
        if not self._serving.engine.is_healthy:
            state = self._serving.engine.state
            return "silent" if state is EngineState.ready else state.value
        return "ok" if self.lifecycle.phase is Phase.serving else self.lifecycle.phase.value

    def serve(self, serving: Serving) -> None:
        """Take requests from now on."""
        serving.metrics.describe(serving.engine.facts)
        serving.engine.observe(serving.metrics.observe_step)
        self._serving = serving
        self.lifecycle.phase = Phase.serving

    def check_serving(self) -> None:
        """Raise ApiError (503) unless new requests are taken."""
        try:
            self.lifecycle.check_serving()
        except ApiError as error:
            self.refused(error.code)
            raise

    def refused(self, code: ErrorCode) -> None:
        """Count a request that was turned away."""
        if self._serving is not None:
            self._serving.metrics.refused(code)

    def answered(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request."""
        if self._serving is not None:
            self._serving.metrics.answered(method, handler, status)

    def next_engine_id(self) -> str:
        """An id for the engine that no other request of this server has."""
        return f"r{next(self._serial)}"

    @contextmanager
    def active(self, request_id: str, engine_ids: Sequence[RequestId]) -> Iterator[None]:
        """Let a request be aborted by its id while it runs."""
        ids = self._active.setdefault(request_id, [])
        ids.extend(engine_ids)
        try:
            yield
        finally:
            gone = set(engine_ids)
            ids[:] = [engine_id for engine_id in ids if engine_id not in gone]
            if not ids:
                self._active.pop(request_id, None)

    def abort(self, request_id: str) -> int:
        """End the request of that id, as its client gave it or as its response shows it; returns its choices."""
        bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        ids = tuple(self._active.get(request_id, ()) or self._active.get(bare, ()))
        if ids:
            self.serving.engine.abort(ids)
        return len(ids)
