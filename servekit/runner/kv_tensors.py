"""The KV cache itself: the third layer below block accounting and prefix index, and the only one with tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.kernels.cpu import huge_pages
from servekit.model.spec import ModelSpec

KVTensors = tuple[tuple[Tensor, Tensor], ...]
"""One (key cache, value cache) a layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""


def allocate_kv(spec: ModelSpec, num_blocks: int, block_size_tokens: int, dtype: torch.dtype,
                device: torch.device) -> KVTensors:
    """Allocate the cache of every layer. The content is undefined: a position is written before it is read.

    In torch.float8_e4m3fn it has no scales: the numbers are the keys and values themselves, rounded.
    """
    shape = (num_blocks, spec.num_kv_heads, block_size_tokens, spec.head_dim)
    return tuple((_empty(shape, dtype, device), _empty(shape, dtype, device)) for _ in range(spec.num_layers))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return huge_pages.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


def allocate_host_kv(kv: KVTensors, num_blocks: int) -> KVTensors:
    """Allocate blocks like those of a cache in the host's memory, where swapped requests wait.

    Beside a GPU's cache the memory is pinned, so that the GPU copies without the host's help.
    """
    def on_host(cache: Tensor) -> Tensor:
        return torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda)

    return tuple((on_host(keys), on_host(values)) for keys, values in kv)
