"""Preemption: who gives way when KV blocks run out, and what becomes of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy, PreemptionKind
from servekit.core.policy.base import Policy
from servekit.core.request import Request


class Eviction(NamedTuple):
    """How a request left the device."""

    kind: PreemptionKind
    copies: tuple[BlockCopy, ...] = ()
    """Device blocks to save in host blocks."""


class Preemption(Protocol):
    """How a request is taken off the device so that it can continue later."""

    @property
    def waits_for_deadlock(self) -> bool:
        """Whether a decode without a block sits out the step, and somebody gives way only when nobody can go on."""

    def victim(self, running: Sequence[Request], policy: Policy) -> Request:
        """Who gives way; there is at least one."""

    def evict(self, request: Request, kv: KVManager) -> Eviction:
        """Free the request's blocks on the device."""
