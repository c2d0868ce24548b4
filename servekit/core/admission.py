"""Admission: how much KV memory a request must find free, and how much may wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from servekit.core.kv import KVManager
from servekit.core.request import Request


class Admission(Protocol):
    """The memory side of starting a request."""

    def try_start(self, request: Request, kv: KVManager, num_running: int) -> bool:
        """Give the request the blocks it needs to start; False, and nothing changed, when they are not free."""


class OnDemandAdmission:
    """Blocks for all tokens known so far; output tokens get theirs as they come.

    The whole prompt is allocated at once, as in Sarathi-Serve, so that a chunk can never fail for memory and a
    resumed request is not preempted again halfway through its recomputation. `watermark` of the blocks stays
    free for the growth of requests that already run; an empty engine ignores it, or a prompt that just fits
    could never start.
    """

    def __init__(self, watermark: float) -> None:
        self._watermark = watermark

    def try_start(self, request: Request, kv: KVManager, num_running: int) -> bool:
        reserve_blocks = int(self._watermark * kv.num_blocks) if num_running else 0
        return kv.start(request, request.num_tokens, reserve_blocks)


@dataclass(frozen=True)
class QueueLimits:
    """What may wait, and for how long. None: no limit."""

    max_requests: int | None
    max_tokens: int | None
    queue_timeout_s: float | None
    request_timeout_s: float | None
