"""A prefix index that is a hash chain over blocks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

from servekit.core.blocks import BlockId
from servekit.core.request import Request, RequestId

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16


class HashPrefixIndex:
    """A hash chain over full blocks: H(block) = blake2b(H(block before) + its tokens), rooted in the salt.

    The scheme is vLLM's automatic prefix caching. 128 bits of a cryptographic hash stand for the tokens themselves,
    so that equal blocks after different prefixes, or under different salts, never meet. Equal blocks that were
    computed twice are not merged: the first stays findable until it is overwritten.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._announced: Counter[BlockHash] = Counter()
        """Hashes of blocks that running requests are going to register, with how many of them."""
        self._promises: dict[RequestId, list[BlockHash]] = {}
        """What each of them has announced and not registered, next last."""

    def match(self, request: Request) -> list[BlockId]:
        # At least one token is left to compute, since its logits give the next one.
        findable = (request.num_tokens - 1) // self._block_size
        found = []
        for index in range(findable):
            block = self._block_of.get(self._chain_hash(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, request: Request) -> None:
        full = request.num_computed // self._block_size
        for index in range(request.num_registered_blocks, full):
            block_hash = self._chain_hash(request, index)
            block = request.block_ids[index]
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
            promised = self._promises.get(request.request_id)
            if promised:
                self._keep([promised.pop()])
        request.num_registered_blocks = full

    def announce(self, request: Request) -> None:
        full = request.num_tokens // self._block_size
        promised = [self._chain_hash(request, index) for index in range(request.num_registered_blocks, full)]
        self._announced.update(promised)
        self._promises[request.request_id] = promised[::-1]

    def withdraw(self, request: Request) -> None:
        self._keep(self._promises.pop(request.request_id, ()))

    def awaited_tokens(self, request: Request) -> int:
        first = len(self.match(request))
        findable = (request.num_tokens - 1) // self._block_size
        index = first
        while index < findable and self._chain_hash(request, index) in self._announced:
            index += 1
        return (index - first) * self._block_size

    def holds(self, block: BlockId) -> bool:
        return block in self._hash_of

    def forget(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]

    def blocks(self) -> list[BlockId]:
        return list(self._hash_of)

    def check(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "the two directions of the index differ in size"
        for block, block_hash in self._hash_of.items():
            assert self._block_of.get(block_hash) == block, f"block {block} is indexed one way only"
        promised = Counter(block_hash for hashes in self._promises.values() for block_hash in hashes)
        assert promised == self._announced, "announced blocks are not those that requests have promised"

    def _keep(self, promised: Iterable[BlockHash]) -> None:
        """Promises are kept or given up: nobody awaits these blocks any more."""
        for block_hash in promised:
            self._announced[block_hash] -= 1
            if not self._announced[block_hash]:
                del self._announced[block_hash]

    def _chain_hash(self, request: Request, index: int) -> BlockHash:
        """Hash of the request's block `index`, which must be full; computed once and kept with the request."""
        hashes = request.prefix_hashes
        while len(hashes) <= index:
            start = len(hashes) * self._block_size
            tokens = array("I", request.token_ids[start:start + self._block_size]).tobytes()
            parent = hashes[-1] if hashes else _root(request.spec.cache_salt)
            hashes.append(blake2b(parent + tokens, digest_size=_HASH_BYTES).digest())
        return BlockHash(hashes[index])


def _root(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
