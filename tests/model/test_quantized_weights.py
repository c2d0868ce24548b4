"""Weights as integers: those of the file as they are, or rounded from its numbers; every other setting refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from paged_kv import PagedRun
from servekit.config.errors import ConfigError
from servekit.config.schema import Quantization
from servekit.kernels import Kernels, int4_linear, int8_linear, reference_kernels
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.decoder import Decoder, Linear
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, SourceKind
from tiny_gguf import Writer, gguf_arrays, load_from_gguf, write_gguf
from transformers_oracle import logits_of, save, tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}
FUSED = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
         "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
STORED = {Kind.Q4_0: Quantization.int4, Kind.Q4_1: Quantization.int4, Kind.Q8_0: Quantization.int8}


@dataclass(frozen=True)
class Kept:
    """A product that only shows what it was prepared from."""

    weight: Tensor | Int8Weight | Int4Weight

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is computed here")


KEEPING = replace(reference_kernels(), dense=Kept, int8=Kept, int4=Kept)


def load(files: Path, quantization: Quantization, kernels: Kernels = KEEPING,
         dtype: torch.dtype = torch.float32) -> Decoder:
    local = LocalModel(SourceKind.folder if files.is_dir() else SourceKind.gguf, "tiny", files)
    return load_decoder(local, load_spec(local), dtype, torch.device("cpu"), kernels, 64, lambda done, total: None,
                        quantization)


def kept(linear: Linear) -> Any:
    assert isinstance(linear.product, Kept)
    return linear.product.weight


def matrices(model: Any, layer: int, names: Sequence[str]) -> Tensor:
    """A transformers' model's matrices below one another, float32."""
    state = model.state_dict()
    return torch.cat([state[f"model.layers.{layer}.{name}.weight"].float() for name in names])


def head_of(model: Any) -> Tensor:
    head: Tensor = model.get_output_embeddings().weight.detach().float()
    return head


def assert_same_integers(actual: Int8Weight | Int4Weight, expected: Int8Weight | Int4Weight) -> None:
    assert type(actual) is type(expected)
    assert torch.equal(actual.integers, expected.integers) and torch.equal(actual.scales, expected.scales)
    if isinstance(actual, Int4Weight) and isinstance(expected, Int4Weight):
        assert torch.equal(actual.minima, expected.minima)


@pytest.mark.parametrize("kind", STORED, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_files_own_integers_stand_for_its_dequantised_values_exactly(family: str, kind: Kind,
                                                                         tmp_path: Path) -> None:
    """The rows of Llama's queries and keys, which ggml interleaves, included."""
    model = tiny_model(family, **SHAPE)
    path = write_gguf(model, tmp_path / "tiny.gguf", kind)
    load_from_gguf(model, path)
    decoder = load(path, STORED[kind])
    scheme, kept_type = (int4_linear, Int4Weight) if STORED[kind] is Quantization.int4 else (int8_linear, Int8Weight)
    for index, layer in enumerate(decoder.weights.layers):
        for part, names in FUSED.items():
            weight = kept(getattr(layer, part))
            assert isinstance(weight, kept_type) and weight.scales.shape[1] == weight.integers.shape[1] // 32
            assert torch.equal(scheme.dequantize(weight), matrices(model, index, names))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", STORED, ids=str)
def test_the_head_is_int8_as_stored_or_rounded_by_channel(kind: Kind, is_tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE, tie_word_embeddings=is_tied)
    path = write_gguf(model, tmp_path / "tiny.gguf", kind)
    load_from_gguf(model, path)
    head = kept(load(path, STORED[kind]).weights.head)
    if kind is Kind.Q8_0:
        assert torch.equal(int8_linear.dequantize(head), head_of(model))
    else:
        assert_same_integers(head, int8_linear.quantize(head_of(model)))


@pytest.mark.parametrize(("kind", "quantization"), [
    (Kind.F32, Quantization.int8), (Kind.F16, Quantization.int8), (Kind.Q4_1, Quantization.int8),
    (Kind.F32, Quantization.int4), (Kind.F16, Quantization.int4), (Kind.Q8_0, Quantization.int4),
], ids=str)
def test_what_the_file_does_not_hold_is_rounded_from_its_dequantised_values(kind: Kind, quantization: Quantization,
                                                                            tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE)
    path = write_gguf(model, tmp_path / "tiny.gguf", kind)
    load_from_gguf(model, path)
    rounded = int8_linear.quantize if quantization is Quantization.int8 else int4_linear.quantize
    for index, layer in enumerate(load(path, quantization).weights.layers):
        for part, names in FUSED.items():
            assert_same_integers(kept(getattr(layer, part)), rounded(matrices(model, index, names)))


def test_a_fused_matrix_of_which_one_part_is_stored_otherwise_is_rounded_as_a_whole(tmp_path: Path) -> None:
    """Files of Q4_1 may hold some tensors in Q8_0."""
    model = tiny_model("llama", **SHAPE)
    name = "blk.0.attn_v.weight"
    values = gguf.quantize(gguf_arrays(model)[name], Kind.Q8_0)

    def add(writer: Writer) -> None:
        writer.add_tensor(name, values, raw_dtype=Kind.Q8_0)

    path = write_gguf(model, tmp_path / "tiny.gguf", Kind.Q4_1, describe=add, leave_out=name)
    load_from_gguf(model, path)
    layers = load(path, Quantization.int4).weights.layers
    assert_same_integers(kept(layers[0].qkv), int4_linear.quantize(matrices(model, 0, FUSED["qkv"])))
    for weight, expected in ((layers[0].o, matrices(model, 0, FUSED["o"])),
                             (layers[1].qkv, matrices(model, 1, FUSED["qkv"]))):
        assert torch.equal(int4_linear.dequantize(kept(weight)), expected)


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.int4])
def test_safetensors_are_rounded_row_by_row(quantization: Quantization, tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE).float()
    weights = load(save(model, tmp_path), quantization).weights
    rounded = int8_linear.quantize if quantization is Quantization.int8 else int4_linear.quantize
    for index, layer in enumerate(weights.layers):
        for part, names in FUSED.items():
            assert_same_integers(kept(getattr(layer, part)), rounded(matrices(model, index, names)))
    assert_same_integers(kept(weights.head), int8_linear.quantize(head_of(model)))


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.int4])
def test_norms_biases_and_the_embedding_stay_numbers(quantization: Quantization, tmp_path: Path) -> None:
    model = tiny_model("qwen2", **SHAPE).float()
    weights, state = load(save(model, tmp_path), quantization).weights, model.state_dict()
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    bias = weights.layers[1].qkv.bias
    assert bias is not None
    assert torch.equal(bias, torch.cat([state[f"model.layers.1.{name}.bias"] for name in FUSED["qkv"]]))
    assert torch.equal(weights.layers[1].mlp_norm, state["model.layers.1.post_attention_layernorm.weight"])


def test_without_quantization_a_file_of_integers_is_dequantised(tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE)
    path = write_gguf(model, tmp_path / "tiny.gguf", Kind.Q4_1)
    load_from_gguf(model, path)
    weight = kept(load(path, Quantization.none).weights.layers[0].qkv)
    assert torch.equal(weight, matrices(model, 0, FUSED["qkv"]))


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_of_a_file_in_q8_0_are_those_of_transformers(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE, attention_bias=True, tie_word_embeddings=is_tied)
    path = write_gguf(model, tmp_path / "tiny.gguf", Kind.Q8_0)
    load_from_gguf(model, path)
    tokens = [5, 3, 98, 0, 41, 41, 7] * 3
    decoder = load(path, Quantization.int8, reference_kernels(), torch.float64)
    actual = PagedRun(decoder, 16, 4).in_chunks("a", tokens, 8)
    torch.testing.assert_close(actual, logits_of(model, tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("settings", "name", "columns"), [
    ({"hidden_size": 48}, "model.layers.0.self_attn.q_proj.weight", 48),
    ({"intermediate_size": 80}, "model.layers.0.mlp.down_proj.weight", 80),
])
def test_int4_of_columns_that_are_no_whole_groups_is_refused(settings: dict[str, int], name: str, columns: int,
                                                             tmp_path: Path) -> None:
    folder = save(tiny_model("llama", **SHAPE | settings).float(), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(folder, Quantization.int4)
    assert caught.value.key == "model.quantization" and caught.value.value == "int4"
    assert str(caught.value) == (f"model.quantization=int4: {name} has {columns} columns, not a multiple of 32; "
                                 "set model.quantization=int8")
    assert isinstance(kept(load(folder, Quantization.int8).weights.layers[0].qkv), Int8Weight)


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.int4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_progress_counts_to_the_bytes_of_the_file(quantization: Quantization, is_tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SHAPE, tie_word_embeddings=is_tied), tmp_path / "tiny.gguf", Kind.Q4_1)
    local = LocalModel(SourceKind.gguf, "tiny", path)
    calls: list[tuple[int, int]] = []
    load_decoder(local, load_spec(local), torch.float32, torch.device("cpu"), KEEPING, 64,
                 lambda done, total: calls.append((done, total)), quantization)
    stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert calls[0] == (0, stored) and calls[-1] == (stored, stored) and calls == sorted(calls)
    assert len(set(calls)) > 10
