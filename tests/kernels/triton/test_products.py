"""Products with quantised matrices, interpreted, against the references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servekit.kernels import (
    Kernels,
    fp4_linear,
    fp8_linear,
    grouped_int4_linear,
    int4_linear,
    int8_dynamic_linear,
    int8_linear,
)
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.triton import triton_kernels
from servekit.kernels.triton.quantize_rows import quantize_rows
from servekit.kernels.triton.split_sum import num_splits
from triton_cases import DIGITS, EVERY_DTYPE, KERNELS, NEW, OLD, REFERENCE, SEEDS, numbers, quick


@dataclass(frozen=True)
class Scheme:
    """A format of weights, and whether activations are rounded too."""

    field: str
    """Of `Kernels`."""
    quantize: Callable[[Tensor], Any]
    smallest: int
    """Columns that a matrix has at least."""

    def product(self, kernels: Kernels, weight: Any) -> Callable[[Tensor], Tensor]:
        product: Callable[[Tensor], Tensor] = getattr(kernels, self.field)(weight)
        return product


def shuffled(weight: Tensor) -> GroupedInt4Weight:
    """As GPTQ does when it quantises inputs in order of importance."""
    inputs = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    grouped = grouped_int4_linear.quantize(weight[:, inputs], 32)
    return GroupedInt4Weight(grouped.integers, grouped.zeros, grouped.scales, inputs)


SCHEMES = {
    "int8": Scheme("int8", int8_linear.quantize, 16),
    "int8-grouped": Scheme("int8", partial(int8_linear.quantize, group_size=32), 32),
    "int8-dynamic": Scheme("int8_dynamic", int8_linear.quantize, 16),
    "int4": Scheme("int4", int4_linear.quantize, 32),
    "grouped-int4-16": Scheme("grouped_int4", partial(grouped_int4_linear.quantize, group_size=16), 16),
    "grouped-int4-32": Scheme("grouped_int4", partial(grouped_int4_linear.quantize, group_size=32), 32),
    "grouped-int4-shuffled": Scheme("grouped_int4", shuffled, 32),
    "fp8": Scheme("fp8", fp8_linear.quantize, 16),
    "fp8-dynamic": Scheme("fp8_dynamic", fp8_linear.quantize, 16),
    "mxfp4": Scheme("fp4", fp4_linear.quantize_mxfp4, 32),
    "nvfp4": Scheme("fp4", fp4_linear.quantize_nvfp4, 16),
}
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def assert_product(actual: Tensor, expected: Tensor, dtype: torch.dtype, depth: int) -> None:
    """Equal up to the rounding of the output and of as many random summands, each of about 1."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    bound = 2 * DIGITS[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound * depth**0.5)


@EVERY_DTYPE
@EVERY_SCHEME
@given(rows=st.integers(0, 3) | st.sampled_from([16, 17, 35]), channels=st.integers(1, 70), parts=st.integers(1, 9),
       seed=SEEDS)
@quick(5)
def test_products(scheme: Scheme, dtype: torch.dtype, rows: int, channels: int, parts: int, seed: int) -> None:
    depth = parts * scheme.smallest
    weight = scheme.quantize(numbers(channels, depth, seed=seed))
    x = numbers(rows, depth, seed=seed + 1, dtype=dtype)
    expected = scheme.product(REFERENCE, weight)(x.float())
    assert_product(scheme.product(KERNELS, weight)(x), expected, dtype, depth)


@EVERY_SCHEME
def test_a_sum_in_splits_is_the_whole(scheme: Scheme) -> None:
    depth = 1184 if scheme.smallest < 32 else 1152
    assert num_splits(2, 40, depth, NEW.num_processors) == 2
    weight = scheme.quantize(numbers(40, depth, seed=1))
    x = numbers(2, depth, seed=2, dtype=torch.float16)
    assert_product(scheme.product(KERNELS, weight)(x), scheme.product(REFERENCE, weight)(x.float()), torch.float16,
                   depth)


@EVERY_SCHEME
def test_a_product_takes_any_shape_and_stride(scheme: Scheme) -> None:
    product = scheme.product(KERNELS, scheme.quantize(numbers(13, 64, seed=1)))
    x = numbers(2, 3, 128, seed=2)[..., ::2]
    assert product(x).shape == (2, 3, 13)
    assert torch.equal(product(x).view(6, 13), product(x.reshape(6, 64).contiguous()))
    assert torch.equal(product(x[0, 0]), product(x)[0, 0])


@EVERY_SCHEME
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(scheme: Scheme) -> None:
    product = scheme.product(KERNELS, scheme.quantize(numbers(20, 64, seed=1)))
    x = numbers(6, 64, seed=2)
    clean = product(x)
    x[2, 17] = float("nan")
    actual = product(x)
    others = torch.arange(6) != 2
    assert actual[2].isnan().all() and torch.equal(actual[others], clean[others])


@EVERY_SCHEME
def test_zeros_give_zeros(scheme: Scheme) -> None:
    for weight, x in ((numbers(20, 64, seed=1), torch.zeros(3, 64)), (torch.zeros(20, 64), numbers(3, 64, seed=1))):
        assert torch.equal(scheme.product(KERNELS, scheme.quantize(weight))(x), torch.zeros(3, 20))


@pytest.mark.parametrize("group", [64, 96, 128, 192, 1024])
def test_groups_of_any_size_that_steps_divide(group: int) -> None:
    weight = grouped_int4_linear.quantize(numbers(9, 3 * group, seed=1), group)
    x = numbers(2, 3 * group, seed=2)
    assert_product(KERNELS.grouped_int4(weight)(x), REFERENCE.grouped_int4(weight)(x), torch.float32, 3 * group)


@pytest.mark.parametrize("field", ["grouped_int4", "int8"])
def test_groups_that_no_step_divides_are_refused(field: str) -> None:
    matrix = numbers(4, 48, seed=1)
    weight = {"grouped_int4": grouped_int4_linear.quantize, "int8": int8_linear.quantize}[field](matrix, 24)
    with pytest.raises(ValueError, match=r"powers of two from 16"):
        getattr(KERNELS, field)(weight)


def test_two_integers_need_one_scale_for_each_channel() -> None:
    with pytest.raises(ValueError, match="2 scales for each output channel"):
        KERNELS.int8_dynamic(int8_linear.quantize(numbers(4, 64, seed=1), 32))


@EVERY_DTYPE
def test_a_gpu_without_eight_bit_floats_converts_them(dtype: torch.dtype) -> None:
    weight = fp8_linear.quantize(numbers(20, 96, seed=1))
    x = numbers(3, 96, seed=2, dtype=dtype)
    assert torch.equal(triton_kernels(REFERENCE, OLD).fp8(weight)(x), KERNELS.fp8(weight)(x))


def test_a_gpu_without_eight_bit_floats_refuses_to_multiply_them() -> None:
    with pytest.raises(ValueError, match=r"multiplies no eight-bit floats.*8\.9"):
        triton_kernels(REFERENCE, OLD).fp8_dynamic(fp8_linear.quantize(numbers(20, 96, seed=1)))


@pytest.mark.parametrize("field", ["int4", "grouped_int4"])
def test_every_integer_and_zero_point_is_read(field: str) -> None:
    integers_ = torch.arange(16, dtype=torch.uint8).repeat(17, 2)
    zeros = torch.arange(17, dtype=torch.uint8).unsqueeze(1)
    scales = torch.full((17, 1), 0.25).half()
    weight = (GroupedInt4Weight(integers_, zeros, scales) if field == "grouped_int4" else
              int4_linear.Int4Weight(integers_, scales, -zeros.half()))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.eye(32, dtype=dtype)
        assert torch.equal(getattr(KERNELS, field)(weight)(x), getattr(REFERENCE, field)(weight)(x))


@pytest.mark.parametrize("scales", [torch.arange(255), torch.arange(0x7F)], ids=["mxfp4", "nvfp4"])
def test_every_four_bit_float_and_every_scale_is_read(scales: Tensor) -> None:
    is_mx = len(scales) > 127
    kind, group = (torch.float8_e8m0fnu, 32) if is_mx else (torch.float8_e4m3fn, 16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), group // 16)
    weight = fp4_linear.Fp4Weight(codes, scales.to(torch.uint8).unsqueeze(1).view(kind), 1.0 if is_mx else 0.125)
    x = torch.eye(group)
    expected = REFERENCE.fp4(weight)(x)
    # The largest powers of two overflow with the largest magnitudes, in both.
    assert torch.equal(KERNELS.fp4(weight)(x).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@given(rows=st.integers(0, 5), width=st.integers(1, 70) | st.just(576), magnitude=st.sampled_from([1e-6, 1.0, 1e4]),
       seed=SEEDS)
@quick(10)
def test_rounding_of_rows(dtype: torch.dtype, rows: int, width: int, magnitude: float, seed: int) -> None:
    x = magnitude * numbers(rows, width, seed=seed)
    x[:1] = 0
    reference = int8_dynamic_linear.quantize_rows if dtype is torch.int8 else fp8_linear.quantize_rows
    actual, expected = quantize_rows(x, dtype), reference(x)
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(actual[1], expected[1])


def test_the_largest_int8_sums_do_not_overflow() -> None:
    weight = int8_linear.Int8Weight(torch.full((3, 2048), 127, dtype=torch.int8), torch.ones(3, 1))
    actual = KERNELS.int8_dynamic(weight)(torch.ones(1, 2048))
    torch.testing.assert_close(actual, torch.full((1, 3), 127.0 * 2048))


@pytest.mark.parametrize(("rows", "columns", "depth", "expected"), [
    (1, 4096, 4096, 4), (1, 28672, 4096, 1), (1, 4096, 14336, 4), (1, 1024, 4096, 8), (8192, 4096, 4096, 1),
    (1, 64, 64, 1)])
def test_a_few_rows_fill_the_gpu(rows: int, columns: int, depth: int, expected: int) -> None:
    assert num_splits(rows, columns, depth, 132) == expected
