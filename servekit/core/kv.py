"""The KV cache as the scheduler sees it: integers, no tensors.

Every method reports and none decides: lack of memory is a returned value, and the scheduler chooses what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from servekit.core.blocks import BlockId, BlockPool
from servekit.core.plan import BlockCopy
from servekit.core.prefix.announced import AnnouncedPrefixes
from servekit.core.prefix.base import PrefixIndex
from servekit.core.request import Request, RequestId


class KVManager:
    """Gives blocks to requests, shares cached prefixes among them, and takes the blocks back.

    Token `i` of a request lives in its block `i // block_size_tokens`.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, index: PrefixIndex, num_host_blocks: int = 0,
                 announced: AnnouncedPrefixes | None = None) -> None:
        """`announced`: lets requests learn of prefixes that others are computing; None: they never do."""
        self.block_size_tokens = block_size_tokens
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        """Blocks in the host's memory, for requests that are swapped out."""
        self._index = index
        self._announced = announced
        self._arriving: dict[RequestId, list[BlockId]] = {}
        """Host blocks whose content is on its way back to the device. The plan copies in before it copies anything
        back, so they may be overwritten only by the next one."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def start(self, request: Request, num_tokens: int, reserve_blocks: int) -> list[BlockCopy] | None:
        """Give a waiting request blocks for `num_tokens` tokens, all that are known of it or more.

        What the prefix cache has of it is shared, and what of the rest is in the host's memory comes back by the
        copies that are returned; its `num_computed` says how much both are. A paused request still has its blocks.
        None, and nothing changed, when that would leave fewer than `reserve_blocks` blocks free.
        """
        if request.block_ids:
            if not self.grow(request, num_tokens, reserve_blocks):
                return None
            self._announce(request)
            return []
        cached = self._match(request)
        needed = self.blocks_for(num_tokens) - len(cached)
        revived = sum(map(self.pool.is_free, cached))
        if needed + revived + reserve_blocks > self.pool.num_free:
            return None
        self.pool.share(cached)
        request.block_ids = cached + self._take(needed)
        request.num_computed = max(request.num_computed, len(cached) * self.block_size_tokens)
        request.num_registered_blocks = len(cached)
        self._announce(request)
        return self._swap_in(request, len(cached))

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

    def missing_blocks(self, request: Request) -> int:
        """Free blocks that a waiting request needs at least, to hold what is known of it."""
        return self.blocks_for(request.num_tokens) - len(request.block_ids or self._match(request))

    def pause(self, request: Request) -> None:
        """The request computes no further for now, and keeps its blocks."""
        self._withdraw(request)

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Move the request's computed tokens to the host's memory; None, and nothing changed, when it is full.

        The device blocks are free from now on: the copies must be made before anything is written to them.
        """
        assert request.request_id not in self._arriving, f"{request} leaves before its content has arrived"
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
        for host_blocks in self._arriving.values():
            self._release_on_host(host_blocks)
        self._arriving = {}

    def awaited_tokens(self, request: Request) -> int:
        """Tokens of a prefix of the request that a running one is computing now; 0 once all of it is cached."""
        if self._announced is None or _needs_whole_prompt(request):
            return 0
        return self._announced.awaited_tokens(request, len(self._match(request)))

    def register(self, request: Request) -> None:
        """Make the blocks that the last step filled findable by their content.

        Where the index has an equal block already, and says so, it takes the place of the request's own.
        """
        first = request.num_registered_blocks
        full = request.num_computed // self.block_size_tokens
        if full == first:
            return
        for place, block in enumerate(self._index.register(request), first):
            self.pool.share([block])
            self.pool.release(request.block_ids[place], reuse_soon=True)
            request.block_ids[place] = block
        request.num_registered_blocks = full
        if self._announced is not None:
            self._announced.keep(request, full - first)

    def release(self, request: Request) -> None:
        """Take all of the request's blocks back. The end of the sequence is evicted before its beginning."""
        self._withdraw(request)
        self._release_on_host(request.host_block_ids)
        request.host_block_ids = []
        for block in reversed(request.block_ids):
            self.pool.release(block, reuse_soon=not self._index.holds(block))
        request.block_ids = []
        request.num_computed = 0
        request.num_registered_blocks = 0

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns how many."""
        idle = [block for block in self.pool.free_order() if self._index.holds(block)]
        self._index.forget(idle)
        return len(idle)

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless the holders' block tables explain every reference count."""
        self.pool.check()
        self.host_pool.check()
        self._index.check()
        if self._announced is not None:
            self._announced.check()
        holders = list(holders)
        saved = [block for request in holders for block in request.host_block_ids]
        saved += [block for blocks in self._arriving.values() for block in blocks]
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

    def _swap_in(self, request: Request, num_cached: int) -> list[BlockCopy]:
        """Copies of what the host holds of a request, but for its first blocks, which the prefix cache had."""
        host_blocks, request.host_block_ids = request.host_block_ids, []
        if host_blocks:
            self._arriving[request.request_id] = host_blocks
        return list(map(BlockCopy, host_blocks[num_cached:], request.block_ids[num_cached:]))

    def _release_on_host(self, host_blocks: Iterable[BlockId]) -> None:
        for block in host_blocks:
            self.host_pool.release(block, reuse_soon=True)

    def _announce(self, request: Request) -> None:
        if self._announced is not None:
            self._announced.announce(request)

    def _withdraw(self, request: Request) -> None:
        if self._announced is not None:
            self._announced.withdraw(request)

    def _take(self, count: int) -> list[BlockId]:
        blocks = self.pool.take(count)
        assert blocks is not None, "the caller has made sure that enough blocks are free"
        self._index.forget(blocks)
        return blocks


def _needs_whole_prompt(request: Request) -> bool:
    """The log-probabilities of a prompt token come from computing the token before it."""
    return request.sampling.prompt_logprobs is not None
