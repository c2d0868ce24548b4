"""Every reference operation against an independent, naive formulation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import attention_batch, empty_cache
from servekit.kernels import AttentionBatch, reference_kernels

KERNELS = reference_kernels()
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
quick = settings(max_examples=25, deadline=None)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of `actual`'s number format."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[actual.dtype],
                               atol=TOLERANCE[actual.dtype])


@EVERY_DTYPE
@given(rows=st.integers(1, 5), width=st.integers(1, 70), seed=st.integers(0, 99))
@quick
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x, weight, eps = numbers(rows, width, seed=seed, dtype=dtype), numbers(width, seed=seed + 1, dtype=dtype), 1e-5
    expected = torch.tensor([[number / math.sqrt(sum(other ** 2 for other in row) / width + eps) * factor
                              for number, factor in zip(row, weight.tolist(), strict=True)] for row in x.tolist()],
                            dtype=torch.float64)
    actual = KERNELS.rms_norm(x, weight, eps)
    assert actual.dtype == dtype
    assert_close(actual, expected)


@EVERY_DTYPE
@given(rows=st.integers(1, 5), width=st.integers(1, 70), seed=st.integers(0, 99))
@quick
def test_add_rms_norm(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x, residual = numbers(rows, width, seed=seed, dtype=dtype), numbers(rows, width, seed=seed + 1, dtype=dtype)
    weight = numbers(width, seed=seed + 2, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, before[0].double() + before[1].double())
    assert_close(normed, KERNELS.rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0])


@EVERY_DTYPE
@given(rows=st.integers(1, 5), width=st.integers(1, 40), seed=st.integers(0, 99))
@quick
def test_silu_and_mul(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    gate_up = numbers(rows, 2 * width, seed=seed, dtype=dtype)
    expected = torch.tensor([[row[column] / (1 + math.exp(-row[column])) * row[width + column]
                              for column in range(width)] for row in gate_up.tolist()], dtype=torch.float64)
    assert_close(KERNELS.silu_and_mul(gate_up), expected)


@EVERY_DTYPE
@given(rows=st.integers(1, 4), width=st.integers(1, 9), out=st.integers(1, 9), seed=st.integers(0, 99))
@quick
def test_linear(dtype: torch.dtype, rows: int, width: int, out: int, seed: int) -> None:
    x, weight = numbers(rows, width, seed=seed, dtype=dtype), numbers(out, width, seed=seed + 1, dtype=dtype)
    expected = torch.zeros(rows, out, dtype=torch.float64)
    for row in range(rows):
        for column in range(out):
            for inner in range(width):
                expected[row, column] += x[row, inner].double() * weight[column, inner].double()
    assert_close(KERNELS.dense(weight)(x), expected)


@given(num_source=st.integers(1, 9), num_target=st.integers(1, 9), data=st.data())
@quick
def test_copy_blocks(num_source: int, num_target: int, data: st.DataObject) -> None:
    source, target = numbers(num_source, 2, 4, 3, seed=1), numbers(num_target, 2, 4, 3, seed=2)
    before = target.clone()
    targets = data.draw(st.lists(st.integers(0, num_target - 1), unique=True))
    sources = [data.draw(st.integers(0, num_source - 1)) for _ in targets]
    KERNELS.copy_blocks(source, target, torch.tensor(sources, dtype=torch.int64),
                        torch.tensor(targets, dtype=torch.int64))
    for block in range(num_target):
        origin = source[sources[targets.index(block)]] if block in targets else before[block]
        assert torch.equal(target[block], origin)


@EVERY_DTYPE
@given(num_tokens=st.integers(1, 9), half=st.integers(1, 8), num_heads=st.integers(1, 4), seed=st.integers(0, 99))
@quick
def test_rope_and_cache(dtype: torch.dtype, num_tokens: int, half: int, num_heads: int, seed: int) -> None:
    block_size, num_blocks, longest = 4, 5, 50
    choose = random.Random(seed)
    angles = torch.outer(torch.arange(longest).double(), torch.rand(half, dtype=torch.float64))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.promote_types(dtype, torch.float32))
    positions = [choose.randrange(longest) for _ in range(num_tokens)]
    slots = choose.sample(range(num_blocks * block_size), num_tokens)
    q, k = (numbers(num_tokens, heads, 2 * half, seed=seed, dtype=dtype) for heads in (2 * num_heads, num_heads))
    v = numbers(num_tokens, num_heads, 2 * half, seed=seed + 1, dtype=dtype)
    key_cache, value_cache = (empty_cache(num_blocks, num_heads, block_size, 2 * half, dtype) for _ in range(2))

    rotated_q = KERNELS.rope_and_cache(q, k, v, cos_sin, torch.tensor(positions), key_cache, value_cache,
                                       torch.tensor(slots))

    # A pair of dimensions is a complex number, and its rotation a multiplication.
    turns = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    for x, rotated in ((q, rotated_q), (k, torch.stack([key_cache[s // 4, :, s % 4] for s in slots]))):
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
        assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(torch.stack([value_cache[slot // 4, :, slot % 4] for slot in slots]), v)
    unwritten = [slot for slot in range(num_blocks * block_size) if slot not in slots]
    assert all(key_cache[slot // 4, :, slot % 4].isnan().all() for slot in unwritten)


def every_e4m3() -> Tensor:
    """The format's finite numbers, from its definition, in float64."""
    fractions = torch.arange(8, dtype=torch.float64) / 8
    normal = ((1 + fractions) * 2.0 ** torch.arange(-6, 9, dtype=torch.float64).unsqueeze(1)).flatten()[:-1]
    positive = torch.cat((fractions * 2.0**-6, normal))
    return torch.cat((-positive.flip(0)[:-1], positive))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_eight_bit_floats_holds_the_nearest_of_them(dtype: torch.dtype) -> None:
    size = 5.0 ** torch.arange(-5, 6, dtype=torch.float64).view(11, 1, 1)
    k, v = ((size * numbers(11, 2, 8, seed=seed)).to(dtype) for seed in (1, 2))
    cos_sin = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), dim=1).to(torch.promote_types(dtype, torch.float32))
    key_cache, value_cache = (empty_cache(3, 2, 4, 8, torch.float8_e4m3fn) for _ in range(2))
    slots = torch.arange(11)
    KERNELS.rope_and_cache(k, k, v, cos_sin, torch.zeros(11, dtype=torch.int64), key_cache, value_cache, slots)
    possible = every_e4m3()
    for wide, cache in ((k, key_cache), (v, value_cache)):
        rows = cache.double()[slots // 4, :, slots % 4]
        least = (wide.double().unsqueeze(-1) - possible).abs().amin(dim=-1)
        assert wide.abs().max() > 448 and torch.equal((rows - wide.double()).abs(), least)
        assert cache.double()[2, :, 3].isnan().all(), "a slot that nothing was written to"


def test_attention_over_eight_bit_floats_is_that_over_the_numbers_they_stand_for() -> None:
    batch = attention_batch([1, 3], [5, 6], [[3, 1], [0, 2]], BLOCK_SIZE)
    keys, values = (filled_cache(batch, 4, 2, BLOCK_SIZE, 8, torch.float64, seed).to(torch.float8_e4m3fn)
                    for seed in (1, 2))
    q = numbers(4, 4, 8, seed=3)
    assert torch.equal(KERNELS.paged_attention(q, keys, values, batch, 0.4, None),
                       KERNELS.paged_attention(q, keys.double(), values.double(), batch, 0.4, None))


def test_blocks_of_eight_bit_floats_are_copied_as_they_are() -> None:
    source, target = (numbers(3, 2, 4, 3, seed=seed).to(torch.float8_e4m3fn) for seed in (1, 2))
    expected = target.view(torch.uint8).clone()
    expected[[2, 0]] = source.view(torch.uint8)[[1, 1]]
    KERNELS.copy_blocks(source, target, torch.tensor([1, 1]), torch.tensor([2, 0]))
    assert torch.equal(target.view(torch.uint8), expected)


def naive_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                    window: int | None) -> Tensor:
    """One query, one head, one position at a time, in float64."""
    block_size, group = key_cache.shape[2], q.shape[1] // key_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for request, context_len in enumerate(batch.context_lens.tolist()):
        start, end = batch.query_start[request:request + 2].tolist()
        table = batch.block_tables[request].tolist()
        for token in range(start, end):
            position = context_len - end + token
            first = 0 if window is None else max(0, position - window + 1)
            places = [(table[seen // block_size], seen % block_size) for seen in range(first, position + 1)]
            for head in range(q.shape[1]):
                scores = torch.stack([(q[token, head].double() * key_cache[block, head // group, offset].double()).sum()
                                      for block, offset in places]) * scale
                weights = torch.exp(scores - scores.max())
                for weight, (block, offset) in zip(weights / weights.sum(), places, strict=True):
                    out[token, head] += weight * value_cache[block, head // group, offset].double()
    return out


def filled_cache(batch: AttentionBatch, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int,
                 dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers in the slots of every request's context, NaN in all others."""
    cache = empty_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    rows = numbers(num_blocks * block_size, num_kv_heads, head_dim, seed=seed, dtype=dtype)
    for table, context_len in zip(batch.block_tables.tolist(), batch.context_lens.tolist(), strict=True):
        for position in range(context_len):
            block, offset = table[position // block_size], position % block_size
            cache[block, :, offset] = rows[block * block_size + offset]
    return cache


BLOCK_SIZE = 4
LENGTHS = st.sampled_from([1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE,
                           2 * BLOCK_SIZE + 1, 13])


@EVERY_DTYPE
@given(lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4), num_kv_heads=st.integers(1, 3),
       group=st.integers(1, 8), window=st.sampled_from([None, 1, 2, 3, 4, 5, 8, 100]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_paged_attention(dtype: torch.dtype, lengths: list[tuple[int, int]], num_kv_heads: int, group: int,
                         window: int | None, seed: int) -> None:
    context_lens = [context_len for context_len, _ in lengths]
    query_lens = [min(pair) for pair in lengths]
    num_blocks = sum(-(-context_len // BLOCK_SIZE) for context_len in context_lens) + 2
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    tables = [[free.pop() for _ in range(-(-context_len // BLOCK_SIZE))] for context_len in context_lens]
    batch = attention_batch(query_lens, context_lens, tables, BLOCK_SIZE)
    key_cache, value_cache = (filled_cache(batch, num_blocks, num_kv_heads, BLOCK_SIZE, 6, dtype, seed + offset)
                              for offset in (1, 2))
    q = numbers(sum(query_lens), num_kv_heads * group, 6, seed=seed + 3, dtype=dtype)

    actual = KERNELS.paged_attention(q, key_cache, value_cache, batch, 0.4, window)

    assert actual.dtype == dtype
    assert_close(actual, naive_attention(q, key_cache, value_cache, batch, 0.4, window))


def test_paged_attention_of_a_request_does_not_depend_on_the_others() -> None:
    query_lens, context_lens = [1, 5, 1, 9], [17, 5, 1, 30]
    tables = [[3, 1, 8, 9, 12], [0, 2], [4], [5, 6, 7, 10, 11, 13, 14, 15]]
    batch = attention_batch(query_lens, context_lens, tables, BLOCK_SIZE)
    key_cache, value_cache = (filled_cache(batch, 16, 2, BLOCK_SIZE, 8, torch.float32, seed) for seed in (1, 2))
    q = numbers(16, 6, 8, seed=3, dtype=torch.float32)
    together = KERNELS.paged_attention(q, key_cache, value_cache, batch, 0.3, None)
    for index, (start, end) in enumerate(zip(batch.query_start_host[:-1], batch.query_start_host[1:], strict=True)):
        alone = attention_batch(query_lens[index:index + 1], context_lens[index:index + 1], tables[index:index + 1],
                                BLOCK_SIZE)
        assert torch.equal(together[start:end],
                           KERNELS.paged_attention(q[start:end], key_cache, value_cache, alone, 0.3, None))
