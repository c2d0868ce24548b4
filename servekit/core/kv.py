"""The KV cache as the scheduler sees it: integers, no tensors.

Every method reports and none decides: lack of memory is a returned value, and the scheduler chooses what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from servekit.core.blocks import BlockId, BlockPool
from servekit.core.plan import BlockCopy
from servekit.core.prefix.base import PrefixIndex
from servekit.core.request import Request


class KVManager:
    """Gives blocks to requests, shares cached prefixes among them, and takes the blocks back.

    Token `i` of a request lives in its block `i // block_size_tokens`.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, index: PrefixIndex, num_host_blocks: int = 0) -> None:
        self.block_size_tokens = block_size_tokens
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        """Blocks in the host's memory, for requests that are swapped out."""
        self._index = index
        self._copied_host_blocks: list[BlockId] = []
        """Host blocks whose content is on its way back to the device; they are reused after the step."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def start(self, request: Request, num_tokens: int, reserve_blocks: int) -> list[BlockCopy] | None:
        """Give a waiting request blocks for its first `num_tokens` tokens.

        A new or preempted request gets what the prefix cache has, and its `num_computed` says how much that is; a
        swapped one gets its content back by the copies that are returned; a paused one still has its blocks.
        None, and nothing changed, when that would leave fewer than `reserve_blocks` blocks free.
        """
        if request.block_ids:
            return [] if self.grow(request, num_tokens, reserve_blocks) else None
        if request.host_block_ids:
            return self._swap_in(request, num_tokens, reserve_blocks)
        cached = self._match(request)
        needed = self.blocks_for(num_tokens) - len(cached)
        revived = sum(map(self.pool.is_free, cached))
        if needed + revived + reserve_blocks > self.pool.num_free:
            return None
        self.pool.share(cached)
        request.block_ids = cached + self._take(needed)
        request.num_computed = len(cached) * self.block_size_tokens
        request.num_registered_blocks = len(cached)
        self._index.announce(request)
        return []

    def grow(self, request: Request, num_tokens: int, reserve_blocks: int = 0) -> bool:
        """Extend the request's blocks to hold `num_tokens` tokens.

        False, and nothing changed, when that would leave fewer than `reserve_blocks` blocks free.
        """
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            if missing + reserve_blocks > self.pool.num_free:
                return False
            request.block_ids.extend(self._take(missing))
        return True

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Move the request's computed tokens to the host's memory; None, and nothing changed, when it is full.

        The device blocks are free from now on: the copies must be made before anything is written to them.
        """
        filled = request.block_ids[:self.blocks_for(request.num_computed)]
        host_blocks = self.host_pool.take(len(filled))
        if host_blocks is None:
            return None
        num_computed = request.num_computed
        self.release(request)
        request.host_block_ids = host_blocks
        request.num_computed = num_computed
        return list(map(BlockCopy, filled, host_blocks))

    def copies_done(self) -> None:
        """The last plan's copies have been made."""
        for block in self._copied_host_blocks:
            self.host_pool.release(block)
        self._copied_host_blocks = []

    def awaited_tokens(self, request: Request) -> int:
        """Tokens right after the request's cached prefix that a running request is computing now."""
        return 0 if _needs_whole_prompt(request) else self._index.awaited_tokens(request)

    def register(self, request: Request) -> None:
        """Make the blocks that the last step filled findable by their content."""
        if request.num_computed // self.block_size_tokens > request.num_registered_blocks:
            self._index.register(request)

    def release(self, request: Request) -> None:
        """Take all of the request's blocks back. The end of the sequence is evicted before its beginning."""
        self._index.withdraw(request)
        for block in request.host_block_ids:
            self.host_pool.release(block)
        request.host_block_ids = []
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
        self.host_pool.check()
        self._index.check()
        holders = list(holders)
        saved = [block for request in holders for block in request.host_block_ids] + self._copied_host_blocks
        assert len(saved) == len(set(saved)) == self.host_pool.num_used, "host blocks are lost or held twice"
        counts: Counter[BlockId] = Counter()
        for request in holders:
            assert len(request.block_ids) == len(set(request.block_ids)), f"{request} holds a block twice"
            assert not (request.block_ids and request.host_block_ids), f"{request} is in two places"
            held = len(request.block_ids) + len(request.host_block_ids)
            assert request.num_computed <= held * self.block_size_tokens, f"{request} lacks blocks"
            counts.update(request.block_ids)
        for block in range(self.num_blocks):
            assert counts[block] == self.pool.ref_count(block), (
                f"block {block}: {counts[block]} tables hold it, its count is {self.pool.ref_count(block)}")

    def _match(self, request: Request) -> list[BlockId]:
        return [] if _needs_whole_prompt(request) else self._index.match(request)

    def _swap_in(self, request: Request, num_tokens: int, reserve_blocks: int) -> list[BlockCopy] | None:
        needed = self.blocks_for(num_tokens)
        if needed + reserve_blocks > self.pool.num_free:
            return None
        host_blocks, request.host_block_ids = request.host_block_ids, []
        self._copied_host_blocks += host_blocks
        request.block_ids = self._take(needed)
        return list(map(BlockCopy, host_blocks, request.block_ids))

    def _take(self, count: int) -> list[BlockId]:
        blocks = self.pool.take(count)
        assert blocks is not None, "the caller has made sure that enough blocks are free"
        self._index.forget(blocks)
        return blocks


def _needs_whole_prompt(request: Request) -> bool:
    """The log-probabilities of a prompt token come from computing the token before it."""
    return request.sampling.prompt_logprobs is not None
