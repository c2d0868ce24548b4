"""Continuous batching: requests join and leave between any two steps."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.batching.base import Openings
from servekit.core.policy.base import Policy
from servekit.core.request import Request


class ContinuousBatching:
    """Requests join as soon as there is a slot (Orca, OSDI'22)."""

    holds_answers = False

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def free_slots(self, num_running: int) -> int:
        return self._max_num_seqs - num_running

    def openings(self, waiting: Policy, running: Sequence[Request], now: float) -> Openings:
        return Openings(self._max_num_seqs - len(running))

    def started(self, requests: Sequence[Request]) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass
