"""Random arguments for the Triton kernels, and what both sides of a comparison may differ by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv import random_caches
from servekit.kernels import AttentionBatch, reference_kernels
from servekit.kernels.triton import Gpu, triton_kernels

NEW, OLD = Gpu(num_processors=4, has_fp8=True), Gpu(num_processors=4, has_fp8=False)
REFERENCE = reference_kernels()
KERNELS = triton_kernels(REFERENCE, NEW)
SEEDS = st.integers(0, 10**6)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DIGITS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""A step of each format, relative to a number; of float32, some steps."""


def quick(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=max_examples, deadline=None)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """From `low` to `high`, both included."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, steps: float = 1.0) -> None:
    """Equal up to some steps of a format, of each number or of numbers as large as 1."""
    bound = steps * DIGITS[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound, equal_nan=True)


@dataclass(frozen=True)
class Attention:
    """A batch over a cache that is NaN wherever no context lies."""

    q: Tensor
    keys: Tensor
    values: Tensor
    batch: AttentionBatch


def attention(lengths: Sequence[tuple[int, int]], block_size: int, num_kv_heads: int, group: int, head_dim: int,
              dtype: torch.dtype, seed: int) -> Attention:
    """Requests of (context, queries), as in `random_caches`."""
    keys, values, batch = random_caches(lengths, block_size, num_kv_heads, head_dim, dtype, seed)
    q = numbers(batch.query_start_host[-1], num_kv_heads * group, head_dim, seed=seed, dtype=dtype)
    return Attention(q, keys, values, batch)
