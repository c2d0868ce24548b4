"""Tiny random models of Hugging Face transformers, computed in float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TINY = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Makes every float32 that transformers asks for, by name or by default, a float64.

    It computes norms and rotary angles in float32 even for float64 weights, which would hide errors of 1e-6, and
    of 1e-3 at long positions.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def tiny_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A model with random weights, norms and biases included."""
    config_class, model_class = _CLASSES[family]
    config = config_class(**(TINY | settings))
    with float64_throughout():
        model = model_class(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if name.endswith("norm.weight") else 0.0
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(center + 0.3 * noise)
    return model


@torch.inference_mode()
def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """[n, vocab] float64."""
    with float64_throughout():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    assert logits.dtype == torch.float64
    return logits


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save config and weights as transformers does."""
    model.save_pretrained(folder, **options)
    return folder
