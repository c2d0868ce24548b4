"""A KV cache in eight-bit floats: e4m3 numbers that are multiplied by one scale for the keys and one for the values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.kernels import attention, rope_and_cache
from servekit.kernels.attention import AttentionBatch
from servekit.kernels.fp8_linear import to_e4m3


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the numbers in one layer's cache are multiplied by; above 0."""

    key: float
    value: float


UNSCALED = KVScales(1.0, 1.0)


def reference_rope_and_cache(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, key_cache: Tensor,
                             value_cache: Tensor, slots: Tensor, scales: KVScales) -> Tensor:
    """`rope_and_cache` into caches in torch.float8_e4m3fn: what is too large for the format becomes its largest."""
    wide_keys, wide_values = (torch.empty(cache.shape, dtype=k.dtype, device=k.device)
                              for cache in (key_cache, value_cache))
    rotated = rope_and_cache.reference(q, k, v, cos_sin, positions, wide_keys, wide_values, slots)
    block_size = key_cache.shape[2]
    places = slots // block_size, slice(None), slots % block_size
    for cache, wide, scale in ((key_cache, wide_keys, scales.key), (value_cache, wide_values, scales.value)):
        # Written as bytes: torch has no scattered writes of eight-bit floats on every device.
        cache.view(torch.uint8)[places] = to_e4m3(wide[places].float() * (1 / scale)).view(torch.uint8)
    return rotated


def reference_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                        window: int | None, scales: KVScales) -> Tensor:
    """`attention` over caches in torch.float8_e4m3fn."""
    keys, values = key_cache.to(q.dtype), value_cache.to(q.dtype)
    return attention.reference(q, keys, values, batch, scale * scales.key, window) * scales.value
