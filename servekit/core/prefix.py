"""Prefix indexes: which block holds the keys and values of a given prefix of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType, Protocol

from servekit.core.blocks import BlockId
from servekit.core.request import Request

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16


class PrefixIndex(Protocol):
    """Finds blocks by content. It holds no reference counts; the block pool does."""

    def match(self, request: Request) -> list[BlockId]:
        """Blocks that hold a prefix of the request's tokens, in order; never all of its tokens."""

    def register(self, request: Request) -> None:
        """Make the request's fully computed blocks findable."""

    def holds(self, block: BlockId) -> bool:
        """Whether the block can be found by content."""

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """The blocks are about to be overwritten."""

    def blocks(self) -> list[BlockId]:
        """Every block that can be found."""

    def check(self) -> None:
        """Raise AssertionError unless the index agrees with itself."""


class NoPrefixIndex:
    """Finds nothing: every prompt is computed from its first token."""

    def match(self, request: Request) -> list[BlockId]:
        return []

    def register(self, request: Request) -> None:
        pass

    def holds(self, block: BlockId) -> bool:
        return False

    def forget(self, blocks: Sequence[BlockId]) -> None:
        pass

    def blocks(self) -> list[BlockId]:
        return []

    def check(self) -> None:
        pass


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
        request.num_registered_blocks = full

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
