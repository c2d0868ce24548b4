"""GGUF files made of transformers' models, as ggml's converter lays them out, and transformers' models made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Writer = gguf.GGUFWriter
_SUFFIXES = (".weight", ".bias")


def write_gguf(model: Any, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
               describe: Callable[[Writer], None] = lambda writer: None,
               extra: Mapping[str, np.ndarray] | None = None, leave_out: str = "") -> Path:
    """Write a model's matrices as `kind` and its vectors as F32, with what `describe` adds to the metadata."""
    config = model.config
    writer = Writer(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    describe(writer)
    for name, array in gguf_arrays(model).items():
        if name == leave_out:
            continue
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_arrays(model: Any) -> dict[str, np.ndarray]:
    """A model's weights under ggml's names and in ggml's order, float32."""
    names = gguf_names(model)
    arrays = {}
    for name, tensor in model.state_dict().items():
        if name in names:
            array = tensor.float().numpy()
            arrays[names[name]] = array[ggml_row_order(model, name)] if is_permuted(model, name) else array
    return arrays


def gguf_names(model: Any) -> dict[str, str]:
    """The ggml name of each of a model's weights; a tied head has none."""
    config = model.config
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(arch[config.model_type], config.num_hidden_layers)
    return {name: names.get_name(name, try_suffixes=_SUFFIXES) for name in model.state_dict()
            if not (config.tie_word_embeddings and name == "lm_head.weight")}


def is_permuted(model: Any, name: str) -> bool:
    return model.config.model_type == "llama" and name.rsplit(".", 1)[0].endswith(("q_proj", "k_proj"))


def ggml_row_order(model: Any, name: str) -> np.ndarray:
    """For each of ggml's rows, which of transformers' rows it is: a head's two halves are interleaved there."""
    head_dim = model.config.head_dim
    rows = len(model.state_dict()[name])
    return np.array([head * head_dim + row % 2 * (head_dim // 2) + row // 2
                     for head in range(rows // head_dim) for row in range(head_dim)])


def load_from_gguf(model: Any, path: Path) -> None:
    """Give a transformers' model the dequantised weights of a GGUF file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for name, ggml_name in gguf_names(model).items():
        tensor = tensors[ggml_name]
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        order = np.argsort(ggml_row_order(model, name)) if is_permuted(model, name) else slice(None)
        state[name] = torch.from_numpy(np.array(array[order]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
