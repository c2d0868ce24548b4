"""No preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from servekit.core.kv import KVManager
from servekit.core.policy.base import Policy
from servekit.core.request import Request


class NoPreemption:
    """Nobody ever gives way (Orca, TGI, TensorRT-LLM's GUARANTEED_NO_EVICT).

    Only beside an admission rule that reserves all the blocks that a request can come to need, and a policy that
    takes no running request's place: being asked for a victim is an error of the caller.
    """

    waits_for_deadlock = False

    def victim(self, running: Sequence[Request], policy: Policy) -> NoReturn:
        raise AssertionError("a request lacks a block although admission has reserved all it can need")

    def evict(self, request: Request, kv: KVManager) -> NoReturn:
        raise AssertionError(f"{request} is to give way although nothing may take its place")
