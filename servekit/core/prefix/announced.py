"""Prefixes that are being computed now, so that a request can wait for one instead of computing it as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from servekit.core.prefix.chain import BlockHash, HashChain
from servekit.core.request import Request, RequestId


class AnnouncedPrefixes:
    """Full blocks that running requests are going to register, known by their chain hashes (SGLang's in-batch sharing).

    A request announces once, when it starts; what it has announced is kept block by block, or withdrawn.
    """

    def __init__(self, chain: HashChain) -> None:
        self._chain = chain
        self._announced: Counter[BlockHash] = Counter()
        """Blocks with how many requests have promised them."""
        self._start_of: dict[BlockHash, int] = {}
        """Where in the sequence the first promise that a block is part of began, in blocks."""
        self._promises: dict[RequestId, list[BlockHash]] = {}
        """What each request has announced and not kept, next last."""

    def announce(self, request: Request) -> None:
        """The request starts and is going to compute the tokens that are known of it."""
        assert request.request_id not in self._promises, f"{request} announces twice"
        full = request.num_tokens // self._chain.block_size_tokens
        start = request.num_registered_blocks
        promised = [self._chain.hash_of(request, index) for index in range(start, full)]
        self._announced.update(promised)
        for block_hash in promised:
            self._start_of.setdefault(block_hash, start)
        self._promises[request.request_id] = promised[::-1]

    def keep(self, request: Request, num_blocks: int) -> None:
        """The request's next blocks have been registered; blocks of output tokens were never announced."""
        promised = self._promises.get(request.request_id, [])
        self._strike(promised.pop() for _ in range(min(num_blocks, len(promised))))

    def withdraw(self, request: Request) -> None:
        """The request computes no further for now."""
        self._strike(self._promises.pop(request.request_id, ()))

    def awaited_tokens(self, request: Request, num_cached_blocks: int) -> int:
        """Tokens of the request that others have promised to compute; 0 once none of them is missing.

        What they have computed of these meanwhile counts, too: whoever waits for a prefix waits for its end.
        """
        block_size = self._chain.block_size_tokens
        findable = (request.num_tokens - 1) // block_size
        end = num_cached_blocks
        while end < findable and self._chain.hash_of(request, end) in self._announced:
            end += 1
        if end == num_cached_blocks:
            return 0
        return (end - self._start_of[self._chain.hash_of(request, num_cached_blocks)]) * block_size

    def check(self) -> None:
        """Raise AssertionError unless what is announced is what requests have promised."""
        promised = Counter(block_hash for hashes in self._promises.values() for block_hash in hashes)
        assert promised == self._announced, "announced blocks are not those that requests have promised"
        assert promised.keys() == self._start_of.keys(), "promises have a start that are none, or none that are"

    def _strike(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._announced[block_hash] -= 1
            if not self._announced[block_hash]:
                del self._announced[block_hash], self._start_of[block_hash]
