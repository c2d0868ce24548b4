"""Predicted admission: room for the share of their output that requests are expected to produce."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy, PlanItem
from servekit.core.request import Request


class PredictedAdmission:
    """A request starts when its whole output and a share of what the running ones may still produce fit (SGLang).

    That share, the ratio, begins at `start_ratio` whenever nothing runs, and falls in equal steps of decoding to
    `min_ratio` in `decay_steps` of them: the longer nothing goes wrong, the bolder it is. When memory runs out all the
    same, it is set to what the requests that are left have produced, and `margin_tokens` each on top, as a share of
    their limits. Any output counts `max_output_tokens` at most, lest a generous limit keep a request waiting for ever.

    Those that start in the same step count in full, and one block is kept for rounding. An empty engine needs no room
    beyond the prompt, or one that just fits could never start.
    """

    def __init__(self, start_ratio: float, min_ratio: float, decay_steps: int, max_output_tokens: int,
                 margin_tokens: int) -> None:
        self._start_ratio = start_ratio
        self._min_ratio = min_ratio
        self._decay = (start_ratio - min_ratio) / decay_steps
        self._max_output_tokens = max_output_tokens
        self._margin_tokens = margin_tokens
        self._just_started: set[Request] = set()
        """Since the last step was planned."""
        self._memory_ran_out = False
        """Since the last step was planned."""
        self.ratio = start_ratio

    def try_start(self, request: Request, kv: KVManager, holders: Collection[Request]) -> list[BlockCopy] | None:
        if not holders:
            self.ratio = self._start_ratio
        reserve_blocks = self._reserve_blocks(request, holders, kv) if holders else 0
        copies = kv.start(request, request.num_tokens, reserve_blocks)
        if copies is not None:
            self._just_started.add(request)
        return copies

    def preempted(self, holders: Sequence[Request]) -> None:
        produced = sum(request.num_output + self._margin_tokens for request in holders)
        limits = sum(request.max_total_tokens - request.num_prompt for request in holders)
        self.ratio = min(1.0, produced / limits) if limits else 1.0
        self._memory_ran_out = True

    def stepped(self, items: Sequence[PlanItem]) -> None:
        if not self._memory_ran_out and any(item.is_decode for item in items):
            self.ratio = max(self._min_ratio, self.ratio - self._decay)
        self._just_started.clear()
        self._memory_ran_out = False

    def _reserve_blocks(self, request: Request, holders: Collection[Request], kv: KVManager) -> int:
        """Blocks that must be free beyond those for the request's tokens so far: more than the outputs will take."""
        outputs = self._remaining_output(request) + sum(
            self._remaining_output(holder) * (1.0 if holder in self._just_started else self.ratio)
            for holder in holders)
        return int((outputs + kv.block_size_tokens) // kv.block_size_tokens) + 1

    def _remaining_output(self, request: Request) -> int:
        return min(request.max_total_tokens - request.num_tokens, self._max_output_tokens)
