"""Shortest remaining time first."""

from __future__ import annotations

from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.prediction import Predictions
from servekit.core.policy.queue import Queue, Rank
from servekit.core.request import Request, RequestId


class SrtfPolicy(KeyedPolicy):
    """The least predicted work left comes first, among waiting and running requests alike.

    Two rules keep places from changing to and fro: a request must have `margin_tokens` less work left than the one
    that it displaces, and each gives `min_run_tokens` output tokens after a start before it can be displaced.
    """

    begun_first = False

    def __init__(self, queue: Queue, predictions: Predictions, prefill_weight: float, margin_tokens: float,
                 min_run_tokens: int) -> None:
        super().__init__(queue)
        self._predictions = predictions
        self._prefill_weight = prefill_weight
        self._margin_tokens = margin_tokens
        self._min_run_tokens = min_run_tokens
        self._num_output_at_start: dict[RequestId, int] = {}

    def key(self, request: Request) -> Rank:
        return (self._work_left(request), request.sequence_number)

    def displaces(self, candidate: Request, victim: Request, now: float) -> bool:
        has_run = victim.num_output - self._num_output_at_start[victim.request_id] >= self._min_run_tokens
        return (has_run and self._work_left(candidate) + self._margin_tokens < self._work_left(victim)
                and not self._queue.holds_back(candidate, now))

    def started(self, request: Request, now: float) -> None:
        self._num_output_at_start[request.request_id] = request.num_output

    def finished(self, request: Request, now: float) -> None:
        self._num_output_at_start.pop(request.request_id, None)
        self._predictions.finished(request)

    def _work_left(self, request: Request) -> float:
        """Tokens without keys and values, and the output to come: at least one, when the prediction was too low."""
        output_left = self._predictions.output_tokens(request) - request.num_output
        return self._prefill_weight * (request.num_tokens - request.num_computed) + max(1.0, output_left)
