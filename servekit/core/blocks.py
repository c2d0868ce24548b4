"""Block accounting: which KV blocks are free, and how many requests hold each of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BlockId = int


class BlockPool:
    """Reference counts of `num_blocks` blocks and the free ones in eviction order.

    A block is free exactly when its count is zero. Free blocks leave from the front of the order. `release` appends
    to the back, so what was released last is reused last and a cached prefix in it can still be found (LRU);
    blocks that hold nothing worth finding go to the front instead. All operations are O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one request holds."""
        return self.num_blocks - len(self._free)

    def is_free(self, block: BlockId) -> bool:
        return block in self._free

    def ref_count(self, block: BlockId) -> int:
        return self._ref_counts[block]

    def free_order(self) -> list[BlockId]:
        """The free blocks, next to be taken first."""
        return list(self._free)

    def take(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks, or none at all: None when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a holder to each block; a free block comes back into use with its content."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, block: BlockId, *, reuse_soon: bool = False) -> None:
        """Remove one holder; without holders the block is free, first in line if `reuse_soon`."""
        count = self._ref_counts[block]
        assert count > 0, f"block {block} is released more often than it was taken"
        self._ref_counts[block] = count - 1
        if count == 1:
            self._free[block] = None
            if reuse_soon:
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError unless the counts and the free list agree."""
        assert all(count >= 0 for count in self._ref_counts), "negative reference count"
        unheld = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert unheld == set(self._free), f"free list and counts differ in {unheld ^ set(self._free)}"
