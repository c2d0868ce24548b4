"""A decode graph over the Triton kernels, interpreted: rows that fill up the batch are harmless, and bounds suffice."""

from __future__ import annotations

import torch
from torch import Tensor

from core.helpers import make_spec
from engine.helpers import dummy_model
from paged_kv import empty_cache
from servekit.core.plan import Plan, PlanItem
from servekit.core.request import Request
from servekit.kernels import Kernels
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.runner.graphs import GraphInputs
from servekit.runner.inputs import SampledTokens, StepInputs, build_inputs
from triton_cases import KERNELS, REFERENCE

BLOCK, NUM_BLOCKS, MAX_MODEL_LEN = 16, 6, 48
LENGTHS = (17, 33)


def tiny_decoder(kernels: Kernels) -> Decoder:
    local = dummy_model()
    return load_decoder(local, load_spec(local), torch.float32, torch.device("cpu"), kernels, MAX_MODEL_LEN,
                        lambda *_: None)


def decodes() -> Plan:
    """A decode of each length; block 0, where empty rows of block tables point, is nobody's."""
    items, free = [], iter(range(1, NUM_BLOCKS))
    for length in LENGTHS:
        request = Request(make_spec("r", [token % 512 for token in range(length)]), MAX_MODEL_LEN)
        request.block_ids = [next(free) for _ in range(-(-length // BLOCK))]
        items.append(PlanItem(request, length - 1, 1, True))
    return Plan(tuple(items), len(items))


def test_rows_that_fill_up_a_graph_change_no_logit_and_no_block() -> None:
    inputs = build_inputs(decodes(), BLOCK, SampledTokens(()))
    graph = GraphInputs(3, MAX_MODEL_LEN, BLOCK, torch.device("cpu"))
    graph.fill(inputs, 3)
    (eager, eager_kv), (filled, filled_kv) = (logits_and_cache(kernels, given) for kernels, given in
                                              ((REFERENCE, inputs), (KERNELS, graph.of(3))))
    assert filled.shape == (3, 512) and filled.isfinite().all()
    torch.testing.assert_close(filled[:len(LENGTHS)], eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(filled_kv, eager_kv, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert filled_kv[:, :, 0].isnan().all(), "block 0 was written to"


def logits_and_cache(kernels: Kernels, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """The logits, and all of the cache after the step."""
    decoder = tiny_decoder(kernels)
    spec, generator = decoder.spec, torch.Generator().manual_seed(1)
    kv = tuple((empty_cache(NUM_BLOCKS, spec.num_kv_heads, BLOCK, spec.head_dim, torch.float32),
                empty_cache(NUM_BLOCKS, spec.num_kv_heads, BLOCK, spec.head_dim, torch.float32))
               for _ in range(spec.num_layers))
    for cache in (cache for layer in kv for cache in layer):
        cache[1:] = torch.randn(cache[1:].shape, generator=generator)
    hidden = decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, kv)
    return decoder.logits(hidden), torch.stack([torch.stack(layer) for layer in kv])
