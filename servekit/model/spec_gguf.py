"""A model's spec from the header of a GGUF file (keys: ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from servekit.config.errors import ConfigError
from servekit.model.fields import Fields
from servekit.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from servekit.model.local import ModelFileError
from servekit.model.spec import (
    Family,
    FrequencyFactors,
    LinearScaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    yarn_magnitude,
)

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that divides the rotary frequencies: part of the spec, not of the weights."""

_FAMILIES: Mapping[str, Family] = {"llama": Family.llama, "qwen2": Family.qwen2, "qwen3": Family.qwen3}

_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change the mathematics in a way the decoder does not compute, with the values that leave it alone."""

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""End of sequence, of turn and of message: each ends a text."""


def read_gguf_spec(path: Path) -> ModelSpec:
    """Read a model's spec from a GGUF file.

    Raises ModelFileError for a malformed file or key, ConfigError for a model that cannot be computed.
    """
    header = read_gguf_header(path)
    general = Fields(header.metadata, path.name)
    architecture = general.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise ConfigError(f"{path.name}: general.architecture", architecture,
                          f"only {', '.join(_FAMILIES)} can be computed", "choose a model of one of these families")
    general.only("split.count", 0, 1)
    fields = Fields(header.metadata, path.name, f"{architecture}.")
    spec = _spec(_FAMILIES[architecture], general, fields, header, path)
    if unknown := fields.unasked():
        key = unknown[0].removeprefix(fields.prefix)
        raise fields.refusal(key, "the meaning of this key is not known, and it may change what the model computes")
    return spec


def _spec(family: Family, general: Fields, fields: Fields, header: GgufHeader, path: Path) -> ModelSpec:
    for key, neutral in _NEUTRAL_VALUES.items():
        fields.only(key, *neutral)
    num_layers, num_heads = fields.integer("block_count"), fields.integer("attention.head_count")
    max_position = fields.integer("context_length")
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    vocab_size = _vocab_size(header, path)
    fields.only("vocab_size", vocab_size)
    if fields.has("attention.sliding_window") and fields.integer("attention.sliding_window") < max_position:
        raise fields.refusal("attention.sliding_window", "GGUF files do not say which layers it holds for")
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=_head_dim(fields, num_heads),
        max_position=max_position,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=RopeSpec(fields.number("rope.freq_base", 10_000.0), _scaling(fields, header, path)),
        windows=(None,) * num_layers,
        tied_head="output.weight" not in header.tensors,
        qkv_bias=family is Family.qwen2 or "blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        qk_norm=family is Family.qwen3,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(token_id for key in _END_KEYS for token_id in general.token_ids(key))),
        checkpoint_dtype=_commonest_type(header),
    )


def _vocab_size(header: GgufHeader, path: Path) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{path}: tensor token_embd.weight is missing or no matrix; fetch the file again")
    return embedding.shape[1]


def _head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", fields.integer("embedding_length") // num_heads)
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    return head_dim


def _scaling(fields: Fields, header: GgufHeader, path: Path) -> RopeScaling | None:
    declared = _declared_scaling(fields)
    if ROPE_FACTORS not in header.tensors:
        return declared
    if declared is not None:
        raise fields.refusal("rope.scaling.type", f"cannot be computed together with the tensor {ROPE_FACTORS}")
    return _frequency_factors(header.tensors[ROPE_FACTORS], path)


def _declared_scaling(fields: Fields) -> RopeScaling | None:
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    factor = fields.number("rope.scaling.factor", 1.0)
    beta_fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    match fields.get("rope.scaling.type"):
        case "none":
            return None
        case None | "linear":  # a factor alone is linear
            return LinearScaling(factor) if factor != 1.0 else None
        case "yarn":
            return YarnScaling(factor, original, yarn_magnitude(factor), beta_fast, beta_slow)
        case _:
            raise fields.refusal("rope.scaling.type", "only none, linear and yarn can be computed")


def _frequency_factors(tensor: GgufTensor, path: Path) -> FrequencyFactors:
    count = math.prod(tensor.shape)
    if tensor.ggml_type != gguf.GGMLQuantizationType.F32:
        raise ModelFileError(f"{path}: tensor {ROPE_FACTORS} must be F32")
    factors = np.fromfile(path, dtype=np.float32, count=count, offset=tensor.offset_bytes)
    if len(factors) != count:
        raise ModelFileError(f"{path}: the file ends inside tensor {ROPE_FACTORS}; fetch it again")
    return FrequencyFactors(tuple(factors.tolist()))


def _commonest_type(header: GgufHeader) -> str:
    """The ggml type of most of the weights."""
    counts: Counter[int] = Counter()
    for tensor in header.tensors.values():
        counts[tensor.ggml_type] += math.prod(tensor.shape)
    most_common = counts.most_common(1)[0][0]
    return gguf_type_name(most_common)


def gguf_type_name(ggml_type: int) -> str:
    """Name of a ggml type, such as Q4_1; for a type the gguf package does not know, its number."""
    known = {int(member): str(member.name) for member in gguf.GGMLQuantizationType}
    return known.get(ggml_type, f"type {ggml_type}")
