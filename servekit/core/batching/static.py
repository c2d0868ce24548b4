"""Static batching: one batch at a time, from its first prompt to its last token."""

from __future__ import annotations

from servekit.core.batching.dynamic import DynamicBatching


class StaticBatching(DynamicBatching):
    """The batch waits to be full, `max_delay_s` at most, and the next one waits for its end (FasterTransformer).

    That is dynamic batching with one batch in flight and one preferred size, the full one. Without `early_return`
    the answers of a batch are given out together, when the last one is done.
    """

    def __init__(self, batch_size: int, max_delay_s: float, early_return: bool) -> None:
        super().__init__(batch_size, batches_in_flight=1, preferred_sizes=(batch_size,), max_delay_s=max_delay_s)
        self.holds_answers = not early_return
