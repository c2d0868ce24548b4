"""A prefix index that is a hash chain over blocks."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.core.blocks import BlockId
from servekit.core.prefix.chain import BlockHash, HashChain
from servekit.core.request import Request


class HashPrefixIndex:
    """Full blocks by their chain hash (vLLM's automatic prefix caching).

    Equal blocks that were computed twice stay apart: the first is findable until it is overwritten.
    """

    def __init__(self, chain: HashChain) -> None:
        self._chain = chain
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}

    def match(self, request: Request) -> list[BlockId]:
        # At least one token is left to compute, since its logits give the next one.
        findable = (request.num_tokens - 1) // self._chain.block_size_tokens
        found = []
        for index in range(findable):
            block = self._block_of.get(self._chain.hash_of(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, request: Request) -> list[BlockId]:
        full = request.num_computed // self._chain.block_size_tokens
        for index in range(request.num_registered_blocks, full):
            block_hash, block = self._chain.hash_of(request, index), request.block_ids[index]
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
        return []

    def holds(self, block: BlockId) -> bool:
        return block in self._hash_of

    def forget(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]

    def check(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "the two directions of the index differ in size"
        for block, block_hash in self._hash_of.items():
            assert self._block_of.get(block_hash) == block, f"block {block} is indexed one way only"
