"""Admission: how much KV memory a request must find free, and what may wait for how long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from servekit.config.admission import TimeoutAction
from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy, PlanItem
from servekit.core.request import Request


class Admission(Protocol):
    """The memory side of starting a request."""

    def try_start(self, request: Request, kv: KVManager, holders: Collection[Request]) -> list[BlockCopy] | None:
        """Give the request the blocks it needs to start; None, and nothing changed, when they are not free.

        `holders` are the other requests with blocks on the device. The answer is what to copy from the host's
        memory first: nothing, unless the request was swapped out.
        """

    def preempted(self, holders: Sequence[Request]) -> None:
        """Memory ran out: a request has been preempted and these are left."""

    def stepped(self, items: Sequence[PlanItem]) -> None:
        """A step has been planned that computes these items."""


@dataclass(frozen=True)
class ClassLimits:
    """What may wait, of all requests or of one class, and for how long. None: no limit."""

    max_requests: int | None = None
    queue_timeout_s: float | None = None
    on_timeout: TimeoutAction = TimeoutAction.reject


@dataclass(frozen=True)
class QueueLimits:
    """Limits on arrival and in time. None: no limit."""

    max_requests: int | None
    max_tokens: int | None
    queue_timeout_s: float | None
    request_timeout_s: float | None
    on_timeout: TimeoutAction = TimeoutAction.reject
    classes: dict[int, ClassLimits] = field(default_factory=dict)
    """Limits of their own of some classes, by priority; they replace the timeout and add a bound on the queue."""

    def queue_timeout_of(self, priority: int) -> float | None:
        """Longest wait for the first step of a request of this class, in seconds."""
        limits = self.classes.get(priority)
        return self.queue_timeout_s if limits is None else limits.queue_timeout_s

    def on_timeout_of(self, priority: int) -> TimeoutAction:
        """What happens to a request of this class that has waited too long."""
        limits = self.classes.get(priority)
        return self.on_timeout if limits is None else limits.on_timeout
