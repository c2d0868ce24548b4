"""A tiny model in Hugging Face format with the oddities that real ones have."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

NUM_TOKENS, NUM_ROWS = 260, 300
"""Tokens of the tokenizer; rows of the embedding, which is padded."""
FIRST_END, SECOND_END = 256, 257
"""Ids of <|end|> and <|eot|>, the two end-of-sequence tokens."""
BROKEN = 258
"""A token whose embedding is not a number."""
HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER = 32, 2, 2, 16, 64


def write_tiny_folder(folder: Path, *, leave_out: str | None = None) -> Path:
    """Llama without BOS and without chat template, with an untied head and a generation_config.json of two EOS ids."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "vocab_size": NUM_ROWS, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": FIRST_END, "bos_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [FIRST_END, SECOND_END]}))
    save_file({name: value for name, value in _weights().items() if name != leave_out}, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(NUM_ROWS, HIDDEN), "lm_head.weight": random(NUM_ROWS, HIDDEN),
               "model.norm.weight": torch.ones(HIDDEN)}
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = random(INNER, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = random(HIDDEN, INNER)
        for name in ("input", "post_attention"):
            weights[f"{prefix}{name}_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def _tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, two end tokens, and two more that are plain text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={**vocabulary, "<|end|>": FIRST_END, "<|eot|>": SECOND_END,
                                                       "Ġbroken": BROKEN, "Ġlast": BROKEN + 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|eot|>"])
    return tokenizer
