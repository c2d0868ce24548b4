"""Batching: when waiting requests may join the running batch."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from servekit.core.plan import Bound
from servekit.core.policy.base import Policy
from servekit.core.request import Request, RequestId


@dataclass(frozen=True, slots=True)
class Openings:
    """How many waiting requests may start in this step, and what holds the others back."""

    slots: int
    bound: Bound = Bound.sequences
    wake_s: float | None = None
    """When to ask again if nothing else happens before, on the caller's clock."""
    only: Set[RequestId] | None = None
    """Who may take the slots; None: whoever is next."""

    def admit(self, request: Request) -> bool:
        """Whether the request may take one of the slots."""
        return self.only is None or request.request_id in self.only


class Batching(Protocol):
    """Admission of requests to the batch, as far as it depends on the batch and not on memory."""

    @property
    def holds_answers(self) -> bool:
        """Whether answers are given out only when the whole batch is done."""

    def free_slots(self, num_running: int) -> int:
        """How many requests could start at most, if they were here."""

    def openings(self, waiting: Policy, running: Sequence[Request], now: float) -> Openings:
        """How many waiting requests, in the policy's order, may start now."""

    def started(self, requests: Sequence[Request]) -> None:
        """These started together in one step, for the first time or again."""

    def ended(self, request: Request) -> None:
        """The request has ended, for whatever reason; it may never have started."""
