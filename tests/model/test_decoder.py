"""The decoder's logits are those of transformers, in float64, however a prompt is cut and its blocks lie."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_kv import PagedRun
from servekit.kernels import reference_kernels
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, SourceKind
from transformers_oracle import TINY, logits_of, save, tiny_model

BLOCK_SIZE = 16
EXACT = {"rtol": 1e-9, "atol": 1e-9}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head each": ("llama", {"num_key_value_heads": 6}),
    "llama, one key head for all": ("llama", {"num_key_value_heads": 1}),
    "llama, narrow heads": ("llama", {"head_dim": 4}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral, window of a block": ("mistral", {"sliding_window": BLOCK_SIZE}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the upper layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 5,
                                                    "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, window by layer": ("qwen3", {"use_sliding_window": True, "sliding_window": 9,
                                         "layer_types": ["sliding_attention", "full_attention",
                                                         "sliding_attention"]}),
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0},
    "yarn, every parameter": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                              "rope_theta": 5_000.0, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
                              "attention_factor": 1.3},
    "yarn, mscale": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
                     "mscale_all_dim": 0.4, "rope_theta": 10_000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_theta": 500.0},
}


def load(folder: Path, max_model_len: int) -> Decoder:
    local = LocalModel(SourceKind.folder, "tiny", folder)
    return load_decoder(local, load_spec(local), torch.float64, torch.device("cpu"), reference_kernels(),
                        max_model_len, lambda done, total: None)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TINY["vocab_size"]), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    model = tiny_model(name, **settings)
    decoder = load(save(model, tmp_path), 64)
    tokens = prompt(45)
    expected = logits_of(model, tokens)
    assert expected.abs().max() > 0.1
    for chunk in (45, 1, 15, 16, 17):
        actual = PagedRun(decoder, BLOCK_SIZE, 8, seed=chunk).in_chunks("a", tokens, chunk)
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_rope_scaling_is_that_of_transformers_at_long_positions(scaling: str, tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1, rope_parameters=SCALINGS[scaling])
    length = 250  # the dynamic scaling of transformers is that of the text's length; here it is that of the limit
    decoder = load(save(model, tmp_path), length)
    tokens = prompt(length)
    actual = PagedRun(decoder, BLOCK_SIZE, 16).in_chunks("a", tokens, 100)
    torch.testing.assert_close(actual, logits_of(model, tokens), **EXACT)


def test_dynamic_scaling_changes_nothing_up_to_the_trained_length(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters=SCALINGS["dynamic"])
    decoder = load(save(model, tmp_path), TINY["max_position_embeddings"])
    tokens = prompt(TINY["max_position_embeddings"])
    actual = PagedRun(decoder, BLOCK_SIZE, 8).in_chunks("a", tokens, 64)
    torch.testing.assert_close(actual, logits_of(model, tokens), **EXACT)


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen3"])
def test_prompts_and_decodes_in_one_batch_get_the_logits_they_get_alone(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    model = tiny_model(name, **settings)
    decoder = load(save(model, tmp_path), 64)
    prompts = {str(index): prompt(length, seed=index) for index, length in enumerate((1, 15, 16, 17, 33, 50))}
    run = PagedRun(decoder, BLOCK_SIZE, 24)
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    choose = random.Random(1)
    computed = dict.fromkeys(prompts, 0)
    while unfinished := [name for name, tokens in prompts.items() if computed[name] < len(tokens)]:
        names = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        chunks = {name: prompts[name][computed[name]:][:choose.choice((1, 1, 9, 16))] for name in names}
        for name, logits in run.step(chunks).items():
            got[name].append(logits)
            computed[name] += len(chunks[name])
    for name, tokens in prompts.items():
        torch.testing.assert_close(torch.cat(got[name]), logits_of(model, tokens), **EXACT)


def test_float64_is_float64_everywhere_and_logits_are_never_narrower_than_float32(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3"), tmp_path)
    local = LocalModel(SourceKind.folder, "tiny", folder)
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        decoder = load_decoder(local, load_spec(local), dtype, torch.device("cpu"), reference_kernels(), 64,
                               lambda done, total: None)
        assert decoder.weights.layers[0].attention_norm.dtype == dtype
        assert PagedRun(decoder, BLOCK_SIZE, 2).step({"a": [1, 2, 3]})["a"].dtype == wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_formats_stay_close_to_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama")
    local = LocalModel(SourceKind.folder, "tiny", save(model, tmp_path))
    decoder = load_decoder(local, load_spec(local), dtype, torch.device("cpu"), reference_kernels(), 64,
                           lambda done, total: None)
    tokens = prompt(40)
    expected = logits_of(model, tokens)
    error = (PagedRun(decoder, BLOCK_SIZE, 4).step({"a": tokens})["a"] - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-2)
