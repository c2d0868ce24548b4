"""The radix tree: exact shapes, and random requests against a plain dictionary and against the hash chain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import BLOCK, make_spec
from servekit.config.prefix_cache import CacheNamespace
from servekit.core.kv import KVManager
from servekit.core.prefix.base import PrefixIndex
from servekit.core.prefix.chain import HashChain
from servekit.core.prefix.hash import HashPrefixIndex
from servekit.core.prefix.radix import RadixPrefixIndex
from servekit.core.request import Request

BLOCKS_OF_TOKENS = st.lists(st.sampled_from([1, 2]), max_size=8)
"""What a request's blocks are filled with: few values, so that prefixes meet and part everywhere."""


def radix() -> RadixPrefixIndex:
    return RadixPrefixIndex(BLOCK, CacheNamespace.salt)


def request_of(name: str, tokens: Sequence[int], salt: str = "") -> Request:
    return Request(make_spec(name, tokens, salt=salt), max_model_len=10_000)


def filled(values: Sequence[int]) -> list[int]:
    return [value for value in values for _ in range(BLOCK)]


def compute(kv: KVManager, request: Request) -> int:
    """Start a request and compute it; returns the tokens found in the cache."""
    assert kv.start(request, request.num_tokens, 0) is not None
    cached = request.num_computed
    request.num_computed = request.num_tokens
    kv.register(request)
    kv._index.check()
    return cached


@given(st.lists(st.tuples(BLOCKS_OF_TOKENS, st.integers(0, BLOCK - 1), st.sampled_from(["", "s"])), max_size=12))
@settings(max_examples=150, deadline=None)
def test_what_was_inserted_matches_to_the_last_full_block(given_requests: list[tuple[list[int], int, str]]) -> None:
    kv = KVManager(200, BLOCK, index := radix())
    known: dict[tuple[object, ...], int] = {}
    """Every prefix of full blocks that was computed, by namespace, with the block at its end."""
    for number, (values, rest, salt) in enumerate(given_requests):
        request = request_of(f"r{number}", filled(values) + [9] * rest + [number + 100], salt)
        prefixes = [(salt, *request.token_ids[:end]) for end in range(BLOCK, request.num_tokens + 1, BLOCK)]
        hits = [known[prefix] for prefix in prefixes if prefix in known]
        assert index.match(request) == hits[:(request.num_tokens - 1) // BLOCK]
        compute(kv, request)
        for prefix, block in zip(prefixes, request.block_ids, strict=False):
            assert known.setdefault(prefix, block) == block, "a prefix has two blocks, or a split has mixed them up"
        probe = request_of("probe", [*request.token_ids, 77], salt)
        assert index.match(probe) == request.block_ids[:request.num_tokens // BLOCK]
    assert sum(len(node.blocks) for node in index._nodes()) == len(known)


def test_a_node_is_split_where_a_request_leaves_it() -> None:
    kv = KVManager(64, BLOCK, index := radix())
    compute(kv, request_of("a", filled([1, 2, 3, 4])))
    assert [len(node.blocks) for node in index._nodes() if node.blocks] == [4]
    compute(kv, request_of("b", filled([1, 2, 7])))
    sizes = sorted((len(node.blocks), len(node.children)) for node in index._nodes() if node.blocks)
    assert sizes == [(1, 0), (2, 0), (2, 2)]


def test_a_request_that_grows_extends_its_leaf() -> None:
    kv = KVManager(64, BLOCK, index := radix())
    request = request_of("a", filled([1, 2]))
    compute(kv, request)
    for _ in range(3 * BLOCK):
        assert kv.grow(request, request.num_tokens + 1)
        request.token_ids.append(5)
        request.num_computed += 1
        kv.register(request)
        kv.check([request])
    assert [len(node.blocks) for node in index._nodes() if node.blocks] == [5]


def test_namespaces_leave_nothing_behind() -> None:
    kv = KVManager(8, BLOCK, index := radix())
    for number in range(20):
        request = request_of(f"r{number}", filled([1, 2]), salt=f"s{number}")
        assert compute(kv, request) == 0
        kv.release(request)
    assert len(index._top.children) <= 4
    kv.reset_prefix_cache()
    index.check()
    assert not index._top.children


def test_only_the_end_of_a_leaf_can_be_forgotten() -> None:
    kv = KVManager(8, BLOCK, index := radix())
    request = request_of("a", filled([1, 2, 3]))
    compute(kv, request)
    with pytest.raises(AssertionError, match="not the end of a leaf"):
        index.forget([request.block_ids[1]])


def test_the_least_recently_used_branch_goes_first_and_its_trunk_last() -> None:
    kv = KVManager(5, BLOCK, radix())
    for name, values in (("a", [1, 2]), ("b", [1, 3]), ("a again", [1, 2])):
        request = request_of(name, [*filled(values), 0])
        compute(kv, request)
        kv.release(request)
    other = request_of("c", filled([8, 8, 8]))
    compute(kv, other)
    kv.release(other)
    assert compute(kv, request_of("b", [*filled([1, 3]), 0])) == BLOCK, "the trunk outlives its oldest branch"


def random_trace(rng: random.Random, count: int) -> list[tuple[list[int], str]]:
    """Prompts that do not end with a full block: its last token is computed again, and so the block would be."""
    return [(filled([rng.randrange(2) for _ in range(rng.randrange(7))]) + [9] * rng.randrange(1, BLOCK),
             rng.choice(["", "", "s"])) for _ in range(count)]


def hits(index: PrefixIndex, num_blocks: int, trace: list[tuple[list[int], str]], num_held: int) -> list[int]:
    """Cached tokens of each request of a trace of which so many are held at a time."""
    kv, held, found = KVManager(num_blocks, BLOCK, index), list[Request](), []
    for number, (tokens, salt) in enumerate(trace):
        if len(held) == num_held:
            kv.release(held.pop(0))
        request = request_of(f"r{number}", tokens, salt)
        held.append(request)
        found.append(compute(kv, request))
    return found


@pytest.mark.parametrize("num_blocks, num_held", [(9, 1), (14, 1), (400, 5)])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_tree_and_the_hash_chain_find_the_same(num_blocks: int, num_held: int, seed: int) -> None:
    """One request at a time under eviction, and several without it: what is computed twice they keep differently."""
    trace = random_trace(random.Random(seed), 40)
    chain = HashPrefixIndex(HashChain(BLOCK, CacheNamespace.salt))
    found = hits(radix(), num_blocks, trace, num_held)
    assert found == hits(chain, num_blocks, trace, num_held)
    assert any(found), "the trace was meant to hit"
