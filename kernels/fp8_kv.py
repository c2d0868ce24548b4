"""A KV cache in eight-bit floats: e4m3 numbers that are multiplied by one scale for the keys and one for the values.

Engines keep it unscaled: the operations of a `Kernels` take a cache in e4m3 as one whose scales are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from servekit.kernels import attention, rope_and_cache
from servekit.kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the numbers in one layer's cache are multiplied by; above 0."""

    key: float
    value: float


UNSCALED = KVScales(1.0, 1.0)


def reference_rope_and_cache(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, key_cache: Tensor,
                             value_cache: Tensor, slots: Tensor, scales: KVScales) -> Tensor:
    """`rope_and_cache` into caches in torch.float8_e4m3fn: what is too large for the format becomes its largest."""
    rope_and_cache.write(key_cache, slots, rope_and_cache.rotate(k, cos_sin, positions).float() * (1 / scales.key))
    rope_and_cache.write(value_cache, slots, v.float() * (1 / scales.value))
    return rope_and_cache.rotate(q, cos_sin, positions)


def reference_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                        window: int | None, scales: KVScales) -> Tensor:
    """`attention` over caches in torch.float8_e4m3fn."""
    return attention.reference(q, key_cache, value_cache, batch, scale * scales.key, window) * scales.value
