"""Weights from a GGUF file, dequantised."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from servekit.kernels import int4_linear
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.gguf_header import GgufTensor, read_gguf_header
from servekit.model.local import ModelFileError
from servekit.model.spec import Family, ModelSpec
from servekit.model.spec_gguf import ROPE_FACTORS, gguf_type_name
from servekit.model.weights import StoredTensor

_MODEL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufTensors:
    """The tensors of one GGUF file under their Hugging Face names."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises ModelFileError if the file is malformed, ends inside a tensor, or has a type that cannot be read."""
        self._path = path
        self._spec = spec
        self._by_name = {_huggingface_name(tensor.name): tensor
                         for tensor in read_gguf_header(path).tensors.values()
                         if tensor.name != ROPE_FACTORS and not tensor.name.endswith("attn_rot_embd.weight")}
        size_bytes = path.stat().st_size
        for tensor in self._by_name.values():
            if tensor.offset_bytes + self._num_bytes(tensor) > size_bytes:
                raise ModelFileError(f"{path}: the file ends inside tensor {tensor.name}; fetch it again")

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {name: StoredTensor(tensor.shape[::-1], self._num_bytes(tensor))
                for name, tensor in self._by_name.items()}

    def describe(self, name: str) -> str:
        return f"{self._path}: tensor {_gguf_name(name)}"

    def read(self, name: str) -> Tensor:
        tensor = self._by_name[name]
        raw = np.fromfile(self._path, dtype=np.uint8, count=self._num_bytes(tensor), offset=tensor.offset_bytes)
        try:
            weights = torch.from_numpy(_dequantize(raw, tensor))
        except NotImplementedError as error:
            raise ModelFileError(f"{self.describe(name)} has the type {gguf_type_name(tensor.ggml_type)}, which cannot "
                                 "be dequantised; choose a file of F32, F16, BF16, Q8_0, Q4_0, Q4_1 or K-quants"
                                 ) from error
        return self._rotated_halves(name, weights)

    def read_stored(self, name: str) -> Int8Weight | Int4Weight | None:
        tensor = self._by_name[name]
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        if kind not in _BLOCK_READERS:
            return None
        raw = np.fromfile(self._path, dtype=np.uint8, count=self._num_bytes(tensor), offset=tensor.offset_bytes)
        columns, rows = tensor.shape
        blocks = torch.from_numpy(raw).view(rows, columns // int4_linear.GROUP_SIZE, -1)
        return _BLOCK_READERS[kind](self._rotated_halves(name, blocks))

    def _num_bytes(self, tensor: GgufTensor) -> int:
        if tensor.ggml_type not in gguf.GGML_QUANT_SIZES:
            raise ModelFileError(f"{self._path}: tensor {tensor.name} has the unknown "
                                 f"{gguf_type_name(tensor.ggml_type)}")
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]
        return math.prod(tensor.shape) // block_elements * block_bytes

    def _rotated_halves(self, name: str, weights: Tensor) -> Tensor:
        """Undo the row order that ggml wants of Llama's queries and keys.

        There, dimension 2i is rotated together with 2i + 1; here, i together with i + head_dim / 2.
        """
        if self._spec.family is not Family.llama or not re.search(r"\.[qk]_proj\.", name):
            return weights
        pairs = weights.view(-1, self._spec.head_dim // 2, 2, *weights.shape[1:])
        return pairs.transpose(1, 2).reshape(weights.shape)


def _dequantize(raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """The numbers that `raw` stands for, in torch's shape. Raises NotImplementedError for a type without a formula."""
    kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    shape = tensor.shape[::-1]
    if kind is gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(shape)
    if kind is gguf.GGMLQuantizationType.F16:
        return raw.view(np.float16).reshape(shape)
    return np.asarray(gguf.dequantize(raw.reshape(*shape[:-1], -1), kind)).reshape(shape)


def _q8_0(blocks: Tensor) -> Int8Weight:
    """[rows, groups, 34]: a half float, then 32 integers."""
    return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0).float())


def _q4_0(blocks: Tensor) -> Int4Weight:
    """[rows, groups, 18]: a half float, then 32 integers that stand for themselves less 8."""
    scales = _half(blocks, 0)
    return Int4Weight(_nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: Tensor) -> Int4Weight:
    """[rows, groups, 20]: scale and minimum as half floats, then 32 integers."""
    return Int4Weight(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _half(blocks: Tensor, offset_bytes: int) -> Tensor:
    return blocks[..., offset_bytes:offset_bytes + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """[rows, groups, 16] to [rows, groups * 32]: the low halves of a group's bytes come first."""
    rows, groups, half = packed.shape
    integers = torch.empty(rows, groups, 2, half, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=integers[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=integers[:, :, 1])
    return integers.view(rows, -1)


_BLOCK_READERS: Mapping[gguf.GGMLQuantizationType, Callable[[Tensor], Int8Weight | Int4Weight]] = {
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
}


def _huggingface_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known stays as it is."""
    if match := _LAYER_TENSOR.fullmatch(name):
        index, part, kind = match.groups()
        return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_MODEL_NAMES[part]}.{kind}" if part in _MODEL_NAMES else name


def _gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor; a name that is not known stays as it is."""
    part, _, kind = name.rpartition(".")
    for ours, theirs in _MODEL_NAMES.items():
        if part == theirs:
            return f"{ours}.{kind}"
    for ours, theirs in _LAYER_NAMES.items():
        if part.startswith("model.layers.") and part.endswith(f".{theirs}"):
            return f"blk.{part.split('.')[2]}.{ours}.{kind}"
    return name
