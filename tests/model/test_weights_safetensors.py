"""Safetensors folders: whole or sharded, and every way in which one can be faulty."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged_kv import PagedRun
from servekit.kernels import reference_kernels
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from transformers_oracle import logits_of, save, tiny_model

TOKENS = [5, 3, 98, 0, 41, 41, 7]


def load(folder: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    local = LocalModel(SourceKind.folder, "tiny", folder)
    return load_decoder(local, load_spec(local), dtype, torch.device("cpu"), reference_kernels(), 64,
                        lambda done, total: None)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of a folder's single file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    actual = PagedRun(load(tmp_path), 16, 2).step({"a": TOKENS})["a"]
    torch.testing.assert_close(actual, logits_of(model, TOKENS), rtol=1e-9, atol=1e-9)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelFileError, match=f"{lost.name}: is missing"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_malformed_index_is_named(content: str, tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match=r"\.\./elsewhere\.safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight",
                                  "model.layers.0.self_attn.k_proj.bias"])
def test_a_missing_tensor_is_named_and_never_made_up(name: str, tmp_path: Path) -> None:
    save(tiny_model("llama", attention_bias=True), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing"):
        load(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is unexpected"):
        load(tmp_path)


def test_rotary_tables_are_no_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(model, tmp_path)
    edit(tmp_path, lambda tensors: tensors.update(
        {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for index in range(3)}))
    actual = PagedRun(load(tmp_path), 16, 2).step({"a": TOKENS})["a"]
    torch.testing.assert_close(actual, logits_of(model, TOKENS), rtol=1e-9, atol=1e-9)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight has the shape \[47\].*\[48\]"):
        load(tmp_path)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save(model, tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    decoder = load(tmp_path)
    hidden = torch.randn(3, decoder.spec.hidden_size, dtype=torch.float64)
    assert torch.equal(decoder.weights.head(hidden), hidden @ decoder.weights.embedding.T)
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelFileError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(kept: int, tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: not a complete safetensors file"):
        load(tmp_path)


def test_a_type_that_is_no_float_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight has the type I8"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_stored_format_is_converted(stored: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("mistral")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(stored)
    save(model, tmp_path)
    assert load_spec(LocalModel(SourceKind.folder, "tiny", tmp_path)).checkpoint_dtype == str(stored)[6:]
    actual = PagedRun(load(tmp_path), 16, 2).step({"a": TOKENS})["a"]
    torch.testing.assert_close(actual, logits_of(model.double(), TOKENS), rtol=1e-9, atol=1e-9)


def test_progress_counts_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    local = LocalModel(SourceKind.folder, "tiny", save(tiny_model("llama").bfloat16(), tmp_path))
    spec = load_spec(local)
    calls: list[tuple[int, int]] = []
    load_decoder(local, spec, torch.float32, torch.device("cpu"), reference_kernels(), 64,
                 lambda done, total: calls.append((done, total)))
    total = 2 * spec.num_parameters
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert calls == sorted(calls)
