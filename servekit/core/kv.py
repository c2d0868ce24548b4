"""The KV cache as the scheduler sees it: integers, no tensors.

Every method reports and none decides: lack of memory is a returned value, and the scheduler chooses what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from servekit.core.blocks import BlockId, BlockPool
from servekit.core.prefix import PrefixIndex
from servekit.core.request import Request


class KVManager:
    """Gives blocks to requests, shares cached prefixes among them, and takes the blocks back.

    Token `i` of a request lives in its block `i // block_size_tokens`.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, index: PrefixIndex) -> None:
        self.block_size_tokens = block_size_tokens
        self.pool = BlockPool(num_blocks)
        self._index = index

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def start(self, request: Request, num_tokens: int, reserve_blocks: int) -> bool:
        """Give a waiting request blocks for its first `num_tokens` tokens, cached prefix included.

        Sets the request's `block_ids` and `num_computed` (the tokens found in the prefix cache), or changes
        nothing and returns False when that would leave fewer than `reserve_blocks` blocks free.
        """
        assert not request.block_ids, f"{request} already holds blocks"
        cached = self._match(request)
        needed = self.blocks_for(num_tokens) - len(cached)
        revived = sum(map(self.pool.is_free, cached))
        if needed + revived + reserve_blocks > self.pool.num_free:
            return False
        self.pool.share(cached)
        request.block_ids = cached + self._take(needed)
        request.num_computed = len(cached) * self.block_size_tokens
        request.num_registered_blocks = len(cached)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's blocks to hold `num_tokens` tokens; False, and nothing changed, when too few are free.
        """
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_ids.extend(self._take(missing))
        return True

    def register(self, request: Request) -> None:
        """Make the blocks that the last step filled findable by their content."""
        if request.num_computed // self.block_size_tokens > request.num_registered_blocks:
            self._index.register(request)

    def release(self, request: Request) -> None:
        """Take all of the request's blocks back. The end of the sequence is evicted before its beginning."""
        for block in reversed(request.block_ids):
            self.pool.release(block, reuse_soon=not self._index.holds(block))
        request.block_ids = []
        request.num_computed = 0
        request.num_registered_blocks = 0

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns how many."""
        idle = [block for block in self._index.blocks() if self.pool.is_free(block)]
        self._index.forget(idle)
        return len(idle)

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless the holders' block tables explain every reference count."""
        self.pool.check()
        self._index.check()
        counts: Counter[BlockId] = Counter()
        for request in holders:
            assert len(request.block_ids) == len(set(request.block_ids)), f"{request} holds a block twice"
            assert request.num_computed <= len(request.block_ids) * self.block_size_tokens, f"{request} lacks blocks"
            counts.update(request.block_ids)
        for block in range(self.num_blocks):
            assert counts[block] == self.pool.ref_count(block), (
                f"block {block}: {counts[block]} tables hold it, its count is {self.pool.ref_count(block)}")

    def _match(self, request: Request) -> list[BlockId]:
        # The log-probabilities of a prompt token come from computing the token before it.
        return [] if request.sampling.prompt_logprobs is not None else self._index.match(request)

    def _take(self, count: int) -> list[BlockId]:
        blocks = self.pool.take(count)
        assert blocks is not None, "the caller has made sure that enough blocks are free"
        self._index.forget(blocks)
        return blocks
