"""Norms, the activation, rotation with the cache's writes, and copies, interpreted, against the references."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import empty_cache
from servekit.kernels import fp8_kv
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.fp8_linear import to_e4m3
from servekit.kernels.triton import e4m3
from servekit.kernels.triton.rope_and_cache import rope_and_cache
from triton_cases import EVERY_DTYPE, KERNELS, REFERENCE, SEEDS, assert_near, integers, numbers, quick

NAN = float("nan")
WIDTHS = st.integers(1, 70) | st.sampled_from([576, 2048, 2049])


@EVERY_DTYPE
@given(rows=st.integers(0, 40), width=WIDTHS, magnitude=st.sampled_from([1e-3, 1.0, 100.0]), seed=SEEDS)
@quick(15)
def test_norms(dtype: torch.dtype, rows: int, width: int, magnitude: float, seed: int) -> None:
    x, residual = (magnitude * numbers(rows, width, seed=seed + part, dtype=dtype) for part in range(2))
    x[:1] = residual[:1] = 0
    weight = numbers(width, seed=seed + 2, dtype=dtype)
    before = x.clone(), residual.clone()
    assert_near(KERNELS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), dtype, steps=2)
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == total.dtype == dtype
    assert torch.equal(total, residual + x)
    assert_near(normed, REFERENCE.add_rms_norm(x, residual, weight, 1e-5)[0], dtype, steps=2)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@EVERY_DTYPE
def test_a_norm_of_some_heads_of_a_wider_tensor(dtype: torch.dtype) -> None:
    """How the decoder normalises queries and keys."""
    heads, weight = numbers(7, 9, 48, seed=1, dtype=dtype), numbers(48, seed=2, dtype=dtype)
    for x in torch.split(heads, [5, 2, 2], dim=1):
        assert_near(KERNELS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), dtype, steps=2)


@EVERY_DTYPE
@given(shape=st.lists(st.integers(0, 5), max_size=2), width=st.integers(1, 70) | st.just(1500), seed=SEEDS)
@quick(15)
def test_silu_and_mul(dtype: torch.dtype, shape: list[int], width: int, seed: int) -> None:
    gate_up = numbers(*shape, 2 * width, seed=seed, dtype=dtype)
    actual = KERNELS.silu_and_mul(gate_up)
    assert actual.shape == (*shape, width) and actual.dtype == dtype
    assert_near(actual, REFERENCE.silu_and_mul(gate_up), dtype, steps=2)


@pytest.mark.parametrize("gate", [-3e38, -1000.0, -88.5, -50.0, 0.0, 50.0, 88.5, 1000.0, 3e38])
def test_silu_of_any_magnitude_is_a_number(gate: float) -> None:
    actual = KERNELS.silu_and_mul(torch.tensor([[gate, 1.0]]))
    torch.testing.assert_close(actual, torch.tensor([[max(gate, 0.0)]]), rtol=1e-6, atol=1e-18)


@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "silu_and_mul"])
def test_a_nan_stays_a_nan_and_spoils_no_other_row(operation: str) -> None:
    x, weight = numbers(40, 64, seed=1), torch.ones(64)
    x[1] = NAN
    out = {"rms_norm": lambda: KERNELS.rms_norm(x, weight, 1e-5),
           "add_rms_norm": lambda: KERNELS.add_rms_norm(x, x, weight, 1e-5)[0],
           "silu_and_mul": lambda: KERNELS.silu_and_mul(x)}[operation]()
    assert out[1].isnan().all() and out[torch.arange(40) != 1].isfinite().all()


@given(num_source=st.integers(1, 5), num_target=st.integers(1, 5), shape=st.sampled_from([(1, 1, 3), (2, 16, 33)]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64]), data=st.data())
@quick(15)
def test_copy_blocks(num_source: int, num_target: int, shape: tuple[int, int, int], dtype: torch.dtype,
                     data: st.DataObject) -> None:
    source, target = (numbers(count, *shape, seed=count).to(dtype) for count in (num_source, num_target))
    targets = data.draw(st.lists(st.integers(0, num_target - 1), unique=True))
    sources = [data.draw(st.integers(0, num_source - 1)) for _ in targets]
    expected = [source[sources[targets.index(block)]] if block in targets else target[block].clone()
                for block in range(num_target)]
    KERNELS.copy_blocks(source, target, torch.tensor(sources, dtype=torch.int64),
                        torch.tensor(targets, dtype=torch.int64))
    assert torch.equal(target.view(torch.uint8), torch.stack(expected).view(torch.uint8))


# --- Rotation and cache -----------------------------------------------------------------------------------------------


class Rotation:
    """Queries, keys and values of some tokens as views of one tensor, and slots in random order."""

    def __init__(self, num_tokens: int, head_dim: int, num_kv_heads: int, group: int, block_size: int,
                 dtype: torch.dtype, seed: int) -> None:
        num_heads, self.num_blocks = num_kv_heads * group, -(-num_tokens // block_size) + 2
        heads = numbers(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=seed, dtype=dtype)
        self.q, self.k, self.v = torch.split(heads.view(num_tokens, -1, head_dim),
                                             [num_heads, num_kv_heads, num_kv_heads], dim=1)
        angles = torch.outer(torch.arange(100), numbers(head_dim // 2, seed=seed + 1))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.positions = integers(0, 99, num_tokens, seed=seed)
        self.slots = torch.tensor(random.Random(seed).sample(range(self.num_blocks * block_size), num_tokens))
        self._shape = self.num_blocks, num_kv_heads, block_size, head_dim

    def caches(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return empty_cache(*self._shape, dtype), empty_cache(*self._shape, dtype)

    def arguments(self, caches: tuple[Tensor, Tensor], slots: Tensor | None = None) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.cos_sin, self.positions, *caches, self.slots if slots is None else slots)


@EVERY_DTYPE
@given(num_tokens=st.integers(1, 20), head_dim=st.sampled_from([2, 6, 64, 96, 128, 256]),
       num_kv_heads=st.integers(1, 5), group=st.integers(1, 8), block_size=st.integers(1, 17), seed=SEEDS)
@quick(12)
def test_rope_and_cache(dtype: torch.dtype, num_tokens: int, head_dim: int, num_kv_heads: int, group: int,
                        block_size: int, seed: int) -> None:
    case = Rotation(num_tokens, head_dim, num_kv_heads, group, block_size, dtype, seed)
    caches, expected_caches = case.caches(dtype), case.caches(dtype)
    rotated = KERNELS.rope_and_cache(*case.arguments(caches))
    assert_near(rotated, REFERENCE.rope_and_cache(*case.arguments(expected_caches)), dtype)
    assert_near(caches[0], expected_caches[0], dtype)
    torch.testing.assert_close(caches[1], expected_caches[1], rtol=0, atol=0, equal_nan=True)


@EVERY_DTYPE
@given(num_tokens=st.integers(1, 9), head_dim=st.sampled_from([6, 64]), group=st.integers(1, 4),
       scales=st.sampled_from([KVScales(1.0, 1.0), KVScales(0.02, 3.0)]), seed=SEEDS)
@quick(12)
def test_rope_and_a_cache_of_eight_bits(dtype: torch.dtype, num_tokens: int, head_dim: int, group: int,
                                        scales: KVScales, seed: int) -> None:
    case = Rotation(num_tokens, head_dim, 2, group, 16, dtype, seed)
    caches, expected_caches = case.caches(torch.float8_e4m3fn), case.caches(torch.float8_e4m3fn)
    rotated = rope_and_cache(*case.arguments(caches), scales)
    assert_near(rotated, fp8_kv.reference_rope_and_cache(*case.arguments(expected_caches), scales), dtype)
    # A key that lies half-way between two numbers may have been rounded to either before.
    torch.testing.assert_close(caches[0].float(), expected_caches[0].float(), rtol=2.0**-3, atol=2.0**-9,
                               equal_nan=True)
    assert (caches[0].view(torch.uint8) != expected_caches[0].view(torch.uint8)).sum() <= caches[0].numel() // 500
    assert torch.equal(caches[1].view(torch.uint8), expected_caches[1].view(torch.uint8))


def test_a_padding_row_is_not_written() -> None:
    case = Rotation(6, 64, 2, 2, 4, torch.float32, seed=1)
    caches, expected = case.caches(torch.float32), case.caches(torch.float32)
    real = torch.tensor([True, True, False, True, False, False])
    KERNELS.rope_and_cache(*case.arguments(caches, torch.where(real, case.slots, -1)))
    REFERENCE.rope_and_cache(case.q[real], case.k[real], case.v[real], case.cos_sin, case.positions[real], *expected,
                             case.slots[real])
    for cache, wanted in zip(caches, expected, strict=True):
        assert_near(cache, wanted, torch.float32)
    assert sum((~cache.isnan()).sum() for cache in caches) == 2 * 3 * 2 * 64


# --- Eight-bit floats -------------------------------------------------------------------------------------------------


@triton.jit
def _encode(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, e4m3.encode(tl.load(x + index)))


@triton.jit
def _widen(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(out + index, e4m3.widen(tl.load(x + index), out.dtype.element_ty))


def test_encoding_is_that_of_torch_for_every_half_of_a_float32() -> None:
    """Ties to even, subnormal numbers, what is too large, infinities, NaN: every upper half, some lower halves."""
    upper = torch.arange(0, 2**16, dtype=torch.int32).unsqueeze(1)
    lower = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=torch.int32)
    x = (upper << 16 | lower).view(torch.float32).flatten()
    out = torch.empty(x.shape, dtype=torch.uint8)
    _encode[(len(x) // 2**14,)](x, out, SIZE=2**14)
    expected = to_e4m3(x).view(torch.uint8)
    is_nan = x.isnan()
    assert torch.equal(out[~is_nan], expected[~is_nan]) and (out[is_nan] & 0x7F == 0x7F).all()


@EVERY_DTYPE
@pytest.mark.parametrize("has_fp8", [True, False])
def test_widening_is_exact(dtype: torch.dtype, has_fp8: bool) -> None:
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=dtype)
    _widen[(1,)](codes.view(torch.float8_e4m3fn) if has_fp8 else codes, out, SIZE=256)
    torch.testing.assert_close(out.float(), codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
