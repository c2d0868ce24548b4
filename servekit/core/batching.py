"""Batching: when waiting requests may join the running batch."""

from __future__ import annotations

from typing import Protocol


class Batching(Protocol):
    """Admission of requests to the batch, as far as it depends on the batch and not on memory."""

    def free_slots(self, num_running: int) -> int:
        """How many waiting requests may start in this step."""


class ContinuousBatching:
    """Requests join as soon as there is a slot, between any two steps (Orca, OSDI'22)."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def free_slots(self, num_running: int) -> int:
        return self._max_num_seqs - num_running
