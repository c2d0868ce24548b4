"""GGUF: the dequantised model is the one transformers computes, and a faulty file is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv import PagedRun
from servekit.config.errors import ConfigError
from servekit.kernels import reference_kernels
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.spec import ModelSpec
from tiny_gguf import Writer, gguf_arrays, load_from_gguf, write_gguf
from transformers_oracle import logits_of, tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}
TOKENS = random.Random(0).choices(range(99), k=40)


def spec_of(path: Path) -> ModelSpec:
    return load_spec(LocalModel(SourceKind.gguf, "tiny", path))


def load(path: Path, dtype: torch.dtype = torch.float64, max_model_len: int = 64) -> Decoder:
    local = LocalModel(SourceKind.gguf, "tiny", path)
    return load_decoder(local, load_spec(local), dtype, torch.device("cpu"), reference_kernels(),
                        max_model_len, lambda done, total: None)


def assert_same_logits(path: Path, model: Any, tolerance: float, tokens: list[int] = TOKENS) -> None:
    load_from_gguf(model, path)
    actual = PagedRun(load(path, max_model_len=len(tokens)), 16, 20).in_chunks("a", tokens, 17)
    torch.testing.assert_close(actual, logits_of(model, tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers_with_the_dequantised_weights(family: str, kind: Kind,
                                                                       tmp_path: Path) -> None:
    model = tiny_model(family, **SHAPE, tie_word_embeddings=family == "qwen3", attention_bias=family == "llama")
    path = write_gguf(model, tmp_path / "tiny.gguf", kind)
    original = logits_of(model, TOKENS)
    assert spec_of(path).checkpoint_dtype == kind.name
    assert_same_logits(path, model, 1e-6)  # the file holds rms_norm_eps and rope_theta in float32
    error = (logits_of(model, TOKENS) - original).norm() / original.norm()
    assert error < 0.7, "the file must still hold the model it was made of"


@pytest.mark.parametrize(("kind", "scale_at"), [(Kind.Q2_K, (80, 82)), (Kind.Q3_K, (108,)), (Kind.Q4_K, (0, 2)),
                                                (Kind.Q5_K, (0, 2)), (Kind.Q6_K, (208,))], ids=str)
def test_k_quants_of_random_bits(kind: Kind, scale_at: tuple[int, ...], tmp_path: Path) -> None:
    """Blocks of random bits, but for their scales, stand for every value that a K-quant can hold."""
    model = tiny_model("llama", **SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1},
                       tie_word_embeddings=True)
    bits = np.random.default_rng(0)
    writer_tensors = gguf_arrays(model)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, Kind.F32, leave_out="blk.0.ffn_down.weight")
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = writer_tensors["blk.0.ffn_down.weight"].shape
    blocks = bits.integers(0, 256, (rows, columns // block_elements, block_bytes), dtype=np.uint8)
    for offset in scale_at:
        blocks[:, :, offset:offset + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)

    def add(writer: Writer) -> None:
        writer.add_tensor("blk.0.ffn_down.weight", blocks.reshape(rows, -1), raw_dtype=kind)

    write_gguf(model, path, Kind.F32, describe=add, leave_out="blk.0.ffn_down.weight")
    assert_same_logits(path, model, 1e-6)


def test_llama3_scaling_comes_from_the_frequency_factors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_theta": 500.0}
    model = tiny_model("llama", **SHAPE, rope_parameters=scaling)
    plain = 500.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == 8 and factors.min() == 1
    path = write_gguf(model, tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors})
    assert_same_logits(path, model, 1e-4, tokens=random.Random(1).choices(range(99), k=250))


@pytest.mark.parametrize("is_named", [True, False])
def test_linear_scaling_comes_from_the_metadata(is_named: bool, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    model = tiny_model("qwen2", **SHAPE, rope_parameters=scaling)

    def describe(writer: Writer) -> None:
        if is_named:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert_same_logits(write_gguf(model, tmp_path / "tiny.gguf", describe=describe), model, 1e-6)


def test_yarn_scaling_comes_from_the_metadata(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    model = tiny_model("qwen3", **SHAPE, rope_parameters=scaling)

    def describe(writer: Writer) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    path = write_gguf(model, tmp_path / "tiny.gguf", describe=describe)
    assert spec_of(path).max_context_tokens == 128
    assert_same_logits(path, model, 1e-6)


def test_facts_of_the_header(tmp_path: Path) -> None:
    def describe(writer: Writer) -> None:
        writer.add_eot_token_id(7)
        writer.add_vocab_size(99)

    spec = spec_of(write_gguf(tiny_model("llama", **SHAPE, tie_word_embeddings=True), tmp_path / "tiny.gguf",
                              describe=describe))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.head_dim) == (99, 64, 2, 16)
    assert spec.tied_head and spec.bos_token_id == 1 and spec.eos_token_ids == (2, 7)
    assert spec.rms_eps == pytest.approx(1e-5)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight", "blk.0.attn_q.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf", leave_out=name)
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing"):
        load(path)


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf", leave_out="token_embd.weight")
    with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
        spec_of(path)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(ModelFileError, match=r"tensor blk.0.attn_sinks.weight is unexpected"):
        load(path)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf", leave_out="blk.0.attn_k.weight",
                      extra={"blk.0.attn_k.weight": np.zeros((30, 64), np.float32)})
    with pytest.raises(ModelFileError, match=r"blk.0.attn_k.weight has the shape \[30, 64\].*\[32, 64\]"):
        load(path)


def test_a_truncated_file_names_the_first_tensor_it_ends_in(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:len(content) // 2])
    with pytest.raises(ModelFileError, match=r"tiny.gguf: the file ends inside tensor \S+; fetch it again"):
        load(path)
    path.write_bytes(content[:1000])
    with pytest.raises(ModelFileError, match=r"tiny.gguf"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"tiny.gguf"):
        spec_of(path)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    kind = Kind.Q8_1
    model = tiny_model("llama", **SHAPE)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.zeros((96, 64 // block_elements * block_bytes), np.uint8)
    path = write_gguf(model, tmp_path / "tiny.gguf", leave_out="blk.0.ffn_up.weight",
                      describe=lambda writer: writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind))
    with pytest.raises(ModelFileError, match=r"blk.0.ffn_up.weight.*Q8_1"):
        load(path)


@pytest.mark.parametrize(("key", "value"), [
    ("llama.expert_count", 8), ("llama.attention.value_length", 8), ("llama.rope.dimension_count", 8),
    ("llama.attention.sliding_window", 32), ("llama.logit_scale", 2), ("llama.attention.head_count_kv", 3),
    ("split.count", 2), ("llama.vocab_size", 98),
])
def test_what_cannot_be_computed_is_refused_by_name(key: str, value: int, tmp_path: Path) -> None:
    def describe(writer: Writer) -> None:
        for data in writer.kv_data:
            data.pop(key, None)
        writer.add_uint32(key, value)

    path = write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf", describe=describe)
    with pytest.raises(ConfigError) as caught:
        spec_of(path)
    expected = "num_key_value_heads" if key.endswith("head_count_kv") else key
    assert expected in caught.value.key and caught.value.value == value
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = Writer(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general.architecture=gemma2: only llama, qwen2, qwen3"):
        spec_of(path)


def test_progress_counts_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    local = LocalModel(SourceKind.gguf, "tiny", write_gguf(tiny_model("llama", **SHAPE), tmp_path / "tiny.gguf"))
    spec = load_spec(local)
    calls: list[tuple[int, int]] = []
    load_decoder(local, spec, torch.float32, torch.device("cpu"), reference_kernels(), 64,
                 lambda done, total: calls.append((done, total)))
    total = 4 * spec.num_parameters
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_the_default_model_is_that_of_transformers(default_model_path: Path) -> None:
    """Logits of a prompt in float32, then greedy tokens one by one."""
    decoder = load(default_model_path, torch.float32, 256)
    spec = decoder.spec
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position, rms_norm_eps=spec.rms_eps, tie_word_embeddings=spec.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta})).eval()
    load_from_gguf(model, default_model_path)
    tokens = random.Random(0).choices(range(100, 20_000), k=100)
    run = PagedRun(decoder, 16, 12)
    logits = run.in_chunks("a", tokens, 64)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor([tokens])).logits[0], rtol=1e-3, atol=2e-3)
    expected = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None,
                              pad_token_id=0)[0, len(tokens):].tolist()
    greedy: list[int] = []
    while len(greedy) < len(expected):
        greedy.append(int(logits[-1].argmax()))
        logits = run.step({"a": greedy[-1:]})["a"]
    assert greedy == expected and len(greedy) == 20
