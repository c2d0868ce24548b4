"""Hash chains: one short value that stands for a block's tokens and for all tokens before it."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NewType

from servekit.config.prefix_cache import CacheNamespace
from servekit.core.prefix.namespace import namespace_of
from servekit.core.request import Request

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16


class HashChain:
    """H(block) = blake2b(H(block before) + its tokens), rooted in the request's namespace.

    The scheme is vLLM's automatic prefix caching. 128 bits of a cryptographic hash stand for the tokens themselves,
    so that equal blocks after different prefixes, or in different namespaces, never meet.
    """

    def __init__(self, block_size_tokens: int, namespace: CacheNamespace) -> None:
        self.block_size_tokens = block_size_tokens
        self._namespace = namespace

    def hash_of(self, request: Request, index: int) -> BlockHash:
        """Hash of the request's block `index`, which must be full; computed once and kept with the request."""
        hashes = request.prefix_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size_tokens
            tokens = array("I", request.token_ids[start:start + self.block_size_tokens]).tobytes()
            hashes.append(_hash((hashes[-1] if hashes else self._root(request)) + tokens))
        return BlockHash(hashes[index])

    def _root(self, request: Request) -> bytes:
        root = b""
        for name in namespace_of(request, self._namespace):
            root = _hash(root + name.encode("utf-8", "surrogatepass"))
        return root


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=_HASH_BYTES).digest()
