"""Shortest job first."""

from __future__ import annotations

from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.prediction import Predictions
from servekit.core.policy.queue import Queue, Rank
from servekit.core.request import Request


class SjfPolicy(KeyedPolicy):
    """The least predicted work first, with ageing: work - ageing * time waited.

    All requests age alike, so work + ageing * arrival orders them the same way and never changes. One that has w more
    work than another is served before it when it arrived w / ageing seconds earlier; without ageing, never.
    """

    def __init__(self, queue: Queue, predictions: Predictions, prefill_weight: float,
                 ageing_tokens_per_s: float) -> None:
        super().__init__(queue)
        self._predictions = predictions
        self._prefill_weight = prefill_weight
        self._ageing_tokens_per_s = ageing_tokens_per_s

    def key(self, request: Request) -> Rank:
        work = self._prefill_weight * request.num_prompt + self._predictions.output_tokens(request)
        return (work + self._ageing_tokens_per_s * request.arrived_s, request.sequence_number)

    def finished(self, request: Request, now: float) -> None:
        self._predictions.finished(request)
