"""The operations for processors: C++ behind torch operators, compiled when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.cpu.build import build_library
from servekit.kernels.cpu.huge_pages import HugePages
from servekit.kernels.dispatch import Kernels
from servekit.kernels.fused_layer import FusedLayer, KVLayer, LayerOperands
from servekit.kernels.int4_linear import GROUP_SIZE, Int4Weight
from servekit.kernels.int8_linear import Int8Weight

_TILE = 16
"""Output channels that the C++ code computes together."""
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
        fused_layer=_fused_layer,
        argmax=_argmax,
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
    """[tiles, groups, 16] float32 of eight-bit integers; empty for four bits, which carry theirs among them."""
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.servekit_cpu.linear.default(x, self.packed, self.scales, self.rows)
        return product


def _int8_product(pages: HugePages, weight: Int8Weight) -> _PackedProduct:
    """Activations are rounded to 14 bits, by row."""
    rows, columns = weight.integers.shape
    integers = F.pad(weight.integers, (0, 0, 0, -rows % _TILE))
    packed = integers.view(-1, _TILE, columns // 2, 2).permute(0, 2, 1, 3).reshape(len(integers) // _TILE, -1)
    scales = F.pad(weight.scales, (0, 0, 0, -rows % _TILE)).view(-1, _TILE, weight.scales.shape[1])
    return _PackedProduct(pages.place(packed), pages.place(scales.transpose(1, 2)), rows)


def _int4_product(pages: HugePages, weight: Int4Weight) -> _PackedProduct:
    """Activations are rounded to 8 bits, by groups of 32."""
    rows, columns = weight.integers.shape
    padding, num_groups = (0, 0, 0, -rows % _TILE), columns // GROUP_SIZE
    # Of a group's eight quads of columns, an even one and the odd one after it share their bytes.
    quads = F.pad(weight.integers, padding).view(-1, _TILE, num_groups, 4, 2, 4)
    integers = (quads[..., 0, :] | (quads[..., 1, :] << 4)).permute(0, 2, 3, 1, 4).flatten(2)
    scales, minima = (F.pad(values, padding).view(-1, _TILE, num_groups).transpose(1, 2).contiguous().view(torch.uint8)
                      for values in (weight.scales, weight.minima))
    return _PackedProduct(pages.place(torch.cat([integers, scales, minima], dim=-1)), torch.empty(0), rows)


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


def _draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    tokens: Tensor = torch.ops.servekit_cpu.draw.default(logits.float().contiguous(), temperatures, keys)
    return tokens
