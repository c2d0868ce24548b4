"""A model's spec from the config.json and generation_config.json of a folder in Hugging Face format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from servekit.config.errors import ConfigError
from servekit.model.fields import Fields
from servekit.model.local import ModelFileError
from servekit.model.quantization_config import read_stored_quantization
from servekit.model.spec import (
    DynamicScaling,
    Family,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    yarn_magnitude,
)

_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None,),
    "llama_4_scaling": (None,),
    "alibi": (None, False),
}
"""Keys that change the mathematics in a way the decoder does not compute, with the values that leave it alone."""

_HARMLESS_KEYS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "_attn_implementation",
    "auto_map", "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "is_llama_config", "label2id",
    "max_window_layers", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "sep_token_id", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_cache",
})
"""Keys without a say in what the model computes."""

_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate", "finetuned"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
"""The scalings that can be computed, and the parameters of each."""

_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_log = logging.getLogger(__name__)


def read_huggingface_spec(folder: Path) -> ModelSpec:
    """Read a model's spec from its folder.

    Raises ModelFileError for a missing or malformed file or key, ConfigError for a model that cannot be computed.
    """
    generation = folder / "generation_config.json"
    return spec_from_config(_read_json(folder / "config.json"), _read_json(generation) if generation.exists() else {})


def read_config_spec(path: Path) -> ModelSpec:
    """Read a model's shape from a config.json alone. Raises as `read_huggingface_spec`."""
    spec = spec_from_config(_read_json(path), {})
    if spec.stored_quantization is not None:
        raise ConfigError(f"{path}: quantization_config", spec.stored_quantization.method,
                          "a shape has no stored weights", "remove it, and choose the precision in the settings")
    return spec


def spec_from_config(config: Mapping[str, object], generation: Mapping[str, object]) -> ModelSpec:
    """Translate the contents of config.json and generation_config.json. Raises as `read_huggingface_spec`."""
    fields = Fields(config, "config.json")
    family = _family(fields)
    for key, neutral in _NEUTRAL_VALUES.items():
        fields.only(key, *neutral)
    has_attention_bias = family in (Family.llama, Family.qwen3) and fields.flag("attention_bias", False)
    spec = ModelSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=_num_kv_heads(fields, family),
        head_dim=_head_dim(fields, family),
        max_position=fields.integer("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        windows=_windows(fields, family),
        tied_head=fields.flag("tie_word_embeddings", False),
        qkv_bias=family is Family.qwen2 or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=family is Family.llama and fields.flag("mlp_bias", False),
        qk_norm=family is Family.qwen3,
        bos_token_id=_bos_token_id(fields, family),
        eos_token_ids=_eos_token_ids(fields, family, Fields(generation, "generation_config.json")),
        stored_quantization=read_stored_quantization(fields),
        checkpoint_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        generation_defaults=_generation_defaults(generation),
    )
    unknown = [key for key in fields.unasked() if key not in _HARMLESS_KEYS]
    if unknown:
        _log.warning("config.json: unknown keys have no effect: %s", ", ".join(unknown))
    return spec


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}); check that the model is complete") from error
    except ValueError as error:
        raise ModelFileError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: must hold a JSON object")
    return content


def _family(fields: Fields) -> Family:
    names = fields.get("architectures")
    known = {family.value: family for family in Family}
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ConfigError("config.json: architectures", names, f"only {', '.join(known)} can be computed",
                          "choose a model of one of these families")
    return known[names[0]]


# Keys that transformers does not write have the defaults of its four configuration classes.


def _num_kv_heads(fields: Fields, family: Family) -> int:
    default = {Family.llama: fields.integer("num_attention_heads"), Family.mistral: 8}
    return fields.integer("num_key_value_heads", default.get(family, 32))


def _head_dim(fields: Fields, family: Family) -> int:
    if fields.get("head_dim") is not None or family is Family.qwen3:
        return fields.integer("head_dim", 128)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads != 0:
        raise fields.refusal("hidden_size", f"must be a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def _bos_token_id(fields: Fields, family: Family) -> int | None:
    if not fields.has("bos_token_id"):
        return 1 if family in (Family.llama, Family.mistral) else None
    ids = fields.token_ids("bos_token_id")
    return ids[0] if ids else None


def _eos_token_ids(fields: Fields, family: Family, generation: Fields) -> tuple[int, ...]:
    """Every end-of-sequence id that either file names."""
    has_default = family in (Family.llama, Family.mistral) and not fields.has("eos_token_id")
    ids = (2,) if has_default else fields.token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids + generation.token_ids("eos_token_id")))


def _generation_defaults(generation: Mapping[str, object]) -> dict[str, float | int | bool]:
    return {key: value for key in _SAMPLING_KEYS if isinstance(value := generation.get(key), int | float)}


def _windows(fields: Fields, family: Family) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    match family:
        case Family.llama:
            fields.only("sliding_window", None)
            fields.only("layer_types", None, ["full_attention"] * num_layers)
            return (None,) * num_layers
        case Family.mistral:
            fields.only("layer_types", None)
            has_none = fields.has("sliding_window") and fields.get("sliding_window") is None
            return (None if has_none else fields.integer("sliding_window", 4096),) * num_layers
        case Family.qwen2 | Family.qwen3:
            return _qwen_windows(fields, num_layers)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    declared = 4096 if not fields.has("sliding_window") else fields.get("sliding_window")
    uses_window = fields.flag("use_sliding_window", False) and declared is not None
    window = fields.integer("sliding_window", 4096) if uses_window else None
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(layer_types, list) or not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise fields.refusal("layer_types", "only full_attention and sliding_attention can be computed")
    if window is None and "sliding_attention" in layer_types:
        raise fields.refusal("layer_types", "sliding_attention needs use_sliding_window=true and a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(fields: Fields) -> RopeSpec:
    """RoPE from `rope_parameters`, or from `rope_scaling` and `rope_theta`, which older versions write."""
    values = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    fields.get("rope_parameters")
    if not isinstance(values, dict):
        raise fields.refusal("rope_scaling", "must be an object")
    rope = Fields(values, "config.json", prefix="")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError("config.json: rope_scaling.rope_type", kind, f"only {', '.join(_ROPE_KEYS)} can be computed",
                          "choose a model without it")
    rope.only("partial_rotary_factor", None, 1.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    unknown = set(values) - _ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        key = min(unknown)
        raise ConfigError(f"config.json: rope_scaling.{key}", values[key], f"is no parameter of {kind} scaling",
                          "choose a model without it")
    return RopeSpec(theta, _scaling(kind, rope, fields))


def _scaling(kind: str, rope: Fields, fields: Fields) -> RopeScaling | None:
    match kind:
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "dynamic":
            return DynamicScaling(rope.number("factor"))
        case "yarn":
            return _yarn(rope, fields)
        case "llama3":
            return Llama3Scaling(rope.number("factor"), rope.number("low_freq_factor"),
                                 rope.number("high_freq_factor"), _original_max_position(rope, fields))
        case _:
            return None


def _original_max_position(rope: Fields, fields: Fields) -> int:
    """The trained length; a key beside the scaling wins over one inside it."""
    inside = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    return fields.integer("original_max_position_embeddings", inside)


def _yarn(rope: Fields, fields: Fields) -> YarnScaling:
    original = _original_max_position(rope, fields)
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)
