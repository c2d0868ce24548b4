"""The same model in transformers, on the same device in the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from bench import Bench, Row

from servekit.model.shapes import SHAPES
from servekit.model.spec import ModelSpec

_STEPS = 16


def transformers(bench: Bench) -> Iterator[Row]:
    """Prefill and decode of a batch, step by step, with torch's SDPA and no graphs: what its generate() does."""
    if find_spec("transformers") is None:
        yield {"name": "transformers", "absent": "it is not installed: pip install transformers"}
        return
    model = random_model(SHAPES[bench.sizes.shape], bench.device)
    for batch in bench.sizes.peer_batches:
        for _ in range(2):  # The first run loads libraries and fills torch's memory pool.
            row = timed(model, bench, batch)
        yield row
        if not bench.has_time:
            return


def random_model(spec: ModelSpec, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=spec.max_position, rms_norm_eps=spec.rms_eps,
        attn_implementation="sdpa", tie_word_embeddings=spec.tied_head)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def timed(model: Any, bench: Bench, batch: int) -> Row:
    prompts = torch.randint(model.config.vocab_size, (batch, bench.sizes.context_tokens), device=bench.device)
    start = finished(bench.device)
    step = model(prompts, use_cache=True, logits_to_keep=1)
    prefilled = finished(bench.device)
    for _ in range(_STEPS):
        step = model(step.logits[:, -1:].argmax(dim=-1), past_key_values=step.past_key_values, use_cache=True)
    step_s = (finished(bench.device) - prefilled) / _STEPS
    return {"name": "transformers", "batch": batch, "step_ms": 1e3 * step_s, "tokens_per_s": batch / step_s,
            "prefill_ms": 1e3 * (prefilled - start)}


def finished(device: torch.device) -> float:
    """The time when all that was begun is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
