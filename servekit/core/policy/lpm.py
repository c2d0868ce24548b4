"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Iterator

from servekit.core.policy.base import KeyedPolicy
from servekit.core.policy.queue import Queue, Rank
from servekit.core.prefix.base import PrefixIndex
from servekit.core.request import Request


class LpmPolicy(KeyedPolicy):
    """The request with the longest cached prefix first, then in order of arrival (SGLang).

    Prefixes are looked up again for every step, since the cache changes; while more than `max_ranked` requests wait
    that would take too long, and they are served in order of arrival. With nothing cached this is `fifo`. A request
    whose prefix nobody shares can wait for as long as others keep coming.
    """

    def __init__(self, queue: Queue, index: PrefixIndex, max_ranked: int) -> None:
        super().__init__(queue)
        self._index = index
        self._max_ranked = max_ranked

    def key(self, request: Request) -> Rank:
        return (request.sequence_number,)

    def in_order(self, now: float) -> Iterator[Request]:
        waiting = super().in_order(now)
        if len(self) > self._max_ranked:
            return waiting
        return iter(sorted(waiting, key=lambda request: self._match_rank(request, now)))  # Stable: arrival decides.

    def _match_rank(self, request: Request, now: float) -> Rank:
        if request.has_begun:
            return (0, 0)
        return (1 + self._queue.holds_back(request, now), -len(self._index.match(request)))
