"""No prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.blocks import BlockId
from servekit.core.request import Request


class NoPrefixIndex:
    """Finds nothing: every prompt is computed from its first token."""

    def match(self, request: Request) -> list[BlockId]:
        return []

    def register(self, request: Request) -> list[BlockId]:
        return []

    def holds(self, block: BlockId) -> bool:
        return False

    def forget(self, blocks: Sequence[BlockId]) -> None:
        pass

    def check(self) -> None:
        pass
