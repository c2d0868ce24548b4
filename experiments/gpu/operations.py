"""Every operation of a step by itself, at the sizes of the model, against the limit of its bytes or its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from bench import Bench, Row
from torch import Tensor
from torch.nn import functional as F

from servekit.config.schema import Quantization
from servekit.kernels import AttentionBatch, Kernels, Product, grouped_int4_linear
from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.quantization import SCHEMES, QuantizedWeight, prepare
from servekit.model.shapes import SHAPES
from servekit.model.spec import ModelSpec

_BLOCK_SIZE = 16
_GROUP = 128
_BF16 = torch.bfloat16
_SERVED = ("fp8", "int4")
"""Formats of the models that the engine runs, whose products are tuned by then."""


@dataclass(frozen=True)
class Operation:
    """One operation, with what it must at least read, write and multiply."""

    name: str
    size: str
    calls: Sequence[Callable[[], object]]
    """On one copy of the data after the other."""
    num_bytes: float
    flops: float
    numbers: str = "bfloat16"
    """What it multiplies in."""
    peer: Sequence[Callable[[], object]] = ()
    """torch's own operation for the same."""


def measured(bench: Bench, operation: Operation) -> Row:
    """Its time beside its limit and its peer's."""
    seconds = bench.seconds_per_call(operation.calls)
    limit = bench.known_limits.seconds(operation.num_bytes, operation.flops, operation.numbers)
    row: Row = {"name": operation.name, "size": operation.size, "us": 1e6 * seconds, "limit_us": 1e6 * limit,
                "share": limit / seconds}
    return row | ({"peer_us": 1e6 * bench.seconds_per_call(operation.peer)} if operation.peer else {})


def attention(bench: Bench) -> Iterator[Row]:
    """Attention of decodes and of prompts, with torch's SDPA over contiguous keys beside it."""
    spec, kernels, sizes = SHAPES[bench.sizes.shape], bench.kernels(), bench.sizes
    for batch in sizes.batches:
        if bench.has_time:
            yield measured(bench, decode(bench, kernels, spec, batch, _BF16))
    for tokens in sizes.prefills:
        if bench.has_time:
            yield measured(bench, prefill(kernels, spec, tokens, bench.device))
    for batch in sizes.batches:
        if bench.has_time:
            yield measured(bench, decode(bench, kernels, spec, batch, torch.float8_e4m3fn))


def decode(bench: Bench, kernels: Kernels, spec: ModelSpec, batch: int, cache_dtype: torch.dtype) -> Operation:
    context = bench.sizes.context_tokens
    blocks = -(-context // _BLOCK_SIZE)
    num_bytes = 2 * batch * context * spec.num_kv_heads * spec.head_dim * cache_dtype.itemsize
    q = torch.randn(batch, spec.num_heads, spec.head_dim, device=bench.device).to(_BF16)
    tables = torch.randperm(batch * blocks, device=bench.device).view(batch, blocks).int()
    step = attention_batch(1, tables, context)
    caches = [cache_pair(spec, batch * blocks, cache_dtype, bench.device) for _ in range(bench.num_copies(num_bytes))]
    calls = [partial(kernels.paged_attention, q, *kv, step, spec.head_dim ** -0.5, None) for kv in caches]
    is_narrow = cache_dtype is torch.float8_e4m3fn
    peers = [] if is_narrow else [partial(sdpa, q, *contiguous(kv, batch)) for kv in caches]
    return Operation(f"decode attention{' fp8 KV' if is_narrow else ''}", f"batch {batch}, context {context}", calls,
                     num_bytes, 4.0 * batch * context * spec.num_heads * spec.head_dim, peer=peers)


def prefill(kernels: Kernels, spec: ModelSpec, tokens: int, device: torch.device) -> Operation:
    blocks = -(-tokens // _BLOCK_SIZE)
    q = torch.randn(tokens, spec.num_heads, spec.head_dim, device=device).to(_BF16)
    kv = cache_pair(spec, blocks, _BF16, device)
    step = attention_batch(tokens, torch.randperm(blocks, device=device).view(1, -1).int(), tokens)
    keys, values = (cache.transpose(0, 1).flatten(1, 2)[None, :, :tokens].contiguous() for cache in kv)
    queries = q.transpose(0, 1)[None]

    def peer() -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    return Operation("prefill attention", f"{tokens} tokens",
                     [partial(kernels.paged_attention, q, *kv, step, spec.head_dim ** -0.5, None)],
                     sum(tensor.nbytes for tensor in (q, q, keys, values)),
                     2.0 * tokens ** 2 * spec.num_heads * spec.head_dim, peer=[peer])


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query for each request."""
    return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)


def contiguous(kv: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    """The same numbers as [batch, heads, context, head_dim], in whatever order."""
    return kv[0].view(batch, kv[0].shape[1], -1, kv[0].shape[3]), kv[1].view(batch, kv[1].shape[1], -1, kv[1].shape[3])


def cache_pair(spec: ModelSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = num_blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


def attention_batch(queries: int, tables: Tensor, context: int) -> AttentionBatch:
    """Every request computes its last `queries` tokens."""
    count, device = len(tables), tables.device
    starts = torch.arange(count + 1, dtype=torch.int32) * queries
    positions = torch.arange(context - queries, context, device=device).expand(count, -1)
    slots = tables.long().gather(1, positions // _BLOCK_SIZE) * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return AttentionBatch(starts.to(device), torch.full((count,), context, dtype=torch.int32, device=device), tables,
                          slots.flatten(), queries, context, tuple(starts.tolist()), (context,) * count)


def products(bench: Bench) -> Iterator[Row]:
    """Products with the layer's largest matrix in every format, and cuBLAS's in bfloat16 beside them.

    Every number of rows is tuned by itself, so formats that no model was served in have a few only.
    """
    spec, kernels, sizes = SHAPES[bench.sizes.shape], bench.kernels(), bench.sizes
    rows, columns = 2 * spec.intermediate_size, spec.hidden_size
    weight = 0.02 * torch.randn(rows, columns, device=bench.device)
    dense = copies(bench, weight.to(_BF16), kernels.dense)
    for name, quantized, product, numbers in formats(weight, kernels, bench):
        own = copies(bench, quantized, product)
        for batch in (*sizes.batches, 2 * sizes.context_tokens) if name in _SERVED else sizes.mode_batches:
            if not bench.has_time:
                return
            x = torch.randn(batch, columns, device=bench.device).to(_BF16)
            yield measured(bench, Operation(
                f"product {name}", f"{batch} x {columns} x {rows}", [partial(call, x) for call in own],
                stored_bytes(quantized) + 2 * batch * (rows + columns), 2.0 * batch * rows * columns, numbers,
                [partial(call, x) for call in dense]))


def formats(weight: Tensor, kernels: Kernels, bench: Bench
            ) -> Iterator[tuple[str, QuantizedWeight, Callable[[QuantizedWeight], Product], str]]:
    """Name, matrix, how it is prepared, and what is multiplied in, of each format that the device runs."""
    for quantization in (Quantization.fp8, Quantization.int4, Quantization.int8, Quantization.fp8_dynamic,
                         Quantization.int8_dynamic, Quantization.mxfp4, Quantization.nvfp4):
        scheme = SCHEMES[quantization]
        numbers = quantization.value.removesuffix("_dynamic") if scheme.rounds_inputs else "bfloat16"
        if numbers in bench.known_limits.flops_per_s:
            yield (quantization.value, scheme.quantize(weight),
                   partial(prepare, kernels=kernels, rounds_inputs=scheme.rounds_inputs), numbers)
    group = min(_GROUP, weight.shape[1])
    yield "int4 by groups", grouped_int4_linear.quantize(weight, group), kernels.grouped_int4, "bfloat16"  # type: ignore[misc]


def copies(bench: Bench, matrix: Tensor | QuantizedWeight, product: Callable[..., Product]) -> list[Product]:
    """Products with copies of a matrix that together are more than the cache."""
    return [product(cloned(matrix)) for _ in range(bench.num_copies(stored_bytes(matrix)))]


def cloned(matrix: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    if isinstance(matrix, Tensor):
        return matrix.clone()
    parts = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    return replace(matrix, **{name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)})


def stored_bytes(matrix: Tensor | QuantizedWeight) -> float:
    """Bytes that a kernel must read of a matrix: two codes of four bits share one."""
    match matrix:
        case Tensor():
            return matrix.nbytes
        case Int8Weight():
            return matrix.integers.nbytes + matrix.scales.nbytes
        case Fp8Weight():
            return matrix.numbers.nbytes + matrix.scales.nbytes
        case Int4Weight():
            return matrix.integers.nbytes / 2 + matrix.scales.nbytes + matrix.minima.nbytes
        case GroupedInt4Weight():
            return matrix.integers.nbytes / 2 + matrix.scales.nbytes + matrix.zeros.nbytes
        case Fp4Weight():
            return matrix.codes.nbytes / 2 + matrix.scales.nbytes


def small(bench: Bench) -> Iterator[Row]:
    """Norms, activation, rotation, block copies and sampling, at every batch: bound by bytes alone."""
    spec, kernels, device = SHAPES[bench.sizes.shape], bench.kernels(), bench.device
    for batch in (bench.sizes.batches[0], bench.sizes.batches[-1], bench.sizes.prefills[-1]):
        for operation in (*elementwise(spec, kernels, batch, device), *sampling(spec, kernels, batch, device, bench)):
            if bench.has_time:
                yield measured(bench, operation)


def elementwise(spec: ModelSpec, kernels: Kernels, rows: int, device: torch.device) -> Iterator[Operation]:
    x, weight = (torch.randn(*shape, device=device).to(_BF16) for shape in ((rows, spec.hidden_size),
                                                                            (spec.hidden_size,)))
    wide = torch.randn(rows, 2 * spec.intermediate_size, device=device).to(_BF16)
    size = f"{rows} rows"
    yield Operation("rms_norm", size, [partial(kernels.rms_norm, x, weight, 1e-5)], 2 * x.nbytes, 0,
                    peer=[partial(F.rms_norm, x, weight.shape, weight, 1e-5)])
    yield Operation("add_rms_norm", size, [partial(kernels.add_rms_norm, x, x, weight, 1e-5)], 4 * x.nbytes, 0)
    yield Operation("silu_and_mul", size, [partial(kernels.silu_and_mul, wide)], 1.5 * wide.nbytes, 0)
    heads = torch.randn(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, device=device).to(_BF16)
    q, k, v = heads.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    places = torch.arange(rows, device=device)
    table = torch.randn(rows, spec.head_dim, device=device)
    kv = cache_pair(spec, -(-rows // _BLOCK_SIZE), _BF16, device)
    yield Operation("rope_and_cache", size, [partial(kernels.rope_and_cache, q, k, v, table, places, *kv, places)],
                    2 * heads.nbytes + table.nbytes, 0)
    blocks = torch.arange(len(kv[0]), device=device)
    yield Operation("copy_blocks", f"{len(blocks)} blocks", [partial(kernels.copy_blocks, *kv, blocks, blocks)],
                    2 * kv[0].nbytes, 0)


def sampling(spec: ModelSpec, kernels: Kernels, rows: int, device: torch.device, bench: Bench) -> Iterator[Operation]:
    if rows > max(bench.sizes.batches):
        return
    logits = torch.randn(rows, spec.vocab_size, device=device)
    ones = torch.ones(rows, dtype=torch.float64, device=device)
    keys = torch.randint(0, 2**32, (rows, 2), device=device)
    most = torch.full((rows,), 50, device=device)
    size = f"{rows} rows of {spec.vocab_size}"
    yield Operation("argmax", size, [partial(kernels.argmax, logits)], logits.nbytes, 0,
                    peer=[partial(torch.argmax, logits, 1)])
    yield Operation("draw", size, [partial(kernels.draw, logits, ones, keys)], 2 * logits.nbytes, 0)
    yield Operation("truncate", size, [partial(kernels.truncate, logits, ones, most, 0.9 * ones, 0.1 * ones)],
                    2 * logits.nbytes, 0, peer=[partial(torch.sort, logits, 1)])
