"""A prefix index that is a radix tree over blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from servekit.config.prefix_cache import CacheNamespace
from servekit.core.blocks import BlockId
from servekit.core.prefix.namespace import Names, namespace_of
from servekit.core.request import Request

_TOKEN_BYTES = array("I").itemsize


class _Node:
    """A run of blocks that nothing branches off from, and their tokens.

    A namespace's root holds no blocks. The top, above all roots, has no parent.
    """

    __slots__ = ("blocks", "children", "key", "parent", "tokens")

    def __init__(self, parent: _Node | None, key: bytes | Names, tokens: bytes = b"",
                 blocks: Sequence[BlockId] = ()) -> None:
        self.parent = parent
        self.key = key
        """Under which the parent finds it: the tokens of its first block, or the namespace of a root."""
        self.tokens = bytearray(tokens)
        self.blocks = list(blocks)
        self.children: dict[bytes | Names, _Node] = {}


class _Place(NamedTuple):
    """A point in the tree: behind the first `num_blocks` blocks of a node."""

    node: _Node
    num_blocks: int


class RadixPrefixIndex:
    """A radix tree over full blocks, one for each namespace (RadixAttention, SGLang).

    The path from a root spells a prefix. No two children of a node begin with the same block; where a request leaves
    a node's run, the node is split. A request that has computed what the tree already holds takes the tree's blocks
    in place of its own, so whoever holds a block holds all blocks before it. That makes the pool's reference counts
    the locks of the tree: behind a free block there are only free ones, which were released before it. The pool
    gives the block that was released first, and it is always the end of a leaf: the least recently used one.
    """

    def __init__(self, block_size_tokens: int, namespace: CacheNamespace) -> None:
        self._block_size = block_size_tokens
        self._block_bytes = block_size_tokens * _TOKEN_BYTES
        self._namespace = namespace
        self._top = _Node(None, ())
        self._node_of: dict[BlockId, _Node] = {}

    def match(self, request: Request) -> list[BlockId]:
        root = self._top.children.get(namespace_of(request, self._namespace))
        if root is None:
            return []
        # At least one token is left to compute, since its logits give the next one.
        findable = (request.num_tokens - 1) // self._block_size
        _, found = self._walk(_Place(root, 0), self._tokens(request, 0, findable))
        return found

    def register(self, request: Request) -> list[BlockId]:
        first, full = request.num_registered_blocks, request.num_computed // self._block_size
        tokens = self._tokens(request, first, full)
        place, found = self._walk(self._end_of(request), tokens)
        if first + len(found) < full:
            self._insert(place, tokens[len(found) * self._block_bytes:], request.block_ids[first + len(found):full])
        return found

    def holds(self, block: BlockId) -> bool:
        return block in self._node_of

    def forget(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            node = self._node_of.pop(block, None)
            if node is not None:
                self._shorten(node, block)

    def check(self) -> None:
        seen = [block for node in self._nodes() for block in node.blocks]
        assert len(seen) == len(set(seen)) == len(self._node_of), "blocks of the tree are lost or there twice"
        for node in self._nodes():
            assert len(node.tokens) == len(node.blocks) * self._block_bytes, "a node's tokens and blocks differ"
            assert all(self._node_of[block] is node for block in node.blocks), "a block is elsewhere than thought"
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, "a child is not where its parent has it"
                begins_so = node is self._top or key == bytes(child.tokens[:self._block_bytes])
                assert begins_so, "a child begins with other tokens than its parent thinks"
                assert child.children or child.blocks, "an empty node"

    def _tokens(self, request: Request, first: int, end: int) -> bytes:
        """Tokens of the request's blocks from `first` up to `end`, so packed that equal bytes are equal tokens."""
        return array("I", request.token_ids[first * self._block_size:end * self._block_size]).tobytes()

    def _end_of(self, request: Request) -> _Place:
        """Where the request's registered blocks end."""
        if request.num_registered_blocks:
            last = request.block_ids[request.num_registered_blocks - 1]
            node = self._node_of[last]
            return _Place(node, node.blocks.index(last) + 1)
        names = namespace_of(request, self._namespace)
        return _Place(self._top.children.setdefault(names, _Node(self._top, names)), 0)

    def _walk(self, place: _Place, tokens: bytes) -> tuple[_Place, list[BlockId]]:
        """Follow the tokens from a place on, as far as the tree goes along; returns where that is and the blocks."""
        found: list[BlockId] = []
        while True:
            node, start = place
            behind = len(found) * self._block_bytes
            end = start + self._num_equal(place, tokens[behind:])
            found += node.blocks[start:end]
            behind = len(found) * self._block_bytes
            child = node.children.get(tokens[behind:behind + self._block_bytes])
            if end < len(node.blocks) or child is None:
                return _Place(node, end), found
            place = _Place(child, 0)

    def _num_equal(self, place: _Place, tokens: bytes) -> int:
        """Blocks of the place's node, from the place on, that the tokens begin with."""
        step, rest = self._block_bytes, place.node.tokens[place.num_blocks * self._block_bytes:]
        most = min(len(rest), len(tokens))
        if rest[:most] == tokens[:most]:
            return most // step
        return next(start // step for start in range(0, most, step)
                    if rest[start:start + step] != tokens[start:start + step])

    def _insert(self, place: _Place, tokens: bytes, blocks: Sequence[BlockId]) -> None:
        """Add blocks behind a place where no child begins like them."""
        node = place.node
        if place.num_blocks < len(node.blocks):
            self._split(place)
        if node.children or not node.blocks:
            key = tokens[:self._block_bytes]
            node.children[key] = node = _Node(node, key)
        node.tokens += tokens
        node.blocks += blocks
        self._node_of.update(dict.fromkeys(blocks, node))

    def _split(self, place: _Place) -> None:
        """Move what is behind the place into a child of its own."""
        node, cut = place.node, place.num_blocks * self._block_bytes
        tail = _Node(node, bytes(node.tokens[cut:cut + self._block_bytes]), bytes(node.tokens[cut:]),
                     node.blocks[place.num_blocks:])
        tail.children, node.children = node.children, {tail.key: tail}
        for child in tail.children.values():
            child.parent = tail
        del node.tokens[cut:], node.blocks[place.num_blocks:]
        self._node_of.update(dict.fromkeys(tail.blocks, tail))

    def _shorten(self, node: _Node, block: BlockId) -> None:
        assert node.blocks[-1] == block and not node.children, f"block {block} is not the end of a leaf"
        node.blocks.pop()
        del node.tokens[-self._block_bytes:]
        while node.parent is not None and not node.blocks and not node.children:
            del node.parent.children[node.key]
            node = node.parent

    def _nodes(self) -> Iterator[_Node]:
        """All of them, each before those below it."""
        below = [self._top]
        while below:
            node = below.pop()
            yield node
            below += node.children.values()
