"""The C++ operations against the torch references, compiled for this machine and compiled without AVX2."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import attention_batch, empty_cache, random_caches
from servekit.kernels import (
    AttentionBatch,
    Kernels,
    KVLayer,
    LayerOperands,
    int4_linear,
    int8_linear,
    reference_kernels,
)
from servekit.kernels.cpu import build, cpu_kernels
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.source import default_cache_dir

REFERENCE = reference_kernels()
THREADS = 2
INFINITY, NAN = float("inf"), float("nan")
FLOAT32_DIGITS = 2.0 ** -23


@dataclass(frozen=True)
class Older:
    """Sources as compiled for processors that lack something this one may have."""

    name: str
    march: str
    forbidden: str
    """Macro of an instruction set that the build must not have."""
    needed: str
    """Flag in /proc/cpuinfo without which the build does not run; empty: none."""


OLDER = {"portable": Older("portable", "x86-64", "__AVX2__", ""),
         "avx2": Older("avxtwo", "x86-64-v3", "__AVX512F__", "avx2")}


@pytest.fixture(scope="module", params=["native", *OLDER])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    try:
        build.find_compiler()
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    if request.param == "native":
        yield compiled()
        return
    older = OLDER[request.param]
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("on this processor the portable code is the native code")
    if older.needed not in build._processor():
        pytest.skip(f"this processor has no {older.needed}")
    with compiled_as(older, tmp_path_factory.mktemp(older.name)):
        yield compiled()


def compiled() -> Kernels:
    return cpu_kernels(REFERENCE, default_cache_dir(os.environ) / "kernels", THREADS, lambda: None)


@contextmanager
def compiled_as(older: Older, folder: Path) -> Iterator[None]:
    """Lets `cpu_kernels` use an older build of the sources, under a name of its own."""
    refusal = f"#ifdef {older.forbidden}\n#error this build must not have {older.forbidden}\n#endif\n"
    for source in [*build._SOURCES.glob("*.h"), *build._SOURCES.glob("*.cpp")]:
        text = source.read_text().replace("servekit", older.name)
        (folder / source.name).write_text((refusal if source.suffix == ".cpp" else "") + text)
    assert "-march=native" in build._FLAGS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_SOURCES", folder)
        patch.setattr(build, "_FLAGS", tuple(flag.replace("=native", f"={older.march}") for flag in build._FLAGS))
        patch.setattr(torch.ops, "servekit_cpu", getattr(torch.ops, f"{older.name}_cpu"))
        yield


def quick(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=max_examples, deadline=None)


SEEDS = st.integers(0, 10**6)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """From `low` to `high`, both included."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


# --- Attention --------------------------------------------------------------------------------------------------------

FEW_ROWS = 8
"""Query rows of a request and key head up to which nothing but the cache itself is rounded."""
HEAD_DIMS = (6, 32, 40, 64, 80, 96, 128)
BORDERS = tuple(border + step for border in (64, 128, 512, 576, 1024, 1280) for step in (-1, 0, 1))
"""Context lengths at and beside the ends of tiles of 64 keys and of parts of 512."""
CONTEXTS = st.sampled_from(BORDERS) | st.integers(1, 1300) | st.integers(1, 40)
CHUNKS = st.just(1) | st.sampled_from([2, 5, 6, 7, 8, 9, 47, 48, 49, 64, 65, 2000]) | st.integers(1, 130)
WINDOWS = st.none() | st.sampled_from([1, 2, 63, 64, 65, 511, 512, 513, 5000]) | st.integers(1, 1400)
CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Attention:
    """The arguments of one call but the queries' scale and the window."""

    q: Tensor
    keys: Tensor
    values: Tensor
    batch: AttentionBatch

    def run(self, kernels: Kernels, scale: float, window: int | None = None) -> Tensor:
        return kernels.paged_attention(self.q, self.keys, self.values, self.batch, scale, window)

    def expected(self, scale: float, window: int | None = None) -> Tensor:
        return replace(self, q=self.q.double()).run(REFERENCE, scale, window)

    def check(self, kernels: Kernels, scale: float, window: int | None = None) -> Tensor:
        """The result, if it is the expected one up to float32's rounding; a key too few of 1,300 would differ by 1e-3.

        The queries are bfloat16 numbers and `scale` is a power of two, so that rounding queries changes nothing.
        """
        actual, expected = self.run(kernels, scale, window), self.expected(scale, window)
        allowed = 5e-5 * (1 + expected.abs()) + self.rounding_of_weights(scale, window)
        assert ((actual.double() - expected).abs() <= allowed).all()
        return actual

    def rounding_of_weights(self, scale: float, window: int | None) -> Tensor:
        """What a result may differ by where the weights of many rows are rounded as the cache is."""
        group = self.q.shape[1] // self.keys.shape[1]
        are_many = torch.tensor([lens * group > FEW_ROWS for lens in query_lens(self.batch) for _ in range(lens)])
        if self.keys.dtype is torch.float32 or not are_many.any():
            return torch.zeros(1)
        sizes = replace(self, values=self.values.abs()).expected(scale, window)
        return 2.0 ** -8 * sizes * are_many.view(-1, 1, 1)

    def alone(self, request: int) -> Attention:
        start, end = self.batch.query_start_host[request:request + 2]
        batch = attention_batch([end - start], [self.batch.context_lens_host[request]],
                                [self.batch.block_tables[request].tolist()], self.keys.shape[2])
        return replace(self, q=self.q[start:end].contiguous(), batch=batch)

    def sharing(self, prefix: int) -> Attention:
        """All requests with longer contexts begin with the blocks of the first of them, as far as `prefix` fills."""
        batch, block_size = self.batch, self.keys.shape[2]
        tables = batch.block_tables.clone()
        longer = [request for request, context in enumerate(batch.context_lens_host) if context > prefix]
        tables[longer, :prefix // block_size] = tables[longer[0], :prefix // block_size].clone()
        return replace(self, batch=attention_batch(query_lens(batch), batch.context_lens_host, tables.tolist(),
                                                   block_size))


def attention(lengths: Sequence[tuple[int, int]], block_size: int, num_kv_heads: int, group: int, head_dim: int,
              cache_dtype: torch.dtype, seed: int) -> Attention:
    """Requests of (context, queries), as in `random_caches`."""
    keys, values, batch = random_caches(lengths, block_size, num_kv_heads, head_dim, cache_dtype, seed)
    q = numbers(batch.query_start_host[-1], num_kv_heads * group, head_dim, seed=seed).bfloat16().float()
    return Attention(q, keys, values, batch)


@CACHE_DTYPES
@given(lengths=st.lists(st.tuples(CONTEXTS, CHUNKS), min_size=1, max_size=4), block_size=st.integers(1, 32),
       num_kv_heads=st.integers(1, 3), group=st.integers(1, 9), head_dim=st.sampled_from(HEAD_DIMS), window=WINDOWS,
       sharpness=st.sampled_from([0.125, 1.0, 8.0]), seed=SEEDS)
@quick(60)
def test_attention_of_any_mixture(kernels: Kernels, cache_dtype: torch.dtype, lengths: list[tuple[int, int]],
                                  block_size: int, num_kv_heads: int, group: int, head_dim: int, window: int | None,
                                  sharpness: float, seed: int) -> None:
    case = attention(lengths, block_size, num_kv_heads, group, head_dim, cache_dtype, seed)
    case.check(kernels, sharpness / 8, window)


@CACHE_DTYPES
@pytest.mark.parametrize("window", [None, 1, 64, 513])
@pytest.mark.parametrize("queries", [1, 3, 2000])
@pytest.mark.parametrize("group", [3, 9])
def test_attention_at_the_borders_of_tiles_and_parts(kernels: Kernels, cache_dtype: torch.dtype, window: int | None,
                                                     queries: int, group: int) -> None:
    longest = 600 if queries > 3 else 1300
    lengths = [(context, queries) for context in BORDERS if context < longest]
    case = attention(lengths, block_size=16, num_kv_heads=1, group=group, head_dim=32, cache_dtype=cache_dtype, seed=1)
    case.check(kernels, 0.25, window)


@CACHE_DTYPES
@given(lengths=st.lists(st.tuples(CONTEXTS, st.sampled_from([1, 1, 1, 2, 3, 20])), min_size=8, max_size=10),
       block_size=st.sampled_from([1, 5, 16, 32]), num_kv_heads=st.integers(2, 9), group=st.integers(1, 9),
       head_dim=st.sampled_from(HEAD_DIMS), window=WINDOWS, seed=SEEDS)
@quick(25)
def test_attention_of_so_many_requests_that_heads_share_a_task(
        kernels: Kernels, cache_dtype: torch.dtype, lengths: list[tuple[int, int]], block_size: int, num_kv_heads: int,
        group: int, head_dim: int, window: int | None, seed: int) -> None:
    assert len(lengths) >= 4 * THREADS
    case = attention(lengths, block_size, num_kv_heads, group, head_dim, cache_dtype, seed)
    case.check(kernels, 0.25, window)


@CACHE_DTYPES
@given(contexts=st.lists(CONTEXTS, min_size=2, max_size=10), chunk=st.integers(0, 100), group=st.integers(1, 9),
       head_dim=st.sampled_from(HEAD_DIMS), window=WINDOWS, seed=SEEDS)
@quick(25)
def test_a_decode_is_the_same_bits_in_any_batch(kernels: Kernels, cache_dtype: torch.dtype, contexts: list[int],
                                                chunk: int, group: int, head_dim: int, window: int | None,
                                                seed: int) -> None:
    lengths = [(context, 1) for context in contexts] + [(chunk, chunk)] * (chunk > 0)
    case = attention(lengths, 16, 2, group, head_dim, cache_dtype, seed)
    together = case.run(kernels, 0.3, window)
    for request in range(len(contexts)):
        assert torch.equal(together[request:request + 1], case.alone(request).run(kernels, 0.3, window))


@CACHE_DTYPES
@given(prefix=st.sampled_from([511, 512, 600, 1024, 1100]), own=st.lists(st.integers(1, 600), min_size=2, max_size=12),
       others=st.lists(CONTEXTS, max_size=3), queries=st.sampled_from([1, 1, 2]), group=st.sampled_from([1, 3, 8]),
       block_size=st.sampled_from([1, 16, 24]), window=st.none() | st.just(1000), seed=SEEDS)
@quick(20)
def test_requests_that_share_a_prefix_get_the_bits_that_each_gets_alone(
        kernels: Kernels, cache_dtype: torch.dtype, prefix: int, own: list[int], others: list[int], queries: int,
        group: int, block_size: int, window: int | None, seed: int) -> None:
    lengths = [(prefix + count, queries) for count in own] + [(context, 1) for context in others]
    random.Random(seed).shuffle(lengths)
    case = attention(lengths, block_size, 2, group, 64, cache_dtype, seed).sharing(prefix)
    together = case.check(kernels, 0.125, window)
    for request, start in enumerate(case.batch.query_start_host[:-1]):
        alone = case.alone(request).run(kernels, 0.125, window)
        assert torch.equal(together[start:start + len(alone)], alone)


@CACHE_DTYPES
@pytest.mark.parametrize("queries", [3, 20])
def test_queries_are_rounded_to_the_format_of_the_cache_at_most(kernels: Kernels, cache_dtype: torch.dtype,
                                                                queries: int) -> None:
    case = attention([(100, queries)], 16, 2, 3, 64, cache_dtype, seed=1)
    case = replace(case, q=numbers(*case.q.shape, seed=2))
    most = 1e-2 if cache_dtype is torch.bfloat16 and queries * 3 > FEW_ROWS else 1e-5
    assert (case.run(kernels, 0.1).double() - case.expected(0.1)).abs().max() < most


@pytest.mark.parametrize("queries", [1, 20])
def test_attention_to_a_nan_is_nan(kernels: Kernels, queries: int) -> None:
    """What a model spoils must show in its logits."""
    case = attention([(100, queries), (100, queries)], 16, 1, 2, 32, torch.float32, seed=1)
    block = case.batch.block_tables[0, 3]
    case.keys[block, 0, 5, 7] = NAN
    out = case.run(kernels, 0.2)
    assert out[:queries].isnan().all() and out[queries:].isfinite().all()


def test_attention_with_too_many_heads_for_a_key_head_is_refused(kernels: Kernels) -> None:
    with pytest.raises(RuntimeError, match="too many query heads"):
        attention([(5, 1)], 16, 1, 97, 32, torch.float32, seed=1).run(kernels, 0.2)


def test_attention_to_another_number_format_is_refused(kernels: Kernels) -> None:
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        attention([(5, 1)], 16, 1, 2, 32, torch.float16, seed=1).run(kernels, 0.2)


# --- Rotation and cache -----------------------------------------------------------------------------------------------


@CACHE_DTYPES
@given(num_tokens=st.integers(1, 80), half=st.sampled_from([1, 3, 4, 16, 20, 32, 64]), num_kv_heads=st.integers(1, 3),
       group=st.integers(1, 9), block_size=st.integers(1, 32), is_normed=st.booleans(), seed=SEEDS)
@quick(40)
def test_rope_and_cache(kernels: Kernels, cache_dtype: torch.dtype, num_tokens: int, half: int, num_kv_heads: int,
                        group: int, block_size: int, is_normed: bool, seed: int) -> None:
    """Queries, keys and values are views of one tensor, as the decoder passes them; after a norm only the values."""
    num_heads, num_blocks, longest = num_kv_heads * group, -(-num_tokens // block_size) + 2, 100
    heads = numbers(num_tokens, (num_heads + 2 * num_kv_heads) * 2 * half, seed=seed).view(num_tokens, -1, 2 * half)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if is_normed:
        q, k = q.contiguous(), k.contiguous()
    angles = torch.outer(torch.arange(longest), torch.rand(half, generator=torch.Generator().manual_seed(seed)))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = integers(0, longest - 1, num_tokens, seed=seed)
    slots = torch.tensor(random.Random(seed).sample(range(num_blocks * block_size), num_tokens))
    keys, values, expected_keys, expected_values = (
        empty_cache(num_blocks, num_kv_heads, block_size, 2 * half, cache_dtype) for _ in range(4))
    rotated = kernels.rope_and_cache(q, k, v, cos_sin, positions, keys, values, slots)
    expected = REFERENCE.rope_and_cache(q, k, v, cos_sin, positions, expected_keys, expected_values, slots)
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-6)
    # A sum rounded otherwise in float32 may be the next number in bfloat16.
    digits = 2.0 ** -7 if cache_dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(keys, expected_keys, rtol=digits, atol=1e-6, equal_nan=True)
    assert torch.equal(keys.isnan(), expected_keys.isnan()), "what no slot names stays as it is"
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)


def test_values_are_rounded_to_bfloat16_as_torch_does(kernels: Kernels) -> None:
    """Ties to even, overflow to infinity, NaN, denormals: every upper half, with each kind of lower half."""
    upper = torch.arange(0, 2 ** 16, dtype=torch.int32).unsqueeze(1)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    v = (upper << 16 | lower).view(torch.float32).reshape(-1, 1, 2)
    rest = torch.zeros_like(v)
    keys, values = (torch.zeros(len(v), 1, 1, 2, dtype=torch.bfloat16) for _ in range(2))
    positions = torch.zeros(len(v), dtype=torch.long)
    kernels.rope_and_cache(rest, rest, v, torch.tensor([[1.0, 0.0]]), positions, keys, values, torch.arange(len(v)))
    expected = v.to(torch.bfloat16)
    is_nan = v.isnan().flatten()
    assert values.view(expected.shape)[is_nan.view(v.shape)].isnan().all()
    assert torch.equal(values.flatten()[~is_nan].view(torch.int16), expected.flatten()[~is_nan].view(torch.int16))


# --- Norms and activation ---------------------------------------------------------------------------------------------

MAGNITUDES = st.sampled_from([1e-20, 1e-3, 1.0, 100.0, 1e15])


@given(rows=st.integers(1, 40), width=st.integers(1, 70) | st.just(576), magnitude=MAGNITUDES, seed=SEEDS)
@quick(40)
def test_norms(kernels: Kernels, rows: int, width: int, magnitude: float, seed: int) -> None:
    x, residual = (magnitude * numbers(rows, width, seed=seed + part) for part in range(2))
    x[0] = 0
    weight = numbers(width, seed=seed + 2)
    expected, total = REFERENCE.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    before = x.clone(), residual.clone()
    normed, actual_total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual_total.double(), total, rtol=1e-6, atol=1e-6 * magnitude)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(),
                               REFERENCE.rms_norm(x.double(), weight.double(), 1e-5), rtol=1e-5, atol=1e-6)


def test_a_norm_of_some_heads_of_a_wider_tensor(kernels: Kernels) -> None:
    """How the decoder normalises queries and keys."""
    heads, weight = numbers(7, 9, 16, seed=1), numbers(16, seed=2)
    q, k, _ = torch.split(heads, [5, 2, 2], dim=1)
    for x in (q, k):
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@given(shape=st.lists(st.integers(1, 6), max_size=2), width=st.integers(1, 70), magnitude=st.floats(0, 37), seed=SEEDS)
@quick(40)
def test_silu_and_mul(kernels: Kernels, shape: list[int], width: int, magnitude: float, seed: int) -> None:
    gate_up = numbers(*shape, 2 * width, seed=seed)
    gate_up[..., :width] *= 10.0 ** magnitude
    actual = kernels.silu_and_mul(gate_up)
    assert actual.isfinite().all() or magnitude > 36
    torch.testing.assert_close(actual.double(), REFERENCE.silu_and_mul(gate_up.double()).clamp(-INFINITY, INFINITY),
                               rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("width", [3, 8, 11])
@pytest.mark.parametrize("gate", [-3e38, -1000.0, -104.0, -88.5, -87.0, -50.0, 50.0, 88.5, 1000.0, 3e38])
def test_silu_of_any_magnitude_is_a_number(kernels: Kernels, gate: float, width: int) -> None:
    actual = kernels.silu_and_mul(torch.tensor([[gate] * width + [1.0] * width]))
    torch.testing.assert_close(actual, torch.full((1, width), max(gate, 0.0)), rtol=1e-6, atol=1e-18)


@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "silu_and_mul"])
def test_a_nan_stays_a_nan(kernels: Kernels, operation: str) -> None:
    x, weight = numbers(3, 64, seed=1), torch.ones(64)
    x[1] = NAN
    out = {"rms_norm": lambda: kernels.rms_norm(x, weight, 1e-5),
           "add_rms_norm": lambda: kernels.add_rms_norm(x, x, weight, 1e-5)[0],
           "silu_and_mul": lambda: kernels.silu_and_mul(x)}[operation]()
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


# --- Quantised products -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """One format of weights and what its C++ product does to activations."""

    name: str

    def weight(self, channels: int, columns: int, group: int, seed: int) -> Int8Weight | Int4Weight:
        """Random integers and scales, independent of `quantize`; one channel's like no other's."""
        if self.name == "int8":
            return Int8Weight(integers(-127, 127, channels, columns, seed=seed).to(torch.int8),
                              numbers(channels, columns // group, seed=seed).exp())
        scales, minima = (numbers(channels, columns // 32, seed=seed + part).half() for part in range(2))
        return Int4Weight(integers(0, 15, channels, columns, seed=seed).to(torch.uint8), scales, minima)

    def rounded(self, weight: Tensor) -> Int8Weight | Int4Weight:
        return int8_linear.quantize(weight) if self.name == "int8" else int4_linear.quantize(weight)

    def dequantized(self, weight: Int8Weight | Int4Weight) -> Tensor:
        """[out, in] float64."""
        if isinstance(weight, Int8Weight):
            return int8_linear.dequantize(weight).double()
        return int4_linear.dequantize(weight).double()

    def product(self, kernels: Kernels, weight: Int8Weight | Int4Weight) -> Callable[[Tensor], Tensor]:
        return kernels.int8(weight) if isinstance(weight, Int8Weight) else kernels.int4(weight)

    def activation_group(self, group: int) -> int:
        """Columns of a row of activations that share a scale, for weights with scales for so many columns."""
        return min(group, 192) if self.name == "int8" else 32

    def representable(self, rows: int, columns: int, group: int, seed: int) -> Tensor:
        """Activations that the rounding leaves as they are: multiples of a power of two up to 127 times it."""
        own = self.activation_group(group)
        groups = integers(-127, 127, rows, columns // own, own, seed=seed)
        groups[..., seed % own] = 127
        steps = 2.0 ** integers(-20, 5, rows, groups.shape[1], 1, seed=seed)
        return (groups * steps).view(rows, columns)

    def half_steps(self, x: Tensor, group: int) -> Tensor:
        """Like `x`: how far the rounding moves each number at most."""
        groups = x.double().abs().view(len(x), -1, self.activation_group(group))
        return (groups.amax(dim=-1, keepdim=True) / 127 / 2).expand(groups.shape).reshape(x.shape)


INT8, INT4 = Scheme("int8"), Scheme("int4")
BOTH = pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
SHAPES = {"channels": st.integers(1, 50), "num_groups": st.integers(1, 6), "seed": SEEDS}
GROUPS = st.sampled_from([4, 20, 32, 64, 192, 576])


def group_size(scheme: Scheme, group: int) -> int:
    return group if scheme is INT8 else 32


@BOTH
@given(group=GROUPS, **SHAPES)
@quick(25)
def test_every_weight_is_in_its_place(kernels: Kernels, scheme: Scheme, channels: int, num_groups: int, group: int,
                                      seed: int) -> None:
    """Rows of the identity pick one column each."""
    columns = num_groups * group_size(scheme, group)
    weight = scheme.weight(channels, columns, group, seed)
    actual = scheme.product(kernels, weight)(torch.eye(columns))
    # One of int4's numbers may be the small difference of a large product and a large minimum.
    absolute = 0.0 if isinstance(weight, Int8Weight) else 16 * float(weight.scales.abs().max()) * FLOAT32_DIGITS * 2
    torch.testing.assert_close(actual.double(), scheme.dequantized(weight).T, rtol=1e-6, atol=absolute)


@BOTH
@given(rows=st.integers(1, 70), group=GROUPS, **SHAPES)
@quick(40)
def test_a_product_of_representable_activations_is_exact(kernels: Kernels, scheme: Scheme, rows: int, channels: int,
                                                         num_groups: int, group: int, seed: int) -> None:
    columns = num_groups * group_size(scheme, group)
    if columns > 2000:
        columns = group
    weight = scheme.weight(channels, columns, group, seed)
    x = scheme.representable(rows, columns, group, seed)
    assert_product(scheme.product(kernels, weight)(x), x, scheme.dequantized(weight), torch.zeros_like(x).double())


@BOTH
@given(rows=st.integers(1, 70), group=GROUPS, magnitude=st.sampled_from([1e-9, 1.0, 1e6]), **SHAPES)
@quick(40)
def test_a_product_errs_by_the_rounding_of_its_activations(kernels: Kernels, scheme: Scheme, rows: int, channels: int,
                                                           num_groups: int, group: int, magnitude: float,
                                                           seed: int) -> None:
    columns = num_groups * group_size(scheme, group)
    if columns > 2000:
        columns = group
    weight = scheme.weight(channels, columns, group, seed)
    x = magnitude * numbers(rows, columns, seed=seed + 1)
    assert_product(scheme.product(kernels, weight)(x), x, scheme.dequantized(weight), scheme.half_steps(x, group))


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, moved: Tensor) -> None:
    """y = x W^T, where each activation may have been moved by `moved`, in float32 sums."""
    assert actual.shape == (len(x), len(weight))
    error = (actual.double() - x.double() @ weight.T).abs()
    allowed = 1.01 * moved @ weight.abs().T + 10 * FLOAT32_DIGITS * x.double().abs() @ weight.abs().T
    assert (error <= allowed).all(), f"{(error / allowed).max()} of what the rounding explains"


@pytest.mark.parametrize("group", [1, 2, 6, 31])
def test_groups_of_no_multiple_of_four_columns_are_multiplied_by_the_reference(kernels: Kernels, group: int) -> None:
    weight, x = INT8.weight(20, 4 * group, group, seed=1), numbers(5, 4 * group, seed=2)
    assert torch.equal(kernels.int8(weight)(x), REFERENCE.int8(weight)(x))


@pytest.mark.parametrize("columns", [64, 2064, 4096, 16384])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_int8_sums_do_not_overflow(kernels: Kernels, columns: int, sign: int) -> None:
    weight = Int8Weight(torch.full((9, columns), 127, dtype=torch.int8), torch.full((9, 1), 1 / 127))
    actual = kernels.int8(weight)(torch.full((5, columns), float(sign)))
    torch.testing.assert_close(actual, torch.full((5, 9), float(sign * columns)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_int4_sums_do_not_overflow(kernels: Kernels, sign: int) -> None:
    weight = Int4Weight(torch.full((9, 96), 15, dtype=torch.uint8), torch.ones(9, 3).half(), torch.zeros(9, 3).half())
    actual = kernels.int4(weight)(torch.full((5, 96), float(sign)))
    torch.testing.assert_close(actual, torch.full((5, 9), 15.0 * 96 * sign), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF])
def test_every_kind_of_half_float_is_read(kernels: Kernels, bits: int) -> None:
    """Zeros, denormals, the smallest normal number, one, the largest."""
    value = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.float16)
    zero = torch.zeros(8, 1).half()
    ones = torch.ones(8, 32, dtype=torch.uint8)
    x = torch.zeros(1, 32)
    x[0, 3] = 1.0
    for scales, minima in ((value.expand(8, 1), zero), (zero, value.expand(8, 1))):
        actual = kernels.int4(Int4Weight(ones, scales.contiguous(), minima.contiguous()))(x)
        torch.testing.assert_close(actual, value.float().expand(1, 8), rtol=1e-6, atol=0)


@BOTH
@given(rows=st.integers(2, 70), channels=st.integers(1, 50), seed=SEEDS)
@quick(15)
def test_a_row_is_the_same_bits_in_any_batch(kernels: Kernels, scheme: Scheme, rows: int, channels: int,
                                             seed: int) -> None:
    product = scheme.product(kernels, scheme.weight(channels, 128, 32, seed))
    x = numbers(rows, 128, seed=seed + 1)
    together = product(x)
    for row in range(rows):
        assert torch.equal(together[row], product(x[row:row + 1])[0])
    assert torch.equal(together[1:], product(x[1:]))


@BOTH
def test_a_product_takes_any_shape_and_stride(kernels: Kernels, scheme: Scheme) -> None:
    product = scheme.product(kernels, scheme.weight(13, 64, 32, seed=1))
    x = numbers(2, 3, 128, seed=2)[..., ::2]
    assert product(x).shape == (2, 3, 13)
    assert torch.equal(product(x).view(6, 13), product(x.reshape(6, 64).contiguous()))
    assert torch.equal(product(x[0, 0]), product(x)[0, 0])


@BOTH
@pytest.mark.parametrize("spoilt", [NAN, INFINITY, -INFINITY])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(kernels: Kernels, scheme: Scheme, spoilt: float) -> None:
    product = scheme.product(kernels, scheme.weight(20, 64, 32, seed=1))
    x = numbers(6, 64, seed=2)
    clean = product(x)
    x[2, 17] = spoilt
    x[4] = spoilt
    actual = product(x)
    assert actual[[2, 4]].isnan().all() and torch.equal(actual[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@BOTH
def test_zeros_give_zeros(kernels: Kernels, scheme: Scheme) -> None:
    assert torch.equal(scheme.product(kernels, scheme.weight(20, 64, 32, seed=1))(torch.zeros(3, 64)),
                       torch.zeros(3, 20))


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_results_do_not_depend_on_the_number_of_threads(kernels: Kernels, threads: int) -> None:
    case = attention([(700, 1), (90, 90), (1290, 3)], 16, 2, 3, 64, torch.bfloat16, seed=1)
    x = numbers(70, 1152, seed=2)
    products = [scheme.product(kernels, scheme.weight(333, 1152, 32, seed=3)) for scheme in (INT8, INT4)]
    temperatures, keys = torch.ones(70, dtype=torch.float64), integers(0, 2 ** 32 - 1, 70, 2, seed=4)

    def everything() -> list[Tensor]:
        return [case.run(kernels, 0.1), *(product(x) for product in products), kernels.silu_and_mul(x),
                kernels.rms_norm(x, x[0], 1e-5), *kernels.add_rms_norm(x, x, x[0], 1e-5), *kernels.argmax(x),
                kernels.draw(x, temperatures, keys),
                kernels.truncate(x, temperatures, torch.arange(1, 71) * 20, 0.9 * temperatures, 1e-3 * temperatures)]

    expected = everything()
    torch.ops.servekit_cpu.set_threads(threads)
    try:
        for _ in range(20):
            assert all(map(torch.equal, everything(), expected))
    finally:
        torch.ops.servekit_cpu.set_threads(THREADS)


def test_two_callers_at_once_do_not_disturb_each_other(kernels: Kernels) -> None:
    """torch's operators give the interpreter lock back, so two engines of one process meet in the C++ code."""
    product = INT8.product(kernels, INT8.weight(2048, 256, 256, seed=1))
    inputs = [numbers(32, 256, seed=seed) for seed in range(2)]
    expected = [product(x) for x in inputs]

    def ask(index: int) -> bool:
        return all(torch.equal(product(inputs[index]), expected[index]) for _ in range(50))

    with ThreadPoolExecutor(2) as callers:
        assert all(callers.map(ask, range(2)))


# --- A whole layer ----------------------------------------------------------------------------------------------------


def operands(kernels: Kernels, schemes: Sequence[Scheme], num_heads: int, num_kv_heads: int, head_dim: int,
             window: int | None) -> LayerOperands:
    """A layer of 96 and 160 columns; each of its four matrices in a format of its own."""
    hidden, intermediate, attended = 96, 160, num_heads * head_dim
    shapes = [(attended + 2 * num_kv_heads * head_dim, hidden), (hidden, attended), (2 * intermediate, hidden),
              (hidden, intermediate)]
    qkv, o, gate_up, down = (scheme.product(kernels, scheme.rounded(numbers(*shape, seed=index) / shape[1] ** 0.5))
                             for index, (scheme, shape) in enumerate(zip(schemes, shapes, strict=True)))
    return LayerOperands(qkv, o, numbers(hidden, seed=5), gate_up, down, numbers(hidden, seed=6), hidden, num_heads,
                         num_kv_heads, head_dim, window, 1e-5)


def one_by_one(kernels: Kernels, layer: LayerOperands, normed: Tensor, residual: Tensor, cos_sin: Tensor,
               positions: Tensor, batch: AttentionBatch, kv: KVLayer) -> tuple[Tensor, Tensor]:
    """The layer as its operations, in the order of the decoder."""
    heads = layer.qkv(normed).view(len(normed), -1, layer.head_dim)
    q, k, v = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    q = kernels.rope_and_cache(q, k, v, cos_sin, positions, *kv, batch.slots)
    attended = kernels.paged_attention(q, *kv, batch, layer.head_dim ** -0.5, layer.window)
    normed, residual = kernels.add_rms_norm(layer.o(attended.flatten(1)), residual, layer.mlp_norm, layer.rms_eps)
    fed_forward = layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
    return kernels.add_rms_norm(fed_forward, residual, layer.next_norm, layer.rms_eps)


@CACHE_DTYPES
@pytest.mark.parametrize("schemes", [(INT8,) * 4, (INT4,) * 4, (INT4, INT8, INT8, INT4)],
                         ids=lambda schemes: "-".join(scheme.name for scheme in schemes))
@given(lengths=st.lists(st.tuples(st.integers(1, 150), CHUNKS), min_size=1, max_size=4), num_kv_heads=st.integers(1, 3),
       group=st.integers(1, 4), head_dim=st.sampled_from([32, 64]), window=WINDOWS, seed=SEEDS)
@quick(12)
def test_a_fused_layer_is_its_operations(kernels: Kernels, schemes: Sequence[Scheme], cache_dtype: torch.dtype,
                                         lengths: list[tuple[int, int]], num_kv_heads: int, group: int, head_dim: int,
                                         window: int | None, seed: int) -> None:
    layer = operands(kernels, schemes, num_kv_heads * group, num_kv_heads, head_dim, window)
    fused = kernels.fused_layer(layer)
    assert fused is not None
    case = attention(lengths, 16, num_kv_heads, group, head_dim, cache_dtype, seed)
    normed, residual = (numbers(len(case.q), 96, seed=seed + part) for part in range(2))
    positions = torch.cat([torch.arange(context - queries, context) for context, queries
                           in zip(case.batch.context_lens_host, query_lens(case.batch), strict=True)])
    angles = torch.outer(torch.arange(150), numbers(head_dim // 2, seed=1))
    arguments = normed, residual, torch.cat((angles.cos(), angles.sin()), dim=1), positions, case.batch
    caches = [(case.keys.clone(), case.values.clone()) for _ in range(2)]
    actual, expected = fused(*arguments, caches[0]), one_by_one(kernels, layer, *arguments, caches[1])
    assert all(map(torch.equal, actual, expected)) and actual[0].isfinite().all()
    for written, wanted in zip(*caches, strict=True):
        torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_rows", [127, 128, 129, 300])
def test_a_fused_layer_of_many_rows_is_its_operations(kernels: Kernels, num_rows: int) -> None:
    """From 128 rows on, two threads compute blocks of rows each."""
    layer = operands(kernels, (INT4, INT8, INT4, INT8), 6, 2, 32, None)
    fused = kernels.fused_layer(layer)
    assert fused is not None
    case = attention([(num_rows, num_rows)], 16, 2, 3, 32, torch.bfloat16, seed=1)
    normed, residual = (numbers(num_rows, 96, seed=part) for part in range(2))
    angles = torch.outer(torch.arange(num_rows), numbers(16, seed=1))
    arguments = normed, residual, torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(num_rows), case.batch
    caches = [(case.keys.clone(), case.values.clone()) for _ in range(2)]
    actual, expected = fused(*arguments, caches[0]), one_by_one(kernels, layer, *arguments, caches[1])
    assert all(map(torch.equal, actual, expected)) and actual[0].isfinite().all()


def query_lens(batch: AttentionBatch) -> list[int]:
    return [end - start for start, end in pairwise(batch.query_start_host)]


@pytest.mark.parametrize("replaced", ["qkv", "o", "gate_up", "down"])
def test_a_layer_with_a_matrix_of_numbers_is_not_fused(kernels: Kernels, replaced: str) -> None:
    layer = operands(kernels, (INT8,) * 4, 2, 1, 32, None)
    matrix: Any = {replaced: kernels.dense(numbers(96, 96, seed=1))}
    assert kernels.fused_layer(layer) is not None and kernels.fused_layer(replace(layer, **matrix)) is None


# --- Sampling ---------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 5), vocab=st.integers(1, 60), levels=st.integers(1, 9), seed=SEEDS)
@quick(60)
def test_argmax_is_the_first_of_the_largest(kernels: Kernels, rows: int, vocab: int, levels: int, seed: int) -> None:
    logits = integers(-levels, 0, rows, vocab, seed=seed).float()
    values, indices = kernels.argmax(logits)
    assert values.tolist() == [max(row) for row in logits.tolist()]
    assert indices.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 40, 43])
def test_argmax_of_rows_with_infinities(kernels: Kernels, vocab: int) -> None:
    last = vocab - 1
    logits = torch.full((3, vocab), -INFINITY)
    logits[1, last], logits[2, last] = -5.0, INFINITY
    values, indices = kernels.argmax(logits)
    assert values.tolist() == [-INFINITY, -5.0, INFINITY] and indices.tolist() == [0, last, last]


@given(vocab=st.integers(1, 60), data=st.data())
@quick(60)
def test_argmax_of_a_row_with_a_nan_is_nan(kernels: Kernels, vocab: int, data: st.DataObject) -> None:
    logits = numbers(3, vocab, seed=vocab)
    logits[1, data.draw(st.lists(st.integers(0, vocab - 1), min_size=1))] = NAN
    logits[:, data.draw(st.integers(0, vocab - 1))] += data.draw(st.sampled_from([0.0, INFINITY]))
    values, _ = kernels.argmax(logits)
    assert values[1].isnan() and not values[[0, 2]].isnan().any()


@given(rows=st.integers(1, 9), vocab=st.integers(1, 60) | st.just(5000), spread=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
       temperature=st.floats(0.05, 20), seed=SEEDS)
@quick(80)
def test_draws_are_those_of_the_reference(kernels: Kernels, rows: int, vocab: int, spread: float, temperature: float,
                                          seed: int) -> None:
    logits = spread * numbers(rows, vocab, seed=seed)
    temperatures = torch.full((rows,), temperature, dtype=torch.float64) * torch.arange(1, rows + 1)
    keys = integers(0, 2 ** 32 - 1, rows, 2, seed=seed)
    expected = REFERENCE.draw(logits, temperatures, keys)
    # Once in a million draws the two best sums are closer than float32 tells apart: then the second best may come.
    nudge = -1e-5 * temperatures.unsqueeze(1)
    other = REFERENCE.draw(logits.double().scatter_add(1, expected.unsqueeze(1), nudge), temperatures, keys)
    actual = kernels.draw(logits, temperatures, keys)
    assert ((actual == expected) | (actual == other)).all()


TOP_P = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0]) | st.floats(0, 1)
MIN_P = st.sampled_from([0.0, 1e-12, 1e-3, 0.5, 1.0]) | st.floats(0, 1)


@given(vocab=st.integers(1, 60) | st.just(5000), spread=st.sampled_from([0.0, 0.1, 2.0, 10.0, 1e4]),
       is_tied=st.booleans(), data=st.data(), seed=SEEDS)
@quick(150)
def test_truncation_leaves_what_the_reference_leaves(kernels: Kernels, vocab: int, spread: float, is_tied: bool,
                                                     data: st.DataObject, seed: int) -> None:
    rows = data.draw(st.integers(1, 4))

    def one_a_row(values: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=rows, max_size=rows)), dtype=torch.float64)

    logits = spread * numbers(rows, vocab, seed=seed)
    logits = logits.round() if is_tied else logits
    logits[:, data.draw(st.lists(st.integers(1, vocab - 1), max_size=3)) if vocab > 1 else []] = -INFINITY
    temperatures = one_a_row(st.sampled_from([1e-300, 1e-3, 1e300]) | st.floats(0.05, 20))
    top_k = one_a_row(st.integers(1, vocab) | st.just(vocab)).long()
    top_p, min_p = one_a_row(TOP_P), one_a_row(MIN_P)
    actual = kernels.truncate(logits, temperatures, top_k, top_p, min_p)
    # A limit that lies within rounding of where a token is may leave that token or not.
    allowed = [REFERENCE.truncate(logits, temperatures, top_k, (top_p + p).clamp(0, 1), (min_p * m).clamp(0, 1))
               for p in (0.0, -1e-6, 1e-6) for m in (1.0, 1 - 1e-9, 1 + 1e-9)]
    assert all(any(torch.equal(row, other[i]) for other in allowed) for i, row in enumerate(actual))


def test_truncation_without_limits_leaves_all(kernels: Kernels) -> None:
    logits, ones = numbers(3, 100, seed=1), torch.ones(3, dtype=torch.float64)
    assert torch.equal(kernels.truncate(logits, ones, torch.full((3,), 100), ones, 0 * ones), logits)


@pytest.mark.parametrize("key", [0, 1, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 60, 2 ** 32 - 1])
def test_draws_with_keys_at_the_ends_of_their_range(kernels: Kernels, key: int) -> None:
    logits, temperatures = numbers(1, 1000, seed=key), torch.ones(1, dtype=torch.float64)
    for other in (0, 2 ** 32 - 1, 12345):
        for keys in (torch.tensor([[key, other]]), torch.tensor([[other, key]])):
            assert torch.equal(kernels.draw(logits, temperatures, keys), REFERENCE.draw(logits, temperatures, keys))


@pytest.mark.parametrize("vocab", [11, 16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_and_never_take_a_masked_token(kernels: Kernels, vocab: int,
                                                                temperature: float) -> None:
    count = 40_000
    logits = numbers(vocab, seed=vocab)
    logits[[1, vocab - 1]] = -INFINITY
    shares = (logits.double() / temperature).softmax(dim=0)
    tokens = kernels.draw(logits.repeat(count, 1), torch.full((count,), temperature, dtype=torch.float64),
                          integers(0, 2 ** 32 - 1, count, 2, seed=1))
    drawn = torch.bincount(tokens, minlength=vocab).double()
    assert drawn[1] == 0 and drawn[vocab - 1] == 0
    deviations = (drawn - count * shares) / (count * shares * (1 - shares)).sqrt().clamp(min=1e-9)
    assert deviations.abs().max() < 4.5


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_takes_the_largest(kernels: Kernels, temperature: float) -> None:
    logits = numbers(50, 77, seed=1)
    logits[:, 5] = -INFINITY
    tokens = kernels.draw(logits, torch.full((50,), temperature, dtype=torch.float64),
                          integers(0, 2 ** 32 - 1, 50, 2, seed=2))
    assert torch.equal(tokens, logits.argmax(dim=1))


def test_a_huge_temperature_takes_every_token_that_is_not_masked(kernels: Kernels) -> None:
    logits = 100 * numbers(1, 13, seed=1)
    logits[0, 4] = -INFINITY
    tokens = kernels.draw(logits.repeat(2000, 1), torch.full((2000,), 1e300, dtype=torch.float64),
                          integers(0, 2 ** 32 - 1, 2000, 2, seed=2))
    counts = torch.bincount(tokens, minlength=13)
    assert counts[4] == 0 and counts[torch.arange(13) != 4].min() > 2000 / 12 / 2


@pytest.mark.parametrize("only", [0, 6, 8, 10])
def test_the_only_token_that_is_not_masked_is_drawn(kernels: Kernels, only: int) -> None:
    logits = torch.full((200, 11), -INFINITY)
    logits[:, only] = -1e30
    tokens = kernels.draw(logits, torch.ones(200, dtype=torch.float64), integers(0, 2 ** 32 - 1, 200, 2, seed=1))
    assert (tokens == only).all()
