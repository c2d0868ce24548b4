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

    def register(self, request: Request) -> None:
        """Make the request's fully computed blocks findable."""

    def announce(self, request: Request) -> None:
        """The request starts and is going to compute the tokens that it has blocks for."""

    def withdraw(self, request: Request) -> None:
        """The request gives its blocks back, done or not."""

    def awaited_tokens(self, request: Request) -> int:
        """Tokens right after the request's cached prefix that an announced request is going to register."""

    def holds(self, block: BlockId) -> bool:
        """Whether the block can be found by content."""

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """The blocks are about to be overwritten."""

    def blocks(self) -> list[BlockId]:
        """Every block that can be found."""

    def check(self) -> None:
        """Raise AssertionError unless the index agrees with itself."""
