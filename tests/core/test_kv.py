"""Prefix cache and KV manager: exact cases, and random operations with `check` after each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.helpers import BLOCK, make_spec
from servekit.core.kv import KVManager
from servekit.core.prefix.hash import HashPrefixIndex
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.request import Request


def make_kv(num_blocks: int = 16) -> KVManager:
    return KVManager(num_blocks, BLOCK, HashPrefixIndex(BLOCK))


def request_of(name: str, tokens: list[int], salt: str = "") -> Request:
    return Request(make_spec(name, tokens, salt=salt), max_model_len=1000)


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
def test_only_full_blocks_hit_and_never_the_whole_prompt(length: int, shared: int, expected: int) -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(shared)) + [900] * 5))
    tokens = list(range(shared)) + [800] * (length - shared)
    assert compute(kv, request_of("b", tokens)) == expected


def test_a_hit_survives_its_first_holder() -> None:
    kv = make_kv()
    first = request_of("a", list(range(9)))
    compute(kv, first)
    kv.release(first)
    assert kv.pool.num_used == 0
    second = request_of("b", list(range(9)))
    assert compute(kv, second) == 8
    kv.check([second])


def test_equal_blocks_after_different_prefixes_do_not_hit() -> None:
    kv = make_kv()
    compute(kv, request_of("a", [1] * 4 + [5] * 4 + [9]))
    assert compute(kv, request_of("b", [2] * 4 + [5] * 4 + [9])) == 0
    assert compute(kv, request_of("c", [5] * 4 + [1] * 4 + [9])) == 0


def test_salts_do_not_share() -> None:
    kv = make_kv(32)
    prompt = list(range(9))
    assert compute(kv, request_of("a", prompt, salt="x")) == 0
    assert compute(kv, request_of("b", prompt)) == 0
    assert compute(kv, request_of("c", prompt, salt="y")) == 0
    assert compute(kv, request_of("d", prompt, salt="x")) == 8


def test_blocks_that_are_not_computed_are_not_found() -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(12))), num_tokens=7)
    assert compute(kv, request_of("b", list(range(12)))) == 4


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    kv = make_kv()
    compute(kv, request_of("a", list(range(9))))
    scoring = Request(make_spec("b", list(range(9)), prompt_logprobs=0), max_model_len=1000)
    assert compute(kv, scoring) == 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    kv = make_kv(5)
    first, other = request_of("a", list(range(16))), request_of("b", [99] * 8)
    compute(kv, first)
    kv.release(first)
    compute(kv, other)  # Takes the block that was never used, then the last of the four.
    kv.release(other)
    assert compute(kv, request_of("c", [*range(16), 7])) == 12


def test_start_leaves_no_trace_when_reviving_the_hit_takes_the_last_free_blocks() -> None:
    kv = make_kv(4)
    first, other = request_of("a", list(range(16))), request_of("b", [99] * 4)
    compute(kv, first)
    kv.release(first)
    compute(kv, other)
    second = request_of("c", [*range(12), 7])  # Three cached blocks and one more: four, and three are free.
    assert kv.start(second, 13, 0) is None
    assert second.block_ids == [] and second.num_computed == 0 and kv.pool.num_free == 3
    kv.check([other])


def test_reset_forgets_only_what_nobody_holds() -> None:
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


class KVMachine(RuleBasedStateMachine):
    """Requests over few distinct prompts start, grow, compute and leave at random.

    `content` remembers which tokens were computed into each block; a hit must return blocks that hold exactly the
    prefix asked for, whatever was evicted and overwritten meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_kv(10)
        self.active: list[Request] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.count = 0

    @rule(prefix=st.integers(0, 2), length=st.integers(1, 30), salt=st.sampled_from(["", "s"]),
          reserve=st.integers(0, 2))
    def start(self, prefix: int, length: int, salt: str, reserve: int) -> None:
        self.count += 1
        tokens = [prefix * 1000 + i // 7 for i in range(length)]
        request = request_of(f"r{self.count}", tokens, salt)
        free = self.kv.pool.num_free
        if self.kv.start(request, length, reserve) is None:
            assert request.block_ids == [] and self.kv.pool.num_free == free
            return
        assert self.kv.pool.num_free >= reserve
        assert request.num_computed < length
        for index in range(request.num_computed // BLOCK):
            expected = (salt, *request.token_ids[:(index + 1) * BLOCK])
            assert self.content[request.block_ids[index]] == expected
        self.active.append(request)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), step=st.integers(1, 9))
    def compute(self, data: st.DataObject, step: int) -> None:
        request = data.draw(st.sampled_from(self.active))
        end = min(request.num_tokens, request.num_computed + step)
        for index in range(request.num_computed // BLOCK, self.kv.blocks_for(end)):
            block = request.block_ids[index]
            assert self.kv.pool.ref_count(block) == 1, "a shared block is written"
            self.content[block] = (request.spec.cache_salt, *request.token_ids[:min(end, (index + 1) * BLOCK)])
        request.num_computed = end
        self.kv.register(request)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.active))
        if request.num_computed == request.num_tokens and self.kv.grow(request, request.num_tokens + 1):
            request.token_ids.append(7)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        self.kv.release(request)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def accounting_agrees(self) -> None:
        self.kv.check(self.active)

    def teardown(self) -> None:
        for request in self.active:
            self.kv.release(request)
        self.kv.check([])
        assert self.kv.pool.num_free == self.kv.num_blocks


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
