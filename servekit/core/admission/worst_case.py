"""Worst-case admission: all the blocks that a request can come to need, before it starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from servekit.config.admission import Reserve
from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy, PlanItem
from servekit.core.request import Request


class WorstCaseAdmission:
    """A request starts when blocks up to its end are free, and it gets them all at once (Orca, OSDI'22).

    How long it gets is `reserve`; what it leaves unused is the waste that paged memory on demand avoids. A length that
    is at least the request's own limit can never be exceeded, so nobody needs to give way; the lengths that rest on a
    prediction can, and the request then grows as under admission on demand. Without a prediction its limit counts.
    """

    def __init__(self, reserve: Reserve, max_model_len: int) -> None:
        self._reserve = reserve
        self._max_model_len = max_model_len

    def try_start(self, request: Request, kv: KVManager, holders: Collection[Request]) -> list[BlockCopy] | None:
        return kv.start(request, max(request.num_tokens, self._length(request)), reserve_blocks=0)

    def preempted(self, holders: Sequence[Request]) -> None:
        pass

    def stepped(self, items: Sequence[PlanItem]) -> None:
        pass

    def _length(self, request: Request) -> int:
        """Prompt and output together, in tokens."""
        predicted = request.spec.predicted_output_tokens
        if self._reserve is Reserve.max_model_len:
            return self._max_model_len
        if self._reserve is Reserve.max_tokens or predicted is None:
            return request.max_total_tokens
        if self._reserve is Reserve.power_of_two:
            predicted = _power_of_two(predicted)
        return min(request.num_prompt + predicted, request.max_total_tokens)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
