"""Attention of decodes, prefill chunks and mixtures, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import attention_batch
from servekit.kernels import fp8_kv
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.triton.attention import PagedAttention
from servekit.kernels.triton.attention_decode import num_parts
from servekit.kernels.triton.attention_prefill import MOST_HEADS_PER_KEY_HEAD
from servekit.kernels.triton.device import Gpu
from triton_cases import (
    EVERY_DTYPE,
    KERNELS,
    NEW,
    OLD,
    REFERENCE,
    SEEDS,
    Attention,
    assert_near,
    attention,
    numbers,
    quick,
)

HEAD_DIMS = st.sampled_from([64, 96, 128, 256])
GROUPS = st.integers(1, 8) | st.just(17)
BORDERS = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129])
CONTEXTS = BORDERS | st.integers(1, 150)
CHUNKS = st.just(1) | st.sampled_from([2, 7, 8, 9, 16, 33, 1000]) | st.integers(1, 50)
WINDOWS = st.none() | st.sampled_from([1, 2, 16, 31, 32, 33, 5000]) | st.integers(1, 150)
STEPS = 3.0
"""Rounding of the weights and of the output."""
MANY = Gpu(num_processors=1000, has_fp8=True)
"""A GPU that takes many parts to fill."""


def assert_attends(case: Attention, window: int | None, gpu: Gpu = NEW) -> None:
    actual = PagedAttention(gpu)(case.q, case.keys, case.values, case.batch, 0.11, window)
    expected = REFERENCE.paged_attention(case.q.double(), case.keys, case.values, case.batch, 0.11, window)
    assert actual.dtype == case.q.dtype and actual.shape == case.q.shape
    assert_near(actual, expected, case.q.dtype, STEPS)


@EVERY_DTYPE
@given(lengths=st.lists(st.tuples(CONTEXTS, CHUNKS), min_size=1, max_size=4), block_size=st.sampled_from([1, 7, 32]),
       num_kv_heads=st.integers(1, 2), group=GROUPS, head_dim=HEAD_DIMS, window=WINDOWS, seed=SEEDS)
@quick(12)
def test_attention_of_any_mixture(dtype: torch.dtype, lengths: list[tuple[int, int]], block_size: int,
                                  num_kv_heads: int, group: int, head_dim: int, window: int | None,
                                  seed: int) -> None:
    assert_attends(attention(lengths, block_size, num_kv_heads, group, head_dim, dtype, seed), window)


@pytest.mark.parametrize("window", [None, 1, 16, 33, 300])
@pytest.mark.parametrize("queries", [1, 3, 1000])
def test_attention_at_the_borders_of_blocks_and_tiles(queries: int, window: int | None) -> None:
    contexts = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65] + [95] * (queries < 1000)
    assert_attends(attention([(context, queries) for context in contexts], 16, 1, 3, 64, torch.float32, 1), window)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_number_of_heads_that_share_a_key(group: int) -> None:
    assert_attends(attention([(40, 1), (40, 40), (70, 20)], 16, 2, group, 64, torch.float16, 1), None)


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 1, 40, 700])
def test_a_context_in_parts_is_the_whole(dtype: torch.dtype, window: int | None) -> None:
    """Some parts are empty: the contexts are shorter than the longest, or the window is."""
    case = attention([(800, 1), (1, 1), (300, 1), (33, 1)], 16, 1, 2, 64, dtype, 1)
    assert num_parts(4, 1, 800, MANY.num_processors) == 4
    assert_attends(case, window, MANY)


def test_a_part_holds_the_right_share_of_the_weights() -> None:
    """All the weight lies in one part, wherever that is: the others' means must not count."""
    for position in (0, 300, 599):
        case = attention([(600, 1)], 16, 1, 1, 64, torch.float32, 1)
        block, offset = case.batch.block_tables[0, position // 16], position % 16
        case.keys[block, 0, offset] = 100 * case.q[0, 0]
        assert_attends(case, None, MANY)


@pytest.mark.parametrize(("requests", "heads", "context", "expected"), [
    (1, 1, 1, 1), (1, 1, 256, 1), (1, 1, 257, 2), (1, 8, 131072, 33), (1, 8, 1024, 4), (64, 8, 131072, 1),
    (1, 1, 131072, 64)])
def test_a_few_requests_fill_the_gpu(requests: int, heads: int, context: int, expected: int) -> None:
    assert num_parts(requests, heads, context, 132) == expected


def test_padding_requests_are_harmless() -> None:
    """A captured graph has rows without a context, whose table is block 0."""
    case = attention([(70, 1), (33, 1)], 16, 2, 2, 64, torch.float32, 1)
    batch = case.batch
    padded = replace(
        batch, query_start=torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32), query_start_host=(0, 1, 2, 3, 4),
        context_lens=torch.tensor([70, 33, 0, 0], dtype=torch.int32), context_lens_host=(70, 33, 0, 0),
        block_tables=torch.cat([batch.block_tables, torch.zeros_like(batch.block_tables)]))
    q = torch.cat([case.q, case.q])
    for gpu in (NEW, MANY):
        out = PagedAttention(gpu)(q, case.keys, case.values, padded, 0.11, None)
        expected = REFERENCE.paged_attention(case.q, case.keys, case.values, batch, 0.11, None)
        assert_near(out[:2], expected, torch.float32, STEPS)
        assert torch.equal(out[2:], torch.zeros_like(out[2:]))


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_request_without_queries_is_skipped(empty: int) -> None:
    query_lens, context_lens = [40, 1, 20], [40, 17, 64]
    case = attention(list(zip(context_lens, query_lens, strict=True)), 16, 1, 3, 64, torch.float32, 1)
    tables = case.batch.block_tables.tolist()
    for items, item in ((query_lens, 0), (context_lens, 5), (tables, tables[0])):
        items.insert(empty, item)  # type: ignore[attr-defined]
    batch = attention_batch(query_lens, context_lens, tables, 16)
    actual = KERNELS.paged_attention(case.q, case.keys, case.values, batch, 0.11, None)
    expected = REFERENCE.paged_attention(case.q, case.keys, case.values, case.batch, 0.11, None)
    assert_near(actual, expected, torch.float32, STEPS)


def test_more_heads_a_key_head_than_a_tile_holds_are_refused() -> None:
    case = attention([(5, 2)], 16, 1, MOST_HEADS_PER_KEY_HEAD, 64, torch.float32, 1)
    assert_attends(case, None)
    with pytest.raises(ValueError, match="33 query heads a key head: the Triton attention takes 32"):
        assert_attends(attention([(5, 2)], 16, 1, MOST_HEADS_PER_KEY_HEAD + 1, 64, torch.float32, 1), None)


@pytest.mark.parametrize("queries", [1, 20])
def test_attention_to_a_nan_is_nan(queries: int) -> None:
    """What a model spoils must show in its logits."""
    case = attention([(100, queries), (100, queries)], 16, 1, 2, 64, torch.float32, 1)
    case.keys[case.batch.block_tables[0, 3], 0, 5, 7] = float("nan")
    out = KERNELS.paged_attention(case.q, case.keys, case.values, case.batch, 0.2, None)
    assert out[:queries].isnan().all() and out[queries:].isfinite().all()


def test_queries_may_be_a_view() -> None:
    case = attention([(50, 1), (40, 30)], 16, 2, 2, 64, torch.float32, 1)
    wide = torch.cat([case.q, torch.full_like(case.q, float("nan"))], dim=1)
    viewed = wide[:, :case.q.shape[1]]
    assert torch.equal(KERNELS.paged_attention(viewed, case.keys, case.values, case.batch, 0.2, None),
                       KERNELS.paged_attention(case.q, case.keys, case.values, case.batch, 0.2, None))


@EVERY_DTYPE
@pytest.mark.parametrize("gpu", [NEW, OLD], ids=["fp8", "bytes"])
@given(lengths=st.lists(st.tuples(CONTEXTS, CHUNKS), min_size=1, max_size=3), group=st.integers(1, 4),
       window=WINDOWS, seed=SEEDS)
@quick(3)
def test_attention_over_a_cache_of_eight_bits(dtype: torch.dtype, gpu: Gpu, lengths: list[tuple[int, int]], group: int,
                                              window: int | None, seed: int) -> None:
    case = attention(lengths, 16, 2, group, 64, dtype, seed)
    keys, values = (cache.to(torch.float8_e4m3fn) for cache in (case.keys, case.values))
    scales = KVScales(0.5, 3.0)
    actual = PagedAttention(gpu)(case.q, keys, values, case.batch, 0.2, window, scales)
    expected = fp8_kv.reference_attention(case.q.double(), keys, values, case.batch, 0.2, window, scales)
    assert_near(actual / scales.value, expected / scales.value, dtype, STEPS)


@EVERY_DTYPE
def test_engines_keep_a_cache_of_eight_bits_without_scales(dtype: torch.dtype) -> None:
    """The operations as a `Kernels` has them: a step writes its keys and values, and attends to them."""
    case = attention([(40, 1), (37, 12)], 16, 2, 2, 64, dtype, 1)
    heads = numbers(13, 8, 64, seed=2, dtype=dtype)
    q, k, v = heads.split_with_sizes([4, 2, 2], dim=1)
    angles = torch.outer(torch.arange(40.0), numbers(32, seed=3))
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.tensor([39, *range(25, 37)])
    attended = []
    for kernels in (KERNELS, REFERENCE):
        caches = [cache.to(torch.float8_e4m3fn) for cache in (case.keys, case.values)]
        rotated = kernels.rope_and_cache(q, k, v, cos_sin, positions, *caches, case.batch.slots)
        attended.append(kernels.paged_attention(rotated, *caches, case.batch, 0.2, None))
    assert_near(*attended, dtype, STEPS)


def test_rows_of_other_requests_are_left_alone() -> None:
    """Each kernel writes its own kind of requests: together they write every row once."""
    case = attention([(40, 1), (40, 12), (20, 1), (33, 2)], 16, 1, 2, 64, torch.float32, 1)
    together = KERNELS.paged_attention(case.q, case.keys, case.values, case.batch, 0.2, None)
    for index, (start, end) in enumerate(zip(case.batch.query_start_host[:-1], case.batch.query_start_host[1:],
                                             strict=True)):
        alone: Tensor = KERNELS.paged_attention(
            case.q[start:end], case.keys, case.values,
            attention_batch([end - start], [case.batch.context_lens_host[index]],
                            [case.batch.block_tables[index].tolist()], 16), 0.2, None)
        assert_near(together[start:end], alone, torch.float32)
