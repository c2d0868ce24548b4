"""Calls of every kernel at the sizes of an 8B Llama (Llama 3; Grattafiori et al., 2024), to compile or to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.dispatch import Kernels
from servekit.kernels.fp4_linear import MXFP4_GROUP, NVFP4_GROUP, Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.fused_layer import Product
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int4_linear import GROUP_SIZE, Int4Weight
from servekit.kernels.int8_linear import Int8Weight

_HIDDEN, _INTERMEDIATE, _VOCAB = 4096, 14336, 128256
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16
_MOST_POSITIONS = 8192
_INT4_GROUP = 128


@dataclass(frozen=True)
class TypicalCall:
    """One operation with its arguments."""

    name: str
    run: Callable[[], object]
    is_hot: bool
    """Whether every layer of a step runs it, in the usual formats."""
    num_bytes: int
    """What it must at least read and write: each number of its operands once, and no temporary ones."""


@dataclass(frozen=True)
class Sizes:
    """How much a step computes."""

    rows: int
    """Tokens of the step; each request of a decode has one."""
    context_tokens: int
    """Of each request."""


def typical_calls(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    """Every operation once or in some formats; the numbers are zeros, the tensors lie on `device`."""
    return [*_elementwise(kernels, device, sizes), *_attention(kernels, device, sizes),
            *_products(kernels, device, sizes), *_sampling(kernels, device, sizes)]


def _elementwise(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    x, weight = _zeros(device, sizes.rows, _HIDDEN), _zeros(device, _HIDDEN)
    heads = _zeros(device, sizes.rows, _NUM_HEADS + 2 * _NUM_KV_HEADS, _HEAD_DIM)
    q, k, v = heads.split_with_sizes([_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS], 1)
    table = torch.zeros(_MOST_POSITIONS, _HEAD_DIM, device=device)
    places = torch.arange(sizes.rows, device=device)
    positions = places % _MOST_POSITIONS
    blocks = torch.arange(2, device=device)
    cache = _cache(device, max(2, -(-sizes.rows // _BLOCK_SIZE)), _HEAD_DIM, torch.bfloat16)
    narrow = cache.to(torch.float8_e4m3fn)
    head_norm, wide = _zeros(device, _HEAD_DIM), _zeros(device, sizes.rows, 2 * _INTERMEDIATE)
    turned = q.nbytes + heads.nbytes + table[:sizes.rows].nbytes
    return [
        TypicalCall("rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5), False, 2 * x.nbytes + weight.nbytes),
        TypicalCall("rms_norm of heads", lambda: kernels.rms_norm(q, head_norm, 1e-5), True,
                    2 * q.nbytes + head_norm.nbytes),
        TypicalCall("add_rms_norm", lambda: kernels.add_rms_norm(x, x, weight, 1e-5), True,
                    4 * x.nbytes + weight.nbytes),
        TypicalCall("silu_and_mul", lambda: kernels.silu_and_mul(wide), True, wide.nbytes + wide.nbytes // 2),
        TypicalCall("rope_and_cache",
                    lambda: kernels.rope_and_cache(q, k, v, table, positions, cache, cache, places), True,
                    turned + 2 * k.nbytes),
        TypicalCall("rope_and_cache fp8",
                    lambda: kernels.rope_and_cache(q, k, v, table, positions, narrow, narrow, places), True,
                    turned + k.nbytes),
        TypicalCall("copy_blocks", lambda: kernels.copy_blocks(cache, cache, blocks, blocks), False,
                    2 * cache[blocks].nbytes),
    ]


def _attention(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    cases = [(head_dim, torch.bfloat16, torch.bfloat16) for head_dim in (64, 96, 128, 256)]
    cases += [(head_dim, torch.bfloat16, torch.float8_e4m3fn) for head_dim in (64, 128, 256)]
    cases += [(_HEAD_DIM, torch.float32, torch.float32)]
    kinds = {"decode": _batch(device, sizes.rows, 1, sizes.context_tokens),
             "prefill": _batch(device, 1, sizes.rows, max(sizes.rows, sizes.context_tokens))}
    calls = []
    for head_dim, dtype, cache_dtype in cases:
        for kind, batch in kinds.items():
            q = _zeros(device, sizes.rows, _NUM_HEADS, head_dim, dtype=dtype)
            cache = _cache(device, batch.block_tables.shape[1], head_dim, cache_dtype)
            for window in (None, sizes.context_tokens // 2) if cache_dtype is torch.bfloat16 else (None,):
                name = f"{kind} {head_dim} {_short(cache_dtype)}{' window' if window else ''}"
                run = partial(kernels.paged_attention, q, cache, cache, batch, head_dim ** -0.5, window)
                seen = [min(length, window + batch.max_query_tokens - 1) if window else length
                        for length in batch.context_lens_host]
                calls.append(TypicalCall(name, run, dtype is torch.bfloat16 and window is None,
                                         2 * q.nbytes + 2 * sum(seen) * _NUM_KV_HEADS * head_dim * cache.itemsize))
    return calls


def _products(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    calls = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = _zeros(device, sizes.rows, _HIDDEN, dtype=dtype)
        calls += [TypicalCall(f"{name} {_short(dtype)}", partial(matrix.product, x), dtype is torch.bfloat16,
                              2 * x.nbytes + matrix.num_bytes) for name, matrix in _matrices(kernels, device).items()]
    return calls


@dataclass(frozen=True)
class _Matrix:
    product: Product
    num_bytes: int
    """Of its numbers and scales, as the kernel reads them."""


def _matrices(kernels: Kernels, device: torch.device) -> dict[str, _Matrix]:
    """One matrix [hidden, hidden] in every format that the kernels have products for."""
    codes = torch.zeros(_HIDDEN, _HIDDEN, dtype=torch.uint8, device=device)

    def scales(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(_HIDDEN, columns, device=device).to(dtype)

    integers, floats = codes.view(torch.int8), codes.view(torch.float8_e4m3fn)
    groups, small = _HIDDEN // _INT4_GROUP, scales(_HIDDEN // GROUP_SIZE, torch.float16)
    one_scale, fp8_weight = Int8Weight(integers, scales(1, torch.float32)), Fp8Weight(
        floats, torch.zeros(_HIDDEN, device=device))
    eight_bits, four_bits = codes.nbytes, codes.nbytes // 2
    matrices = {
        "int8": _Matrix(kernels.int8(one_scale), eight_bits + 4 * _HIDDEN),
        "int8 grouped": _Matrix(kernels.int8(Int8Weight(integers, small.float())), eight_bits + 4 * small.numel()),
        "int8_dynamic": _Matrix(kernels.int8_dynamic(one_scale), eight_bits + 4 * _HIDDEN),
        "int4": _Matrix(kernels.int4(Int4Weight(codes, small, small)), four_bits + 2 * small.nbytes),
        "grouped_int4": _Matrix(kernels.grouped_int4(
            GroupedInt4Weight(codes, codes[:, :groups].contiguous(), scales(groups, torch.float16))),
            four_bits + 3 * groups * _HIDDEN),
        "fp8": _Matrix(kernels.fp8(fp8_weight), eight_bits + 4 * _HIDDEN),
        "mxfp4": _Matrix(kernels.fp4(Fp4Weight(codes, scales(_HIDDEN // MXFP4_GROUP, torch.float8_e8m0fnu))),
                         four_bits + codes.numel() // MXFP4_GROUP),
        "nvfp4": _Matrix(kernels.fp4(Fp4Weight(codes, scales(_HIDDEN // NVFP4_GROUP, torch.float8_e4m3fn))),
                         four_bits + codes.numel() // NVFP4_GROUP),
    }
    try:
        matrices["fp8_dynamic"] = _Matrix(kernels.fp8_dynamic(fp8_weight), eight_bits + 4 * _HIDDEN)
    except ValueError:
        return matrices  # Not on this GPU.
    return matrices


def _sampling(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    logits = torch.zeros(sizes.rows, _VOCAB, device=device)
    ones = torch.ones(sizes.rows, dtype=torch.float64, device=device)
    keys = torch.zeros(sizes.rows, 2, dtype=torch.int64, device=device)
    most = torch.full((sizes.rows,), 50, device=device)
    return [
        TypicalCall("argmax", lambda: kernels.argmax(logits), True, logits.nbytes),
        TypicalCall("draw", lambda: kernels.draw(logits, ones, keys), True, logits.nbytes),
        TypicalCall("truncate", lambda: kernels.truncate(logits, ones, most, 0.9 * ones, 0.1 * ones), True,
                    2 * logits.nbytes),
    ]


def _batch(device: torch.device, num_requests: int, queries: int, context_tokens: int) -> AttentionBatch:
    """Requests that all have the same blocks: those of the cache, in order."""
    query_start = tuple(range(0, num_requests * queries + 1, queries))
    blocks = torch.arange(-(-context_tokens // _BLOCK_SIZE), dtype=torch.int32, device=device)
    return AttentionBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.full((num_requests,), context_tokens, dtype=torch.int32, device=device),
        block_tables=blocks.repeat(num_requests, 1),
        slots=torch.arange(num_requests * queries, device=device),
        max_query_tokens=queries,
        max_context_tokens=context_tokens,
        query_start_host=query_start,
        context_lens_host=(context_tokens,) * num_requests)


def _cache(device: torch.device, num_blocks: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(num_blocks, _NUM_KV_HEADS, _BLOCK_SIZE, head_dim, device=device).to(dtype)


def _zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}[dtype]
