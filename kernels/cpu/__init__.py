"""The operations for processors: C++ behind torch operators, compiled when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from servekit.kernels import int8_linear
from servekit.kernels.attention import AttentionBatch
from servekit.kernels.cpu.build import build_library
from servekit.kernels.cpu.huge_pages import HugePages
from servekit.kernels.dispatch import Kernels
from servekit.kernels.fused_layer import FusedLayer, KVLayer, LayerOperands, Product
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight, repacked
from servekit.kernels.int4_linear import GROUP_SIZE, Int4Weight
from servekit.kernels.int8_linear import Int8Weight

_INT4_TILE, _INT8_TILE = 16, 32
"""Output channels that the C++ code computes together."""
_MOST_COLUMNS = 192
"""That share a scale of eight-bit activations: more cost perplexity, fewer cost time."""
_NO_WINDOW = 1 << 40


def cpu_kernels(reference: Kernels, cache_dir: Path, threads: int, on_compile: Callable[[], None]) -> Kernels:
    """The reference kernels with every operation that has C++ code replaced by it.

    Args:
        reference: Where the other operations come from.
        cache_dir: Where the compiled library is kept.
        threads: Threads that the C++ operations of this process compute with.
        on_compile: Called before it is compiled, which takes some ten seconds.

    Raises NoCompilerError or CompilationError. The C++ operations take float32 activations; the KV cache may be
    float32 or bfloat16.
    """
    torch.ops.load_library(str(build_library(cache_dir, on_compile)))  # type: ignore[no-untyped-call]
    ops = torch.ops.servekit_cpu
    ops.set_threads.default(threads)
    pages = HugePages()
    return replace(
        reference,
        name="cpu",
        rms_norm=ops.rms_norm.default,
        add_rms_norm=ops.add_rms_norm.default,
        silu_and_mul=ops.silu_and_mul.default,
        rope_and_cache=ops.rope_and_cache.default,
        paged_attention=_paged_attention,
        int8=partial(_int8_product, pages),
        int4=partial(_int4_product, pages),
        grouped_int4=partial(_grouped_int4_product, pages),
        has_own_threads=_has_own_threads,
        fused_layer=_fused_layer,
        argmax=_argmax,
        truncate=_truncate,
        draw=_draw,
    )


def _paged_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                     window: int | None) -> Tensor:
    attended: Tensor = torch.ops.servekit_cpu.paged_attention.default(
        q, key_cache, value_cache, batch.query_start, batch.context_lens, batch.block_tables, scale,
        window or _NO_WINDOW)
    return attended


@dataclass(frozen=True, slots=True)
class _PackedProduct:
    """A matrix of integers in tiles of output channels."""

    packed: Tensor
    scales: Tensor
    """[tiles, groups, 32] float32 of eight-bit integers; empty for four bits, which carry theirs among them."""
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.servekit_cpu.linear.default(x, self.packed, self.scales, self.rows)
        return product


def _int8_product(pages: HugePages, weight: Int8Weight) -> Product:
    """Activations are rounded to 8 bits, by groups of at most 192 columns that share a scale of the weights.

    A weight with groups that are no multiple of four columns is multiplied by the reference.
    """
    rows, columns = weight.integers.shape
    group = _activation_group(columns // weight.scales.shape[1])
    if group is None:
        return partial(int8_linear.reference, weight=weight)
    padding = (0, 0, 0, -rows % _INT8_TILE)
    quads = (F.pad(weight.integers, padding).view(torch.uint8) ^ 128).view(-1, _INT8_TILE, columns // 4, 4)
    scales = weight.scales.repeat_interleave(columns // group // weight.scales.shape[1], dim=1)
    by_tile = F.pad(scales, padding).view(-1, _INT8_TILE, columns // group).transpose(1, 2)
    return _PackedProduct(pages.place(quads.transpose(1, 2).flatten(1)), pages.place(by_tile), rows)


def _activation_group(weight_group: int) -> int | None:
    """The largest part of a group of weights whose activations may share a scale; None: there is none."""
    return next((size for size in range(min(weight_group, _MOST_COLUMNS), 0, -1)
                 if size % 4 == 0 and weight_group % size == 0), None)


def _int4_product(pages: HugePages, weight: Int4Weight) -> _PackedProduct:
    """Activations are rounded to 8 bits, by groups of 32."""
    rows, columns = weight.integers.shape
    padding, num_groups = (0, 0, 0, -rows % _INT4_TILE), columns // GROUP_SIZE
    # Of a group's eight quads of columns, an even one and the odd one after it share their bytes.
    quads = F.pad(weight.integers, padding).view(-1, _INT4_TILE, num_groups, 4, 2, 4)
    integers = (quads[..., 0, :] | (quads[..., 1, :] << 4)).permute(0, 2, 3, 1, 4).flatten(2)
    halves = (F.pad(values, padding).view(-1, _INT4_TILE, num_groups).transpose(1, 2).contiguous()
              for values in (weight.scales, weight.minima))
    packed = torch.cat([integers, *(values.view(torch.uint8) for values in halves)], dim=-1)
    return _PackedProduct(pages.place(packed), torch.empty(0), rows)


def _grouped_int4_product(pages: HugePages, weight: GroupedInt4Weight) -> Product:
    """The checkpoint's own numbers, with four bits where these hold them exactly, else with eight."""
    same = repacked(weight)
    product = _int4_product(pages, same) if isinstance(same, Int4Weight) else _int8_product(pages, same)
    return product if weight.inputs is None else _Reordering(product, weight.inputs)


@dataclass(frozen=True, slots=True)
class _Reordering:
    """A product with a matrix whose columns stand in an order of their own."""

    product: Product
    inputs: Tensor
    """[in] int64: the columns of x in that order."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x[..., self.inputs])


def _has_own_threads(product: Product) -> bool:
    inner = product.product if isinstance(product, _Reordering) else product
    return isinstance(inner, _PackedProduct)


def _fused_layer(operands: LayerOperands) -> FusedLayer | None:
    """The whole layer in C++ if its matrices are integers: at one token, calls from Python cost more than norms."""
    products = [operands.qkv, operands.o, operands.gate_up, operands.down]
    packed = [product for product in products if isinstance(product, _PackedProduct)]
    if len(packed) < len(products):
        return None
    matrices = [tensor for product in packed for tensor in (product.packed, product.scales)]
    scale, window, intermediate = operands.head_dim ** -0.5, operands.window or _NO_WINDOW, packed[2].rows // 2
    run: Callable[..., tuple[Tensor, Tensor]] = torch.ops.servekit_cpu.layer.default

    def layer(normed: Tensor, residual: Tensor, cos_sin: Tensor, positions: Tensor, batch: AttentionBatch,
              kv: KVLayer) -> tuple[Tensor, Tensor]:
        return run(normed, residual, matrices, operands.mlp_norm, operands.next_norm, cos_sin, positions,
                   batch.slots, batch.query_start, batch.context_lens, batch.block_tables, kv[0], kv[1],
                   operands.num_heads, intermediate, scale, window, operands.rms_eps)

    return layer


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.ops.servekit_cpu.argmax.default(logits.float().contiguous())
    return values, indices


def _truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    left: Tensor = torch.ops.servekit_cpu.truncate.default(logits.float().contiguous(), temperatures, top_k, top_p,
                                                           min_p)
    return left


def _draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    tokens: Tensor = torch.ops.servekit_cpu.draw.default(logits.float().contiguous(), temperatures, keys)
    return tokens
