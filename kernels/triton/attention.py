"""Attention over a paged KV cache in Triton, for decodes, prefill chunks and mixtures of both."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.fp8_kv import UNSCALED, KVScales
from servekit.kernels.triton import e4m3
from servekit.kernels.triton.attention_decode import attend_decodes, num_parts
from servekit.kernels.triton.attention_prefill import attend_prefills
from servekit.kernels.triton.device import Gpu

_NO_WINDOW = 1 << 30


class PagedAttention:
    """See `servekit.kernels.attention.reference`; a cache may also be in torch.float8_e4m3fn.

    Of a mixed step each kernel computes its kind of requests and leaves the others' rows alone: a chunk shares its keys
    among its queries, and a decode its context among the GPU's processors.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __call__(self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                 window: int | None, scales: KVScales = UNSCALED) -> Tensor:
        """[T, num_heads, head_dim]; `scales` are those of a cache in eight bits."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values = (e4m3.for_kernels(cache, self._gpu) for cache in (key_cache, value_cache))
        log2_scale = scale * math.log2(math.e)
        num_decodes = sum(end - start == 1 for start, end in pairwise(batch.query_start_host))
        if num_decodes:
            parts = num_parts(num_decodes, key_cache.shape[1], batch.max_context_tokens, self._gpu.num_processors)
            attend_decodes(q, keys, values, batch, out, log2_scale, window or _NO_WINDOW, scales, parts)
        if num_decodes < len(batch.context_lens):
            attend_prefills(q, keys, values, batch, out, log2_scale, window, scales)
        return out
