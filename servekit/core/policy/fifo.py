"""First come, first served."""

from __future__ import annotations

from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.queue import Rank
from servekit.core.request import Request


class FifoPolicy(KeyedPolicy):
    """In order of arrival; those past their queue timeout come last. A preempted request keeps its place."""

    def key(self, request: Request) -> Rank:
        return (request.is_late, request.sequence_number)
