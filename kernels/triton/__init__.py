"""The operations for NVIDIA GPUs, in Triton; each file's namesake in `servekit.kernels` says what it computes."""

from __future__ import annotations

from dataclasses import replace

from servekit.kernels.dispatch import Kernels
from servekit.kernels.triton.add_rms_norm import add_rms_norm
from servekit.kernels.triton.argmax import argmax
from servekit.kernels.triton.attention import PagedAttention
from servekit.kernels.triton.copy_blocks import copy_blocks
from servekit.kernels.triton.device import Gpu, find_gpu
from servekit.kernels.triton.draw import draw
from servekit.kernels.triton.fp4_linear import Fp4Product
from servekit.kernels.triton.fp8_linear import Fp8DynamicProduct, Fp8Product
from servekit.kernels.triton.int4_linear import Int4Product
from servekit.kernels.triton.int8_linear import Int8DynamicProduct, Int8Product
from servekit.kernels.triton.rms_norm import rms_norm
from servekit.kernels.triton.rope_and_cache import rope_and_cache
from servekit.kernels.triton.silu_and_mul import silu_and_mul
from servekit.kernels.triton.truncate import truncate

__all__ = ["Gpu", "find_gpu", "triton_kernels"]


def triton_kernels(reference: Kernels, gpu: Gpu) -> Kernels:
    """The reference kernels with every operation that has a Triton kernel replaced by it.

    They take float16, bfloat16 and float32; products with a matrix of plain numbers stay with torch, that is cuBLAS.
    """
    return replace(
        reference,
        name="triton",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        rope_and_cache=rope_and_cache,
        paged_attention=PagedAttention(gpu),
        copy_blocks=copy_blocks,
        int8=lambda weight: Int8Product(weight, gpu),
        int8_dynamic=lambda weight: Int8DynamicProduct(weight, gpu),
        int4=lambda weight: Int4Product(weight, gpu),
        grouped_int4=lambda weight: Int4Product(weight, gpu),
        fp8=lambda weight: Fp8Product(weight, gpu),
        fp8_dynamic=lambda weight: Fp8DynamicProduct(weight, gpu),
        fp4=lambda weight: Fp4Product(weight, gpu),
        argmax=argmax,
        truncate=truncate,
        draw=draw,
    )
