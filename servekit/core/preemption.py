"""Preemption: what a running request gives up when another needs its KV blocks."""

from __future__ import annotations

from typing import Protocol

from servekit.core.kv import KVManager
from servekit.core.request import Request


class Preemption(Protocol):
    """How a request is taken off the device so that it can continue later."""

    def preempt(self, request: Request, kv: KVManager) -> None:
        """Free the request's blocks on the device."""


class RecomputePreemption:
    """Forget the keys and values; the prompt and the output so far are computed again later (vLLM)."""

    def preempt(self, request: Request, kv: KVManager) -> None:
        request.num_lost = request.num_computed
        kv.release(request)
