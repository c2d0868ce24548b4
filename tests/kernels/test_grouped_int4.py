"""Four-bit integers of checkpoints in the forms that the C++ products take: the same numbers, exactly."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from servekit.kernels import Kernels, grouped_int4_linear, int4_linear, int8_linear, reference_kernels
from servekit.kernels.cpu import build, cpu_kernels
from servekit.kernels.fused_layer import LayerOperands
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight, repacked
from servekit.kernels.int4_linear import Int4Weight
from servekit.model.source import default_cache_dir

SEEDS = st.integers(0, 10**6)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_weight(rows: int, columns: int, group: int, dtype: torch.dtype, is_symmetric: bool, seed: int,
                  is_shuffled: bool = False) -> GroupedInt4Weight:
    """As checkpoints have them; symmetric ones have a zero point of 8 everywhere."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(16, (rows, columns), generator=generator).to(torch.uint8)
    zeros = torch.randint(17, (rows, columns // group), generator=generator)
    zeros = torch.full_like(zeros, 8) if is_symmetric else zeros
    scales = (0.01 * torch.randn(rows, columns // group, generator=generator)).to(dtype)
    order = torch.randperm(columns, generator=generator) if is_shuffled else None
    return GroupedInt4Weight(integers, zeros.to(torch.uint8), scales, order)


def dequantized(weight: GroupedInt4Weight) -> Tensor:
    """What `repacked` makes of the matrix."""
    same = repacked(weight)
    return int4_linear.dequantize(same) if isinstance(same, Int4Weight) else int8_linear.dequantize(same)


@given(rows=st.integers(1, 5), groups=st.integers(1, 4), group=st.sampled_from([8, 16, 32, 48, 64, 128]),
       dtype=st.sampled_from(DTYPES), is_symmetric=st.booleans(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_no_number_changes(rows: int, groups: int, group: int, dtype: torch.dtype, is_symmetric: bool,
                           seed: int) -> None:
    weight = random_weight(rows, groups * group, group, dtype, is_symmetric, seed)
    assert torch.equal(dequantized(weight), grouped_int4_linear.dequantize(weight))


@pytest.mark.parametrize(("dtype", "group", "is_symmetric", "has_four_bits"), [
    (torch.float16, 128, True, True), (torch.float16, 32, True, True), (torch.bfloat16, 64, True, True),
    (torch.float16, 128, False, False), (torch.float16, 16, True, False), (torch.float32, 128, True, False)])
def test_four_bits_serve_where_they_hold_the_numbers(dtype: torch.dtype, group: int, is_symmetric: bool,
                                                     has_four_bits: bool) -> None:
    weight = random_weight(9, 256, group, dtype, is_symmetric, seed=1)
    assert isinstance(repacked(weight), Int4Weight) == has_four_bits


@pytest.mark.parametrize("scale", [1e-6, 3e4], ids=["below float16", "its minimum beyond float16"])
def test_eight_bits_serve_where_float16_holds_a_scale_or_its_minimum_not(scale: float) -> None:
    weight = random_weight(4, 64, 32, torch.float32, True, seed=1)
    weight.scales.fill_(torch.tensor(scale).bfloat16().item())
    assert not isinstance(repacked(weight), Int4Weight)
    assert torch.equal(dequantized(weight), grouped_int4_linear.dequantize(weight))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        build.find_compiler()
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    return cpu_kernels(reference_kernels(), default_cache_dir(os.environ) / "kernels", 2, lambda: None)


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("rows", [1, 33])
def test_products_are_the_references_but_for_the_order_of_sums(kernels: Kernels, rows: int, is_symmetric: bool,
                                                               is_shuffled: bool) -> None:
    """Of activations that are whole numbers, whose rounding to eight bits changes nothing."""
    weight = random_weight(40, 384, 128, torch.float16, is_symmetric, 1, is_shuffled)
    x = torch.randint(-127, 128, (rows, 384), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::2] = 127  # The largest of every part of a row.
    expected = reference_kernels().grouped_int4(weight)(x.double())
    torch.testing.assert_close(kernels.grouped_int4(weight)(x).double(), expected, rtol=1e-6, atol=1e-4)


def test_whole_layers_take_only_matrices_in_order(kernels: Kernels) -> None:
    norm = torch.ones(128)
    for is_symmetric in (True, False):
        plain, shuffled = (kernels.grouped_int4(random_weight(128, 128, 64, torch.float16, is_symmetric, 1, shuffle))
                           for shuffle in (False, True))
        assert kernels.has_own_threads(plain) and kernels.has_own_threads(shuffled)
        layer = LayerOperands(plain, plain, norm, plain, plain, norm, 128, 2, 1, 32, None, 1e-5)
        assert kernels.fused_layer(layer) is not None
        assert kernels.fused_layer(replace(layer, down=shuffled)) is None
