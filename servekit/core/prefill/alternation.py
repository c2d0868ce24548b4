"""Steps of prompts between steps of decodes."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.plan import PlanItem
from servekit.core.prefill.base import Turn


class DecodeStreak:
    """How many steps in a row, up to now, have computed decodes and nothing else."""

    def __init__(self) -> None:
        self.num_steps = 0

    def stepped(self, items: Sequence[PlanItem]) -> None:
        if items:
            self.num_steps = self.num_steps + 1 if all(item.is_decode for item in items) else 0


class Alternation:
    """A step of prompts, then at least `decode_steps` steps of decodes as long as there are any."""

    def __init__(self, decode_steps: int) -> None:
        self._decode_steps = decode_steps
        self._streak = DecodeStreak()

    def turn(self, num_decodes: int, num_prompts: int, num_waiting: int) -> Turn:
        owes_decodes = num_decodes > 0 and self._streak.num_steps < self._decode_steps
        return Turn.decodes if owes_decodes or num_prompts + num_waiting == 0 else Turn.prompts

    def stepped(self, items: Sequence[PlanItem]) -> None:
        self._streak.stepped(items)
