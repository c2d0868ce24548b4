"""Prefix cache and KV manager: exact cases, and random operations with `check` after each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.helpers import BLOCK, make_spec
from servekit.config.prefix_cache import CacheNamespace
from servekit.core.kv import KVManager
from servekit.core.plan import BlockCopy
from servekit.core.prefix.announced import AnnouncedPrefixes
from servekit.core.prefix.base import PrefixIndex
from servekit.core.prefix.chain import HashChain
from servekit.core.prefix.hash import HashPrefixIndex
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.prefix.radix import RadixPrefixIndex
from servekit.core.request import Request

IndexMaker = Callable[[CacheNamespace], PrefixIndex]
MakeKV = Callable[..., KVManager]


def hash_index(namespace: CacheNamespace = CacheNamespace.salt) -> PrefixIndex:
    return HashPrefixIndex(HashChain(BLOCK, namespace))


def radix_index(namespace: CacheNamespace = CacheNamespace.salt) -> PrefixIndex:
    return RadixPrefixIndex(BLOCK, namespace)


@pytest.fixture(params=[hash_index, radix_index])
def make_index(request: pytest.FixtureRequest) -> IndexMaker:
    maker: IndexMaker = request.param
    return maker


@pytest.fixture
def make_kv(make_index: IndexMaker) -> MakeKV:
    """Makes a KV manager with each kind of index."""
    def make(num_blocks: int = 16, num_host_blocks: int = 0,
             namespace: CacheNamespace = CacheNamespace.salt) -> KVManager:
        return KVManager(num_blocks, BLOCK, make_index(namespace), num_host_blocks,
                         AnnouncedPrefixes(HashChain(BLOCK, namespace)))
    return make


def request_of(name: str, tokens: list[int], salt: str = "", tenant: str = "") -> Request:
    return Request(dataclasses.replace(make_spec(name, tokens, salt=salt), tenant=tenant), max_model_len=1000)


def compute(kv: KVManager, request: Request, num_tokens: int | None = None) -> int:
    """Start a request, compute it, and make its blocks findable; returns the tokens found in the cache."""
    assert kv.start(request, request.num_tokens, 0) is not None
    cached = request.num_computed
    request.num_computed = num_tokens if num_tokens is not None else request.num_tokens
    kv.register(request)
    return cached


@pytest.mark.parametrize("length, shared, expected", [
    (12, 12, 8),   # All 12 tokens are known, but one must be computed: the last block is not taken.
    (13, 12, 12),
    (13, 11, 8),   # One token short of the third block.
    (13, 13, 12),
    (4, 4, 0),
    (5, 4, 4),
    (1, 1, 0),
])
def test_only_full_blocks_hit_and_never_the_whole_prompt(make_kv: MakeKV, length: int, shared: int,
                                                         expected: int) -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(shared)) + [900] * 5))
    tokens = list(range(shared)) + [800] * (length - shared)
    assert compute(kv, request_of("b", tokens)) == expected


def test_a_hit_survives_its_first_holder(make_kv: MakeKV) -> None:
    kv = make_kv()
    first = request_of("a", list(range(9)))
    compute(kv, first)
    kv.release(first)
    assert kv.pool.num_used == 0
    second = request_of("b", list(range(9)))
    assert compute(kv, second) == 8
    kv.check([second])


def test_equal_blocks_after_different_prefixes_do_not_hit(make_kv: MakeKV) -> None:
    kv = make_kv()
    compute(kv, request_of("a", [1] * 4 + [5] * 4 + [9]))
    assert compute(kv, request_of("b", [2] * 4 + [5] * 4 + [9])) == 0
    assert compute(kv, request_of("c", [5] * 4 + [1] * 4 + [9])) == 0


def test_salts_do_not_share(make_kv: MakeKV) -> None:
    kv = make_kv(32)
    prompt = list(range(9))
    assert compute(kv, request_of("a", prompt, salt="x")) == 0
    assert compute(kv, request_of("b", prompt)) == 0
    assert compute(kv, request_of("c", prompt, salt="y")) == 0
    assert compute(kv, request_of("d", prompt, salt="x")) == 8


def test_blocks_that_are_not_computed_are_not_found(make_kv: MakeKV) -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(12))), num_tokens=7)
    assert compute(kv, request_of("b", list(range(12)))) == 4


def test_prompt_logprobs_compute_the_whole_prompt(make_kv: MakeKV) -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(9))))
    scoring = Request(make_spec("b", list(range(9)), prompt_logprobs=0), max_model_len=1000)
    assert compute(kv, scoring) == 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning(make_kv: MakeKV) -> None:
    kv = make_kv(5)
    first, other = request_of("a", list(range(16))), request_of("b", [99] * 8)
    compute(kv, first)
    kv.release(first)
    compute(kv, other)  # Takes the block that was never used, then the last of the four.
    kv.release(other)
    assert compute(kv, request_of("c", [*range(16), 7])) == 12


def test_start_leaves_no_trace_when_reviving_the_hit_takes_the_last_free_blocks(make_kv: MakeKV) -> None:
    kv = make_kv(4)
    first, other = request_of("a", list(range(16))), request_of("b", [99] * 4)
    compute(kv, first)
    kv.release(first)
    compute(kv, other)
    second = request_of("c", [*range(12), 7])  # Three cached blocks and one more: four, and three are free.
    assert kv.start(second, 13, 0) is None
    assert second.block_ids == [] and second.num_computed == 0 and kv.pool.num_free == 3
    kv.check([other])


def test_reset_forgets_only_what_nobody_holds(make_kv: MakeKV) -> None:
    kv = make_kv()
    held, gone = request_of("a", list(range(9))), request_of("b", [50] * 9)
    compute(kv, held)
    compute(kv, gone)
    kv.release(gone)
    assert kv.reset_prefix_cache() == 2
    assert compute(kv, request_of("c", [50] * 9)) == 0
    assert compute(kv, request_of("d", list(range(9)))) == 8


def test_without_an_index_nothing_hits() -> None:
    kv = KVManager(16, BLOCK, NoPrefixIndex())
    compute(kv, request_of("a", list(range(9))))
    assert compute(kv, request_of("b", list(range(9)))) == 0


@pytest.mark.parametrize("namespace, cached", [(CacheNamespace.salt, 8), (CacheNamespace.tenant, 0)])
def test_tenants_share_unless_they_have_namespaces_of_their_own(make_kv: MakeKV, namespace: CacheNamespace,
                                                                cached: int) -> None:
    kv = make_kv(32, namespace=namespace)
    prompt = list(range(9))
    compute(kv, request_of("a", prompt, tenant="x"))
    assert compute(kv, request_of("b", prompt, tenant="y")) == cached
    assert compute(kv, request_of("c", prompt, tenant="x")) == 8
    assert compute(kv, request_of("d", prompt, tenant="x", salt="s")) == 0


def test_names_that_read_the_same_one_after_the_other_are_different_namespaces(make_kv: MakeKV) -> None:
    kv = make_kv(32, namespace=CacheNamespace.tenant)
    compute(kv, request_of("a", list(range(9)), tenant="xy", salt="z"))
    assert compute(kv, request_of("b", list(range(9)), tenant="x", salt="yz")) == 0


def test_blocks_computed_twice_become_one_in_the_tree_and_stay_two_in_the_hash_table() -> None:
    for index, held in ((radix_index(), 4), (hash_index(), 6)):
        kv = KVManager(16, BLOCK, index)
        first, second = request_of("a", list(range(9))), request_of("b", list(range(9)))
        for request in (first, second):
            kv.start(request, 9, 0)
        for request in (first, second):
            request.num_computed = 9
            kv.register(request)
        kv.check([first, second])
        assert kv.pool.num_used == held
        assert (first.block_ids[:2] == second.block_ids[:2]) == (held == 4)
        kv.release(first)
        assert compute(kv, request_of("c", list(range(9)))) == 8


# Swapping.


def test_a_swapped_request_gets_its_content_back_in_order(make_kv: MakeKV) -> None:
    kv = make_kv(8, 8)
    request = request_of("a", list(range(14)))
    kv.start(request, 14, 0)
    request.num_computed = 10
    kv.register(request)
    before = list(request.block_ids)
    outs = kv.swap_out(request)
    assert outs is not None and [copy.source for copy in outs] == before[:3]  # The fourth block is empty.
    assert kv.pool.num_used == 0 and kv.host_pool.num_used == 3 and request.num_computed == 10
    kv.reset_prefix_cache()
    ins = kv.start(request, 14, 0)
    assert ins == [BlockCopy(out.target, block) for out, block in zip(outs, request.block_ids, strict=False)]
    assert request.num_computed == 10 and len(request.block_ids) == 4
    assert kv.host_pool.num_free == 5, "the content is still on its way"
    kv.copies_done()
    assert kv.host_pool.num_free == 8
    kv.check([request])


def test_what_the_prefix_cache_still_has_is_shared_and_not_copied_back(make_kv: MakeKV) -> None:
    kv = make_kv(8, 8)
    request = request_of("a", list(range(11)))
    compute(kv, request, 10)
    outs = kv.swap_out(request)
    assert outs is not None
    ins = kv.start(request, 11, 0)
    assert ins == [BlockCopy(outs[2].target, request.block_ids[2])]
    assert request.block_ids[:2] == [out.source for out in outs[:2]]
    assert request.num_computed == 10 and request.num_registered_blocks == 2


def test_more_than_was_swapped_out_may_be_cached_meanwhile(make_kv: MakeKV) -> None:
    kv = make_kv(16, 8)
    request = request_of("a", list(range(14)))
    kv.start(request, 14, 0)
    request.num_computed = 6
    assert kv.swap_out(request) is not None
    compute(kv, request_of("b", [*range(13), 99]))
    assert kv.start(request, 14, 0) == []
    assert request.num_computed == 12
    kv.copies_done()
    assert kv.host_pool.num_used == 0


def test_blocks_are_found_again_after_a_swap(make_kv: MakeKV) -> None:
    kv = make_kv(8, 8)
    request = request_of("a", list(range(11)))
    compute(kv, request, 10)
    kv.swap_out(request)
    kv.reset_prefix_cache()
    kv.start(request, 11, 0)
    kv.copies_done()
    request.num_computed = 11
    kv.register(request)
    assert compute(kv, request_of("b", [*range(10), 77])) == 8


def test_a_full_host_changes_nothing(make_kv: MakeKV) -> None:
    kv = make_kv(8, 2)
    request = request_of("a", list(range(9)))
    compute(kv, request)
    before = list(request.block_ids)
    assert kv.swap_out(request) is None
    assert request.block_ids == before and request.num_computed == 9 and kv.host_pool.num_free == 2
    kv.check([request])


def test_host_blocks_on_their_way_back_are_not_given_to_others_in_the_same_plan(make_kv: MakeKV) -> None:
    kv = make_kv(8, 2)
    first, second = request_of("a", list(range(8))), request_of("b", list(range(100, 108)))
    for request in (first, second):
        kv.start(request, 8, 0)
        request.num_computed = 8
    kv.swap_out(first)
    kv.start(first, 8, 0)
    assert kv.swap_out(second) is None, "it would be copied out before the first is copied in"
    kv.copies_done()
    assert kv.swap_out(second) is not None


def test_shared_blocks_stay_with_those_who_are_not_swapped_out(make_kv: MakeKV) -> None:
    kv = make_kv(16, 8)
    first, second = request_of("a", list(range(9))), request_of("b", [*range(8), 50])
    compute(kv, first)
    compute(kv, second)
    assert first.block_ids[:2] == second.block_ids[:2]
    kv.swap_out(first)
    assert [kv.pool.ref_count(block) for block in second.block_ids] == [1, 1, 1]
    kv.check([first, second])


def test_a_request_that_ends_while_it_is_swapped_out_leaves_nothing(make_kv: MakeKV) -> None:
    kv = make_kv(8, 8)
    request = request_of("a", list(range(9)))
    compute(kv, request)
    kv.swap_out(request)
    kv.release(request)
    assert kv.host_pool.num_used == kv.pool.num_used == 0
    kv.check([])


def test_a_swap_in_without_room_leaves_no_trace(make_kv: MakeKV) -> None:
    kv = make_kv(3, 8)
    request = request_of("a", list(range(9)))
    compute(kv, request)
    kv.swap_out(request)
    other = request_of("b", [70])
    compute(kv, other)
    saved = list(request.host_block_ids)
    assert kv.start(request, 9, 0) is None
    assert request.host_block_ids == saved and request.block_ids == [] and request.num_computed == 9
    kv.check([request, other])


# Prefixes that are being computed.


def test_a_prefix_is_awaited_from_its_announcement_until_it_is_there(make_kv: MakeKV) -> None:
    kv = make_kv(32)
    leader, follower = request_of("a", list(range(16))), request_of("b", [*range(15), 99])
    assert kv.awaited_tokens(follower) == 0
    kv.start(leader, 16, 0)
    assert kv.awaited_tokens(follower) == 12
    leader.num_computed = 9
    kv.register(leader)
    assert kv.awaited_tokens(follower) == 12, "what is there already was waited for, too"
    assert kv.awaited_tokens(request_of("late", [*range(10), 50, 51, 52])) == 0
    assert kv.awaited_tokens(request_of("c", list(range(15)), salt="s")) == 0
    leader.num_computed = 16
    kv.register(leader)
    assert kv.awaited_tokens(follower) == 0
    kv.check([leader])


@pytest.mark.parametrize("leave", [KVManager.release, KVManager.swap_out, KVManager.pause])
def test_nobody_waits_for_one_who_has_left(make_kv: MakeKV, leave: Callable[[KVManager, Request], object]) -> None:
    kv = make_kv(16, 8)
    leader, follower = request_of("a", list(range(16))), request_of("b", list(range(16)))
    kv.start(leader, 16, 0)
    leader.num_computed = 5
    kv.register(leader)
    leave(kv, leader)
    assert kv.awaited_tokens(follower) == 0
    kv.start(leader, 16, 0)
    assert kv.awaited_tokens(follower) == 8, "it computes again"
    kv.copies_done()
    kv.check([leader])


class KVMachine(RuleBasedStateMachine):
    """Requests over few distinct prompts start, compute, are swapped out, come back, pause and leave at random.

    As in a step, what is decided comes first and is done afterwards: copies out, copies in, tokens. `content` and
    `host_content` remember which tokens were computed into each block; a request must find exactly its own before
    it computes, whatever was evicted, overwritten and copied meanwhile.
    """

    make_index: IndexMaker

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(10, BLOCK, type(self).make_index(CacheNamespace.salt), 6,
                            AnnouncedPrefixes(HashChain(BLOCK, CacheNamespace.salt)))
        self.running: list[Request] = []
        self.away: list[Request] = []
        """Swapped out or paused."""
        self.started: list[Request] = []
        """In the plan that is being made."""
        self.outs: list[BlockCopy] = []
        self.ins: list[BlockCopy] = []
        self.content: dict[int, tuple[object, ...]] = {}
        self.host_content: dict[int, tuple[object, ...]] = {}
        self.count = 0

    @rule(prefix=st.integers(0, 2), length=st.integers(1, 30), salt=st.sampled_from(["", "s"]),
          reserve=st.integers(0, 2))
    def start(self, prefix: int, length: int, salt: str, reserve: int) -> None:
        self.count += 1
        request = request_of(f"r{self.count}", [prefix * 1000 + i // 7 for i in range(length)], salt)
        if self._start(request, reserve):
            assert request.host_block_ids == []
        else:
            assert request.block_ids == [] and request.num_computed == 0

    @precondition(lambda self: self.away)
    @rule(data=st.data(), reserve=st.integers(0, 2))
    def come_back(self, data: st.DataObject, reserve: int) -> None:
        request = data.draw(st.sampled_from(self.away))
        had = request.num_computed
        if self._start(request, reserve):
            self.away.remove(request)
            assert request.num_computed >= had and request.host_block_ids == []

    def _start(self, request: Request, reserve: int) -> bool:
        free = self.kv.pool.num_free
        copies = self.kv.start(request, request.num_tokens, reserve)
        if copies is None:
            assert self.kv.pool.num_free == free
            return False
        assert self.kv.pool.num_free >= reserve or self.kv.pool.num_free == free, "a paused one may need none"
        assert request.num_computed < request.num_tokens <= len(request.block_ids) * BLOCK
        self.ins += copies
        self.running.append(request)
        self.started.append(request)
        return True

    @precondition(lambda self: len(self.running) > len(self.started))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = self._draw_settled(data)
        blocks, num_computed, free = list(request.block_ids), request.num_computed, self.kv.host_pool.num_free
        copies = self.kv.swap_out(request)
        needed = self.kv.blocks_for(num_computed)
        assert (copies is None) == (needed > free)
        if copies is None:
            assert request.block_ids == blocks
            return
        self.running.remove(request)
        assert [copy.source for copy in copies] == blocks[:needed] and request.num_computed == num_computed
        self.outs += copies
        self.away.append(request)

    @precondition(lambda self: len(self.running) > len(self.started))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request = self._draw_settled(data)
        self.running.remove(request)
        self.kv.pause(request)
        self.away.append(request)

    @precondition(lambda self: len(self.running) > len(self.started))
    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        request = self._draw_settled(data)
        self.running.remove(request)
        self.kv.release(request)

    def _draw_settled(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from([request for request in self.running if request not in self.started]))

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        """Do what was decided, and book it; one request may leave while that goes on."""
        if self.running and data.draw(st.booleans()):
            leaver = data.draw(st.sampled_from(self.running))
            self.running.remove(leaver)
            self.kv.release(leaver)
        for copies in (self.outs, self.ins):
            assert len({copy.target for copy in copies}) == len(copies), "a block is the target of two copies"
        for source, target in self.outs:
            self.host_content[target] = self.content[source]
        for source, target in self.ins:
            self.content[target] = self.host_content[source]
        self.kv.copies_done()
        self.started, self.outs, self.ins = [], [], []
        for request in self.running:
            self._compute(request, data.draw(st.integers(0, 9)))
        for request in self.running:
            self.kv.register(request)
            if request.num_computed == request.num_tokens:
                self._append(request)
        self.running = [request for request in self.running if request.block_ids]

    def _compute(self, request: Request, num_tokens: int) -> None:
        for index in range(self.kv.blocks_for(request.num_computed)):
            assert self.content[request.block_ids[index]] == self._expected(request, request.num_computed, index)
        end = min(request.num_tokens, request.num_computed + num_tokens)
        for index in range(request.num_computed // BLOCK, self.kv.blocks_for(end)):
            assert self.kv.pool.ref_count(request.block_ids[index]) == 1, "a shared block is written"
            self.content[request.block_ids[index]] = self._expected(request, end, index)
        request.num_computed = end

    def _append(self, request: Request) -> None:
        if self.kv.grow(request, request.num_tokens + 1):
            request.token_ids.append(7)
        else:
            self.kv.release(request)

    def _expected(self, request: Request, num_computed: int, index: int) -> tuple[object, ...]:
        return (request.spec.cache_salt, *request.token_ids[:min(num_computed, (index + 1) * BLOCK)])

    @precondition(lambda self: self.away and not self.started and not self.outs)
    @rule(data=st.data())
    def leave_while_away(self, data: st.DataObject) -> None:
        self.kv.release(self.away.pop(data.draw(st.integers(0, len(self.away) - 1))))

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def accounting_agrees(self) -> None:
        self.kv.check(self.running + self.away)

    def teardown(self) -> None:
        for request in self.running + self.away:
            self.kv.release(request)
        self.kv.copies_done()
        self.kv.check([])
        assert self.kv.pool.num_free == self.kv.num_blocks
        assert self.kv.host_pool.num_free == self.kv.host_pool.num_blocks


class HashMachine(KVMachine):
    make_index = staticmethod(hash_index)


class RadixMachine(KVMachine):
    make_index = staticmethod(radix_index)

    @invariant()
    def holders_lock_the_path_to_their_blocks(self) -> None:
        """Ends of leaves are free before what they continue, and the first that the pool gives away."""
        index, order = self.kv._index, {block: place for place, block in enumerate(self.kv.pool.free_order())}
        assert isinstance(index, RadixPrefixIndex)
        for node in index._nodes():
            before = node.parent.blocks[-1:] if node.parent is not None else []
            for earlier, later in itertools.pairwise(before + node.blocks):
                assert self.kv.pool.ref_count(earlier) >= self.kv.pool.ref_count(later)
                assert earlier not in order or order[later] < order[earlier]


class NoIndexMachine(KVMachine):
    make_index = staticmethod(lambda _: NoPrefixIndex())


TestHashMachine = HashMachine.TestCase
TestRadixMachine = RadixMachine.TestCase
TestNoIndexMachine = NoIndexMachine.TestCase
for _case in (TestHashMachine, TestRadixMachine, TestNoIndexMachine):
    _case.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
