"""The profile run: what the largest step takes of a device's memory, measured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from servekit.kernels import AttentionBatch
from servekit.model.decoder import Decoder
from servekit.model.footprint import logits_bytes
from servekit.runner.kv_tensors import allocate_kv

MeasurePeak = Callable[[Callable[[], object]], int]
"""Runs something; returns the most bytes that it held at one time beyond what was held before."""


def cuda_peak_bytes(run: Callable[[], object]) -> int:
    """A `MeasurePeak` by the counters of torch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def measure_activation_bytes(decoder: Decoder, max_step_tokens: int, max_num_seqs: int, block_size_tokens: int,
                             max_model_len: int, kv_dtype: torch.dtype, device: torch.device,
                             measure: MeasurePeak) -> int:
    """Bytes of temporary tensors in a step of prompts with `max_step_tokens` tokens and `max_num_seqs` logits.

    Prompts are as long as they can be: that makes the attention's partial results largest. What sampling takes is
    added, not run.
    """
    spec = decoder.spec
    lengths = [min(max_model_len, max_step_tokens - start) for start in range(0, max_step_tokens, max_model_len)]
    batch = _prompts(lengths, block_size_tokens, device)
    kv = allocate_kv(spec, int(batch.block_tables.max()) + 1, block_size_tokens, kv_dtype, device)
    token_ids = torch.zeros(max_step_tokens, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    rows = torch.arange(max_num_seqs, device=device) % max_step_tokens
    peak = measure(lambda: decoder.logits(decoder.forward(token_ids, positions, batch, kv)[rows]))
    return peak + logits_bytes(spec, max_num_seqs)


def _prompts(lengths: list[int], block_size_tokens: int, device: torch.device) -> AttentionBatch:
    """The batch of prompts that start at their first token, each in blocks of its own."""
    width = -(-max(lengths) // block_size_tokens)
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    tables = torch.arange(len(lengths) * width, dtype=torch.int32, device=device).view(-1, width)
    slots = torch.cat([torch.arange(length, device=device) + index * width * block_size_tokens
                       for index, length in enumerate(lengths)])
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device), block_tables=tables, slots=slots,
        max_query_tokens=max(lengths), max_context_tokens=max(lengths), query_start_host=tuple(starts),
        context_lens_host=tuple(lengths))
