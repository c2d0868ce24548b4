"""The runner makes a plan's copies between device and host in the order that the scheduler counts on."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from servekit.core.plan import BlockCopy, Plan, StepResult
from servekit.kernels import copy_blocks, reference_kernels
from servekit.model.decoder import Decoder
from servekit.runner.kv_tensors import KVTensors, allocate_host_kv
from servekit.runner.queue import AtOnce
from servekit.runner.runner import Runner

LAYERS, BLOCKS, HOST_BLOCKS, SHAPE = 3, 4, 2, (2, 8, 5)


def random_kv() -> KVTensors:
    return tuple((torch.randn(BLOCKS, *SHAPE), torch.randn(BLOCKS, *SHAPE)) for _ in range(LAYERS))


def all_of(kv: KVTensors) -> Tensor:
    """[layers, 2, blocks, ...]: a copy of all keys and values."""
    return torch.stack([torch.stack(layer) for layer in kv])


def test_a_plan_of_copies_alone_is_done_out_first_then_in() -> None:
    kv = random_kv()
    host_kv = allocate_host_kv(kv, HOST_BLOCKS)
    runner = Runner(cast(Decoder, None), kv, host_kv, reference_kernels(), SHAPE[1], torch.device("cpu"), AtOnce())
    before = all_of(kv)
    saved = Plan(items=(), num_tokens=0, swap_out=(BlockCopy(3, 0), BlockCopy(1, 1)))
    assert runner.execute(saved) == StepResult({})
    assert torch.equal(all_of(host_kv), before[:, :, [3, 1]])
    # Device block 0 goes out before host block 0 comes in over it, and is what comes in from host block 1.
    runner.execute(Plan(items=(), num_tokens=0, swap_out=(BlockCopy(0, 1),),
                        swap_in=(BlockCopy(0, 0), BlockCopy(1, 2))))
    after = all_of(kv)
    assert torch.equal(after[:, :, 0], before[:, :, 3]) and torch.equal(after[:, :, 2], before[:, :, 0])
    assert torch.equal(after[:, :, [1, 3]], before[:, :, [1, 3]])


def test_host_blocks_are_like_the_devices() -> None:
    kv = tuple((keys.to(torch.bfloat16), values.to(torch.bfloat16)) for keys, values in random_kv())
    host_kv = allocate_host_kv(kv, HOST_BLOCKS)
    assert len(host_kv) == LAYERS
    assert all(cache.shape == (HOST_BLOCKS, *SHAPE) and cache.dtype is torch.bfloat16 and not cache.is_cuda
               for layer in host_kv for cache in layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_one_by_one_are_those_of_the_reference(dtype: torch.dtype) -> None:
    source = torch.randn(6, *SHAPE)
    together, single = torch.zeros(5, *SHAPE, dtype=dtype), torch.zeros(5, *SHAPE, dtype=dtype)
    blocks = torch.tensor([5, 0, 3]), torch.tensor([1, 4, 0])
    copy_blocks.reference(source, together, *blocks)
    copy_blocks.one_by_one(source, single, *blocks)
    assert torch.equal(together, single) and together.any()
