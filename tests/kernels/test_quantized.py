"""The number formats of quantised weights, by what rounding promises; the references of their products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from servekit.kernels import int4_linear, int8_linear, reference_kernels
from servekit.kernels.int4_linear import GROUP_SIZE, Int4Weight
from servekit.kernels.int8_linear import Int8Weight

quick = settings(max_examples=50, deadline=None)
SEEDS = st.integers(0, 10**6)
ROWS = st.integers(1, 9)
MAGNITUDES = st.sampled_from([1e-3, 1.0, 1e3])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """From `low` to `high`, both included."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def by_group(weight: Tensor, group: int) -> Tensor:
    return weight.view(len(weight), -1, group)


# --- int8 -------------------------------------------------------------------------------------------------------------


@given(rows=ROWS, num_groups=st.integers(1, 4), group=st.integers(1, 70), by_channel=st.booleans(),
       magnitude=MAGNITUDES, seed=SEEDS)
@quick
def test_int8_errs_by_half_a_step_at_most(rows: int, num_groups: int, group: int, by_channel: bool, magnitude: float,
                                          seed: int) -> None:
    columns = num_groups * group
    weight = magnitude * numbers(rows, columns, seed=seed)
    quantized = int8_linear.quantize(weight, None if by_channel else group)
    own_group = columns if by_channel else group
    assert quantized.integers.dtype is torch.int8 and quantized.integers.shape == (rows, columns)
    assert quantized.scales.dtype is torch.float32 and quantized.scales.shape == (rows, columns // own_group)
    steps = by_group(weight, own_group).abs().amax(dim=-1, keepdim=True) / 127
    error = by_group(int8_linear.dequantize(quantized) - weight, own_group).abs()
    assert (error <= steps * 0.50001).all()


@given(rows=ROWS, num_groups=st.integers(1, 4), exponent=st.integers(-20, 20), seed=SEEDS)
@quick
def test_int8_recovers_what_it_can_represent(rows: int, num_groups: int, exponent: int, seed: int) -> None:
    original = integers(-127, 127, rows, num_groups * GROUP_SIZE, seed=seed).to(torch.int8)
    by_group(original, GROUP_SIZE)[..., seed % GROUP_SIZE] = -127
    scales = 2.0 ** (integers(-5, 5, rows, num_groups, seed=seed) + exponent)
    weight = int8_linear.dequantize(Int8Weight(original, scales))
    again = int8_linear.quantize(weight, GROUP_SIZE)
    assert torch.equal(again.integers, original) and torch.equal(again.scales, scales)


def test_int8_uses_its_whole_range_and_no_more() -> None:
    quantized = int8_linear.quantize(torch.tensor([[-2.0, 1.0, 0.0], [3.0, -1.5, 0.01], [0.0, 0.0, 0.0]]))
    assert quantized.integers.tolist() == [[-127, 64, 0], [127, -64, 0], [0, 0, 0]]
    assert int8_linear.dequantize(quantized)[2].tolist() == [0, 0, 0]


def test_int8_scales_of_one_channel_do_not_touch_another() -> None:
    weight = numbers(4, 64, seed=1)
    before = int8_linear.quantize(weight)
    weight[2] *= 1000
    after = int8_linear.quantize(weight)
    assert torch.equal(before.scales[[0, 1, 3]], after.scales[[0, 1, 3]])
    assert torch.equal(before.integers, after.integers)


# --- int4 -------------------------------------------------------------------------------------------------------------


@given(rows=ROWS, num_groups=st.integers(1, 4), magnitude=MAGNITUDES, offset=st.floats(-3, 3), seed=SEEDS)
@quick
def test_int4_errs_by_half_a_step_at_most(rows: int, num_groups: int, magnitude: float, offset: float,
                                          seed: int) -> None:
    weight = magnitude * (numbers(rows, num_groups * GROUP_SIZE, seed=seed) + offset)
    quantized = int4_linear.quantize(weight)
    assert quantized.integers.dtype is torch.uint8 and int(quantized.integers.max()) <= 15
    assert quantized.scales.dtype is quantized.minima.dtype is torch.float16
    assert quantized.scales.shape == quantized.minima.shape == (rows, num_groups)
    groups = by_group(weight, GROUP_SIZE)
    lowest, highest = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    # Scale and minimum are half floats: eleven digits, and no number below 2^-24.
    rounding = 2.0 ** -11 * (lowest.abs() + highest - lowest) + 16 * 2.0 ** -25
    error = by_group(int4_linear.dequantize(quantized) - weight, GROUP_SIZE).abs()
    assert (error <= (highest - lowest) / 15 / 2 + rounding).all()


@given(rows=ROWS, num_groups=st.integers(1, 4), seed=SEEDS)
@quick
def test_int4_recovers_what_q4_1_holds(rows: int, num_groups: int, seed: int) -> None:
    """Steps that are powers of two, so that the smallest and the largest number tell scale and minimum exactly."""
    original = integers(0, 15, rows, num_groups * GROUP_SIZE, seed=seed).to(torch.uint8)
    groups = by_group(original, GROUP_SIZE)
    groups[..., seed % GROUP_SIZE], groups[..., (seed + 7) % GROUP_SIZE] = 0, 15
    scales = (2.0 ** integers(-6, 0, rows, num_groups, seed=seed)).half()
    minima = scales * integers(-100, 100, rows, num_groups, seed=seed)
    weight = int4_linear.dequantize(Int4Weight(original, scales, minima))
    again = int4_linear.quantize(weight)
    assert torch.equal(again.integers, original)
    assert torch.equal(again.scales, scales) and torch.equal(again.minima, minima)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 60000.0])
def test_int4_keeps_a_group_of_equal_numbers(value: float) -> None:
    weight = torch.full((2, 64), value)
    assert torch.equal(int4_linear.dequantize(int4_linear.quantize(weight)), weight.half().float())


def test_int4_scales_of_one_group_do_not_touch_another() -> None:
    weight = numbers(2, 96, seed=1)
    before = int4_linear.dequantize(int4_linear.quantize(weight))
    weight[1, 32:64] *= 100
    after = int4_linear.dequantize(int4_linear.quantize(weight))
    is_changed = (before != after).view(2, 3, 32).any(dim=-1)
    assert is_changed.tolist() == [[False] * 3, [False, True, False]]


# --- Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_references_multiply_by_the_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    weight, x = numbers(7, 64, seed=1), numbers(2, 3, 64, seed=2).to(dtype)
    if name == "int8":
        integers8 = int8_linear.quantize(weight, 32)
        product, dequantized = reference_kernels().int8(integers8), int8_linear.dequantize(integers8)
    else:
        integers4 = int4_linear.quantize(weight)
        product, dequantized = reference_kernels().int4(integers4), int4_linear.dequantize(integers4)
    assert product(x).dtype is dtype and product(x).shape == (2, 3, 7)
    torch.testing.assert_close(product(x), x @ dequantized.to(dtype).T)
