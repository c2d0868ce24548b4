"""The KV cache itself: the third layer below block accounting and prefix index, and the only one with tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.model.spec import ModelSpec

KVTensors = tuple[tuple[Tensor, Tensor], ...]
"""One (key cache, value cache) a layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""


def allocate_kv(spec: ModelSpec, num_blocks: int, block_size_tokens: int, dtype: torch.dtype,
                device: torch.device) -> KVTensors:
    """Allocate the cache of every layer. The content is undefined: a position is written before it is read."""
    shape = (num_blocks, spec.num_kv_heads, block_size_tokens, spec.head_dim)
    return tuple((torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
                 for _ in range(spec.num_layers))
