"""Admission on demand: blocks for what is known, more as it comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy, PlanItem
from servekit.core.request import Request


class OnDemandAdmission:
    """Blocks for all tokens known so far; output tokens get theirs as they come.

    The whole prompt is allocated at once, as in Sarathi-Serve, so that a chunk can never fail for memory and a
    resumed request is not preempted again halfway through its recomputation. `watermark` of the blocks stays
    free for the growth of requests that already run; an empty engine ignores it, or a prompt that just fits
    could never start.
    """

    def __init__(self, watermark: float) -> None:
        self._watermark = watermark

    def try_start(self, request: Request, kv: KVManager, holders: Collection[Request]) -> list[BlockCopy] | None:
        reserve_blocks = int(self._watermark * kv.num_blocks) if holders else 0
        return kv.start(request, request.num_tokens, reserve_blocks)

    def preempted(self, holders: Sequence[Request]) -> None:
        pass

    def stepped(self, items: Sequence[PlanItem]) -> None:
        pass
