"""An engine under load without a server in between: the load client's target over an `EngineClient`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from itertools import count

from servekit.core.request import FinishReason, RequestEvent, RequestId, RequestSpec, SamplingParams
from servekit.engine.client import EngineClient, EngineUnavailable
from servekit.load.records import GOOD_FINISH_REASONS
from servekit.load.target import Failure, FailureKind, Observation, RequestFailed
from servekit.load.workload import WorkloadRequest


class EngineTarget:
    """Sends a workload's requests to an engine, greedily decoded to the wanted length."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._numbers = count()

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        """Yield what the engine says of a request, step by step; raises RequestFailed."""
        spec = self._spec(request)
        try:
            (stream,) = self._client.submit([spec])
        except EngineUnavailable as error:
            raise RequestFailed(Failure(FailureKind.connection, str(error))) from error
        num_tokens, is_over = 0, False
        try:
            async for event in stream:
                num_tokens += len(event.token_ids)
                is_over = event.finish is not None
                yield _observation(event, request, num_tokens)
        finally:
            if not is_over:
                self._client.abort([spec.request_id])

    def _spec(self, request: WorkloadRequest) -> RequestSpec:
        return RequestSpec(
            RequestId(f"trial-{next(self._numbers)}"), tuple(request.prompt_token_ids),
            SamplingParams(max_tokens=request.output_tokens, temperature=0.0), time.monotonic(),
            tenant=request.tenant, priority=request.priority or 0,
            predicted_output_tokens=request.predicted_output_tokens)


def _observation(event: RequestEvent, request: WorkloadRequest, num_tokens: int) -> Observation:
    finish = event.finish
    if finish is FinishReason.error:
        raise RequestFailed(Failure(FailureKind.stream, event.message))
    if finish is not None and finish.value not in GOOD_FINISH_REASONS:
        raise RequestFailed(Failure(FailureKind.incomplete, f"{finish.value}: {event.message}"))
    return Observation(time.monotonic(), has_text=bool(event.token_ids), output_tokens=num_tokens,
                       prompt_tokens=len(request.prompt_token_ids), cached_tokens=event.num_cached_tokens,
                       finish_reason=None if finish is None else finish.value)
