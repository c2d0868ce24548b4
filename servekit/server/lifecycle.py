"""Whether the server takes requests, and how many it is still answering."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from servekit.server.errors import ApiError, ErrorCode


class Phase(Enum):
    """Where a server is between its start and its end."""

    loading = "loading"
    serving = "serving"
    draining = "draining"


class Lifecycle:
    """The phase, and the requests in flight. All methods belong to one event loop."""

    def __init__(self) -> None:
        self.phase = Phase.loading
        self.progress = "starting"
        """What is being loaded, for people who ask meanwhile."""
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    def check_serving(self) -> None:
        """Raise ApiError (503) unless new requests are taken."""
        if self.phase is Phase.loading:
            raise ApiError(ErrorCode.loading, f"the model is loading: {self.progress}")
        if self.phase is Phase.draining:
            raise ApiError(ErrorCode.draining, "the server is shutting down; send the request to another one")

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if some still are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_in_flight(self) -> int:
        """Requests being answered."""
        return self._num_in_flight
