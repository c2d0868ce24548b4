"""The block pool, alone: exact free order, and random operations against a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.core.blocks import BlockPool


def test_blocks_leave_in_order_and_released_ones_go_last() -> None:
    pool = BlockPool(5)
    assert pool.take(2) == [0, 1]
    pool.release(1)
    pool.release(0)
    assert pool.free_order() == [2, 3, 4, 1, 0]


def test_blocks_without_content_are_reused_first() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    assert taken == [0, 1, 2]
    pool.release(0, reuse_soon=True)
    pool.release(1)
    assert pool.free_order() == [0, 3, 1]


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.take(2)
    assert pool.take(2) is None
    assert pool.num_free == 1


def test_a_shared_free_block_comes_back_into_use() -> None:
    pool = BlockPool(3)
    pool.take(1)
    pool.release(0)
    pool.share([0])
    assert pool.num_free == 2 and pool.ref_count(0) == 1


def test_releasing_a_free_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="released more often"):
        BlockPool(1).release(0)


class PoolMachine(RuleBasedStateMachine):
    """Random takes, shares and releases against a list of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[int] = []

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        before = self.pool.free_order()
        blocks = self.pool.take(count)
        if count > len(before):
            assert blocks is None and self.pool.free_order() == before
        else:
            assert blocks == before[:count]
            self.held += blocks

    @rule(block=st.integers(0, 11))
    def share(self, block: int) -> None:
        self.pool.share([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), soon=st.booleans())
    def release(self, data: st.DataObject, soon: bool) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(block, reuse_soon=soon)
        if block not in self.held:
            assert self.pool.free_order()[0 if soon else -1] == block

    @invariant()
    def accounting_agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(set(self.held))
        assert all(self.pool.ref_count(block) == self.held.count(block) for block in range(12))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
