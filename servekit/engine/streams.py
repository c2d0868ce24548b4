"""Streams of events, one a request, between an engine client and whoever waits for the tokens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence

from servekit.core.request import FinishReason, RequestEvent, RequestId, RequestSpec


class EventStream:
    """The events of one request, as an async iterator that ends after the event with a `finish`."""

    def __init__(self) -> None:
        self._events: deque[RequestEvent] = deque()
        self._arrival: asyncio.Event = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        event = self._events.popleft()
        self._is_over = self._is_over or event.finish is not None
        return event

    def put(self, event: RequestEvent) -> None:
        self._events.append(event)
        self._arrival.set()


class StreamTable:
    """The open streams by request. Each gets exactly one event with a `finish`, and nothing after it."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, EventStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, specs: Sequence[RequestSpec]) -> list[EventStream]:
        """One stream for each request. Raises ValueError, and opens none, for an id that is in use."""
        ids = [spec.request_id for spec in specs]
        in_use = [request_id for request_id in ids if request_id in self._streams or ids.count(request_id) > 1]
        if in_use:
            raise ValueError(f"request id {in_use[0]} is in use")
        streams = [EventStream() for _ in specs]
        self._streams.update(zip(ids, streams, strict=True))
        return streams

    def deliver(self, events: Iterable[RequestEvent]) -> None:
        """Pass events on; those of requests that have already ended here are dropped."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put(event)
                if event.finish is not None:
                    del self._streams[event.request_id]

    def end(self, request_ids: Iterable[RequestId], reason: FinishReason, message: str) -> list[RequestId]:
        """End streams from this side; returns the ids that were open."""
        ended = [request_id for request_id in request_ids if request_id in self._streams]
        now = time.monotonic()
        self.deliver(RequestEvent(request_id, finish=reason, message=message, at_s=now) for request_id in ended)
        return ended

    def end_all(self, reason: FinishReason, message: str) -> None:
        self.end(list(self._streams), reason, message)
