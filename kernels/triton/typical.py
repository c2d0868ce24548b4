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
    head_norm = _zeros(device, _HEAD_DIM)
    return [
        TypicalCall("rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5), False),
        TypicalCall("rms_norm of heads", lambda: kernels.rms_norm(q, head_norm, 1e-5), True),
        TypicalCall("add_rms_norm", lambda: kernels.add_rms_norm(x, x, weight, 1e-5), True),
        TypicalCall("silu_and_mul",
                    partial(kernels.silu_and_mul, _zeros(device, sizes.rows, 2 * _INTERMEDIATE)), True),
        TypicalCall("rope_and_cache",
                    lambda: kernels.rope_and_cache(q, k, v, table, positions, cache, cache, places), True),
        TypicalCall("rope_and_cache fp8",
                    lambda: kernels.rope_and_cache(q, k, v, table, positions, narrow, narrow, places), True),
        TypicalCall("copy_blocks", lambda: kernels.copy_blocks(cache, cache, blocks, blocks), False),
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
                calls.append(TypicalCall(name, run, dtype is torch.bfloat16 and window is None))
    return calls


def _products(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    calls = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = _zeros(device, sizes.rows, _HIDDEN, dtype=dtype)
        calls += [TypicalCall(f"{name} {_short(dtype)}", partial(product, x), dtype is torch.bfloat16)
                  for name, product in _matrices(kernels, device).items()]
    return calls


def _matrices(kernels: Kernels, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """One matrix [hidden, hidden] in every format that the kernels have products for."""
    codes = torch.zeros(_HIDDEN, _HIDDEN, dtype=torch.uint8, device=device)

    def scales(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(_HIDDEN, columns, device=device).to(dtype)

    integers, floats = codes.view(torch.int8), codes.view(torch.float8_e4m3fn)
    groups, small = _HIDDEN // _INT4_GROUP, scales(_HIDDEN // GROUP_SIZE, torch.float16)
    one_scale, fp8_weight = Int8Weight(integers, scales(1, torch.float32)), Fp8Weight(
        floats, torch.zeros(_HIDDEN, device=device))
    products = {
        "int8": kernels.int8(one_scale),
        "int8 grouped": kernels.int8(Int8Weight(integers, small.float())),
        "int8_dynamic": kernels.int8_dynamic(one_scale),
        "int4": kernels.int4(Int4Weight(codes, small, small)),
        "grouped_int4": kernels.grouped_int4(
            GroupedInt4Weight(codes, codes[:, :groups].contiguous(), scales(groups, torch.float16))),
        "fp8": kernels.fp8(fp8_weight),
        "mxfp4": kernels.fp4(Fp4Weight(codes, scales(_HIDDEN // MXFP4_GROUP, torch.float8_e8m0fnu))),
        "nvfp4": kernels.fp4(Fp4Weight(codes, scales(_HIDDEN // NVFP4_GROUP, torch.float8_e4m3fn))),
    }
    try:
        products["fp8_dynamic"] = kernels.fp8_dynamic(fp8_weight)
    except ValueError:
        return products  # Not on this GPU.
    return products


def _sampling(kernels: Kernels, device: torch.device, sizes: Sizes) -> list[TypicalCall]:
    logits = torch.zeros(sizes.rows, _VOCAB, device=device)
    ones = torch.ones(sizes.rows, dtype=torch.float64, device=device)
    keys = torch.zeros(sizes.rows, 2, dtype=torch.int64, device=device)
    most = torch.full((sizes.rows,), 50, device=device)
    return [
        TypicalCall("argmax", lambda: kernels.argmax(logits), True),
        TypicalCall("draw", lambda: kernels.draw(logits, ones, keys), True),
        TypicalCall("truncate", lambda: kernels.truncate(logits, ones, most, 0.9 * ones, 0.1 * ones), True),
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
