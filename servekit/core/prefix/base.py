"""Prefix indexes: which block holds the keys and values of a given prefix of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from servekit.core.blocks import BlockId
from servekit.core.request import Request


class PrefixIndex(Protocol):
    """Finds blocks by content. It holds no reference counts; the block pool does."""

    def match(self, request: Request) -> list[BlockId]:
        """Blocks that hold a prefix of the request's tokens, in order; never all of its tokens."""

    def register(self, request: Request) -> list[BlockId]:
        """Make the request's fully computed blocks findable, from its first unregistered one on; there is one.

        Returns blocks that hold the same as the first of these and take their place, if any.
        """

    def holds(self, block: BlockId) -> bool:
        """Whether the block can be found by content."""

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """The blocks are about to be overwritten. They come as the pool gives them: released first, first."""

    def check(self) -> None:
        """Raise AssertionError unless the index agrees with itself."""
