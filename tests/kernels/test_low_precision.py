"""The references of eight-bit and four-bit formats against independent, naive formulations."""

from __future__ import annotations

import math
from fractions import Fraction
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import attention_batch, empty_cache
from servekit.kernels import (
    attention,
    fp4_linear,
    fp8_dynamic_linear,
    fp8_kv,
    fp8_linear,
    grouped_int4_linear,
    int8_dynamic_linear,
    int8_linear,
    rope_and_cache,
    truncate,
)
from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight

SEEDS = st.integers(0, 10**6)
quick = settings(max_examples=25, deadline=None)
INFINITY = float("inf")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """From `low` to `high`, both included."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


# --- Eight bits -------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 5), width=st.integers(1, 40), magnitude=st.sampled_from([1e-4, 1.0, 1e5]), seed=SEEDS)
@quick
def test_rounding_of_rows_is_to_the_nearest(rows: int, width: int, magnitude: float, seed: int) -> None:
    x = magnitude * numbers(rows, width, seed=seed)
    x[0] = 0
    integers_, scales = int8_dynamic_linear.quantize_rows(x)
    floats, float_scales = fp8_linear.quantize_rows(x)
    for row in range(rows):
        largest = x[row].abs().max()
        assert (integers_[row] * scales[row] - x[row]).abs().max() <= largest / 127 * 0.501
        # Four significant bits: at most a sixteenth of the number, or half of the smallest number.
        error = (floats[row].float() * float_scales[row] - x[row]).abs()
        assert (error <= x[row].abs() / 16 * 1.001 + largest / 448 * 2.0**-10 * 1.001).all()
        if largest > 0:
            assert integers_[row].abs().max() == 127 and floats[row].float().abs().max() == 448


@given(rows=st.integers(0, 4), channels=st.integers(1, 6), depth=st.integers(1, 40), seed=SEEDS)
@quick
def test_products_of_two_rounded_factors(rows: int, channels: int, depth: int, seed: int) -> None:
    x, matrix = numbers(rows, depth, seed=seed), numbers(channels, depth, seed=seed + 1)
    weight, floats = int8_linear.quantize(matrix), fp8_linear.quantize(matrix)
    rounded, scales = int8_dynamic_linear.quantize_rows(x)
    expected = (rounded.double() * scales.double().unsqueeze(1)) @ int8_linear.dequantize(weight).double().T
    torch.testing.assert_close(int8_dynamic_linear.reference(x, weight).double(), expected, rtol=1e-5, atol=1e-5)
    rounded, scales = fp8_linear.quantize_rows(x)
    expected = (rounded.double() * scales.double().unsqueeze(1)) @ fp8_linear.dequantize(floats).double().T
    torch.testing.assert_close(fp8_dynamic_linear.reference(x, floats).double(), expected, rtol=1e-5, atol=1e-5)


def test_products_of_two_integers_need_one_scale_for_each_channel() -> None:
    with pytest.raises(ValueError, match="2 scales for each output channel"):
        int8_dynamic_linear.reference(numbers(1, 64, seed=1), int8_linear.quantize(numbers(3, 64, seed=1), 32))


@pytest.mark.parametrize(("number", "expected"), [
    (448.0, 448.0), (1e9, 448.0), (-INFINITY, -448.0), (2.0**-9, 2.0**-9), (2.0**-10, 0.0), (1.5 * 2.0**-9, 2.0**-8),
    (17.0, 16.0), (19.0, 20.0), (1.0625, 1.0)])
def test_e4m3_is_the_nearest_with_ties_to_even(number: float, expected: float) -> None:
    assert fp8_linear.to_e4m3(torch.tensor(number)).item() == expected


def test_e4m3_of_nan_is_nan() -> None:
    assert fp8_linear.to_e4m3(torch.tensor(float("nan"))).isnan()


def test_a_cache_of_eight_bits_holds_scaled_numbers() -> None:
    scales = KVScales(0.25, 2.0)
    q, k, v = (numbers(3, 2, 8, seed=seed) for seed in range(3))
    angles = torch.outer(torch.arange(5), numbers(4, seed=3))
    cos_sin, positions, slots = torch.cat((angles.cos(), angles.sin()), 1), torch.arange(3), torch.tensor([2, 4, 7])
    wide = [empty_cache(2, 2, 4, 8, torch.float32) for _ in range(2)]
    narrow = [empty_cache(2, 2, 4, 8, torch.float8_e4m3fn) for _ in range(2)]
    expected = rope_and_cache.reference(q, k, v, cos_sin, positions, *wide, slots)
    assert torch.equal(fp8_kv.reference_rope_and_cache(q, k, v, cos_sin, positions, *narrow, slots, scales), expected)
    for exact, rounded, scale in zip(wide, narrow, (scales.key, scales.value), strict=True):
        assert torch.equal(rounded.isnan(), exact.isnan())
        torch.testing.assert_close(rounded.float() * scale, exact, rtol=2.0**-4, atol=scale * 2.0**-10, equal_nan=True)
    batch = attention_batch([1], [1], [[0]], 4)
    keys, values = ((numbers(1, 2, 4, 8, seed=seed)).to(torch.float8_e4m3fn) for seed in (4, 5))
    actual = fp8_kv.reference_attention(q[:1], keys, values, batch, 0.3, None, scales)
    dequantized = keys.float() * scales.key, values.float() * scales.value
    torch.testing.assert_close(actual, attention.reference(q[:1], *dequantized, batch, 0.3, None))


# --- Four-bit integers ------------------------------------------------------------------------------------------------


def words_of(nibbles: list[int]) -> int:
    """Eight nibbles, the lowest first, as a signed 32-bit number."""
    word = sum(nibble << (4 * index) for index, nibble in enumerate(nibbles))
    return word - 2**32 if word >= 2**31 else word


def awq_words(matrix: Tensor) -> Tensor:
    """[rows, columns] as AWQ packs it: nibble i of a word holds column 0, 2, 4, 6, 1, 3, 5, 7."""
    return torch.tensor([[words_of([row[start + column] for column in (0, 2, 4, 6, 1, 3, 5, 7)])
                          for start in range(0, len(row), 8)] for row in matrix.tolist()], dtype=torch.int32)


def gptq_words(matrix: Tensor) -> Tensor:
    """[rows, columns] as GPTQ packs its rows: eight consecutive ones in each word."""
    columns = matrix.T.tolist()
    return torch.tensor([[words_of(column[start:start + 8]) for start in range(0, len(column), 8)]
                         for column in columns], dtype=torch.int32).T.contiguous()


@given(groups=st.integers(1, 4), outputs=st.sampled_from([8, 16, 24]), seed=SEEDS)
@quick
def test_awq_checkpoints(groups: int, outputs: int, seed: int) -> None:
    values, zeros = integers(0, 15, groups * 16, outputs, seed=seed), integers(0, 15, groups, outputs, seed=seed + 1)
    scales = numbers(groups, outputs, seed=seed).half()
    weight = grouped_int4_linear.from_awq(awq_words(values), awq_words(zeros), scales)
    expected = (values - zeros.repeat_interleave(16, 0)) * scales.float().repeat_interleave(16, 0)
    assert torch.equal(grouped_int4_linear.dequantize(weight), expected.T)
    assert weight.inputs is None


@given(groups=st.integers(1, 4), outputs=st.sampled_from([8, 16]), is_shuffled=st.booleans(),
       zero_offset=st.sampled_from([0, 1]), seed=SEEDS)
@quick
def test_gptq_checkpoints(groups: int, outputs: int, is_shuffled: bool, zero_offset: int, seed: int) -> None:
    depth = groups * 16
    values, stored = integers(0, 15, depth, outputs, seed=seed), integers(0, 15, groups, outputs, seed=seed + 1)
    scales = numbers(groups, outputs, seed=seed).half()
    group_of = torch.arange(depth) // 16
    if is_shuffled:
        group_of = group_of[torch.randperm(depth, generator=torch.Generator().manual_seed(seed))]
    weight = grouped_int4_linear.from_gptq(gptq_words(values), gptq_words(stored.T).T.contiguous(), scales,
                                           group_of.int(), zero_offset)
    matrix = (values - stored[group_of] - zero_offset) * scales.float()[group_of]
    x = numbers(3, depth, seed=seed + 2)
    torch.testing.assert_close(grouped_int4_linear.reference(x, weight), x @ matrix, rtol=1e-5, atol=1e-4)
    assert (weight.inputs is None) == torch.equal(group_of, torch.arange(depth) // 16)


def test_gptq_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups of 32 inputs differ in size"):
        grouped_int4_linear.from_gptq(torch.zeros(4, 8, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32),
                                      torch.ones(2, 8), torch.tensor([0] * 17 + [1] * 15))


@given(rows=st.integers(1, 4), groups=st.integers(1, 3), seed=SEEDS)
@quick
def test_rounding_to_grouped_integers_is_to_half_a_step(rows: int, groups: int, seed: int) -> None:
    matrix = numbers(rows, groups * 16, seed=seed)
    weight = grouped_int4_linear.quantize(matrix, 16)
    steps = weight.scales.float().repeat_interleave(16, 1)
    # The zero point is rounded too, so that the ends of the range may be half a step off.
    assert ((grouped_int4_linear.dequantize(weight) - matrix).abs() <= steps * 1.01).all()
    zero = grouped_int4_linear.dequantize(GroupedInt4Weight(weight.zeros.repeat_interleave(16, 1), weight.zeros,
                                                            weight.scales))
    assert torch.equal(zero, torch.zeros_like(matrix))


# --- Four-bit floats --------------------------------------------------------------------------------------------------

FOUR_BIT_FLOATS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_codes_are_the_numbers_of_the_standard() -> None:
    """E2M1: sign, two exponent bits with a bias of 1, one mantissa bit; no exponent: subnormal."""
    codes = torch.arange(16, dtype=torch.uint8).unsqueeze(1).repeat(1, 32)
    scales = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    actual = fp4_linear.dequantize(Fp4Weight(codes, scales))[:, 0]
    for code, number in enumerate(actual.tolist()):
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert number == (-size if code & 8 else size)


@pytest.mark.parametrize(("stored", "scale"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)])
def test_scales_of_mxfp4_are_powers_of_two(stored: int, scale: float) -> None:
    scales = torch.tensor([[stored]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ones = torch.full((1, 32), 2, dtype=torch.uint8)
    assert fp4_linear.dequantize(Fp4Weight(ones, scales)).tolist() == [[scale] * 32]


def test_checkpoints_store_the_first_of_two_codes_in_the_lower_bits() -> None:
    assert fp4_linear.unpack(torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 15]]


@pytest.mark.parametrize("number", [0.0, -0.0, 0.25, 0.26, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 5.1, 6.0, 7.9, 0.2499])
def test_codes_are_the_nearest_with_ties_to_even(number: float) -> None:
    """A group whose largest magnitude is 6 has a scale of 1."""
    matrix = torch.full((1, 32), number)
    matrix[0, 0] = 6.0
    code = int(fp4_linear.quantize_mxfp4(matrix).codes[0, 5])
    distances = [abs(Fraction(abs(number)) - Fraction(size)) for size in FOUR_BIT_FLOATS]
    nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
    assert code & 7 == next(index for index in nearest if len(nearest) == 1 or index % 2 == 0)
    assert bool(code & 8) == (math.copysign(1, number) < 0)


@given(rows=st.integers(1, 4), groups=st.integers(1, 3), magnitude=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]), seed=SEEDS)
@quick
def test_rounding_to_four_bit_floats(rows: int, groups: int, magnitude: float, seed: int) -> None:
    matrix = magnitude * numbers(rows, groups * 32, seed=seed)
    matrix[0, :16] = 0
    for quantize, size, loss in ((fp4_linear.quantize_mxfp4, 32, 0.25), (fp4_linear.quantize_nvfp4, 16, 0.2)):
        weight = quantize(matrix)
        groups_of = matrix.view(rows, -1, size)
        error = (fp4_linear.dequantize(weight).view_as(groups_of) - groups_of).abs()
        # Half the widest gap, or what is cut off above 6; and of NVFP4 the rounding of the scale.
        assert (error <= loss * groups_of.abs().amax(dim=-1, keepdim=True) * 1.001).all()
        assert torch.equal(fp4_linear.dequantize(weight)[0, :16], torch.zeros(16))


# --- Truncation -------------------------------------------------------------------------------------------------------


@given(vocab=st.integers(1, 12), are_whole=st.booleans(), temperature=st.floats(0.1, 5), top_k=st.integers(1, 15),
       top_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
       candidates=st.sampled_from([1, 3, 1024]), seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_truncation(vocab: int, are_whole: bool, temperature: float, top_k: int, top_p: float, min_p: float,
                    candidates: int, seed: int) -> None:
    """However few tokens are looked at first."""
    logits = 3 * numbers(vocab, seed=seed)
    logits = logits.round() if are_whole else logits
    order = sorted(range(vocab), key=lambda token: (-logits[token].item(), token))[:top_k]
    weights = [math.exp((logits[token].item() - logits.max().item()) / temperature) for token in order]
    kept, before = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        borders = abs(before / sum(weights) - top_p), abs(weight - min_p)
        if 0 < min(borders) < 1e-9:
            return  # Too close to say.
        if not kept or ((before / sum(weights) < top_p or top_p == 1) and weight >= min_p):
            kept.append(token)
        before += weight
    expected = torch.full((vocab,), -INFINITY)
    expected[kept] = logits[kept]
    row = logits.unsqueeze(0)
    arguments = (row, torch.tensor([temperature], dtype=torch.float64), torch.tensor([top_k]),
                 torch.tensor([top_p], dtype=torch.float64), torch.tensor([min_p], dtype=torch.float64))
    with mock.patch.object(truncate, "_CANDIDATES", candidates):
        actual = truncate.reference(*arguments)
    assert torch.equal(actual[0], expected)
