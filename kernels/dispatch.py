"""The one place where an implementation of the operations is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from servekit.kernels import (
    add_rms_norm,
    argmax,
    attention,
    copy_blocks,
    draw,
    fp4_linear,
    fp8_dynamic_linear,
    fp8_linear,
    fused_layer,
    grouped_int4_linear,
    int4_linear,
    int8_dynamic_linear,
    int8_linear,
    linear,
    rms_norm,
    rope_and_cache,
    silu_and_mul,
    truncate,
)
from servekit.kernels.attention import AttentionBatch
from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.fused_layer import FusedLayer, LayerOperands, Product
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the `reference` of its file documents arguments and results.

    A further implementation starts from `reference_kernels()` and replaces (`dataclasses.replace`) what it has.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rope_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float, int | None], Tensor]
    copy_blocks: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    dense: Callable[[Tensor], Product]
    """Prepares a weight matrix [out, in] in the activations' number format."""
    int8: Callable[[Int8Weight], Product]
    int8_dynamic: Callable[[Int8Weight], Product]
    int4: Callable[[Int4Weight], Product]
    grouped_int4: Callable[[GroupedInt4Weight], Product]
    fp8: Callable[[Fp8Weight], Product]
    fp8_dynamic: Callable[[Fp8Weight], Product]
    fp4: Callable[[Fp4Weight], Product]
    has_own_threads: Callable[[Product], bool]
    """Whether a product is computed by other threads than torch's."""
    fused_layer: Callable[[LayerOperands], FusedLayer | None]
    """One call for a layer with these operands; None if there is none for them."""
    argmax: Callable[[Tensor], tuple[Tensor, Tensor]]
    truncate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]


def reference_kernels() -> Kernels:
    """Every operation in plain torch: the oracle, on any device and in any number format."""
    return Kernels(
        name="reference",
        rms_norm=rms_norm.reference,
        add_rms_norm=add_rms_norm.reference,
        silu_and_mul=silu_and_mul.reference,
        rope_and_cache=rope_and_cache.reference,
        paged_attention=attention.reference,
        copy_blocks=copy_blocks.reference,
        dense=lambda weight: partial(linear.reference, weight=weight),
        int8=lambda weight: partial(int8_linear.reference, weight=weight),
        int8_dynamic=lambda weight: partial(int8_dynamic_linear.reference, weight=weight),
        int4=lambda weight: partial(int4_linear.reference, weight=weight),
        grouped_int4=lambda weight: partial(grouped_int4_linear.reference, weight=weight),
        fp8=lambda weight: partial(fp8_linear.reference, weight=weight),
        fp8_dynamic=lambda weight: partial(fp8_dynamic_linear.reference, weight=weight),
        fp4=lambda weight: partial(fp4_linear.reference, weight=weight),
        has_own_threads=lambda _: False,
        fused_layer=fused_layer.reference,
        argmax=argmax.reference,
        truncate=truncate.reference,
        draw=draw.reference,
    )
