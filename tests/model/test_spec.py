"""What a config.json says is honoured or refused; reading it needs no torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from servekit.config.errors import ConfigError
from servekit.model.loader import load_spec
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.rope import inverse_frequencies
from servekit.model.shapes import SHAPES
from servekit.model.spec import Family, LinearScaling, Llama3Scaling, ModelSpec, YarnScaling
from servekit.model.spec_huggingface import spec_from_config

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 49152,
}
LLAMA31_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}
QWEN2 = SMOLLM2 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config(SMOLLM2 | changes, {})


def test_a_plain_llama() -> None:
    assert spec() == SHAPES["smollm2-135m"].__class__(**vars(SHAPES["smollm2-135m"]) | {
        "bos_token_id": 1, "eos_token_ids": (2,)})
    assert spec().num_parameters == 134_515_008
    assert spec().kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2
    assert spec().max_context_tokens == 8192


@pytest.mark.parametrize(("shape", "billions"), [
    ("smollm2-135m", 0.1345), ("qwen3-0.6b", 0.596), ("llama-2-7b", 6.738), ("llama-2-70b", 68.977),
    ("llama-3-8b", 8.030), ("llama-3-70b", 70.554), ("llama-3.1-8b", 8.030), ("llama-3.3-70b", 70.554)])
def test_named_shapes_have_their_parameters(shape: str, billions: float) -> None:
    assert SHAPES[shape].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_keys_have_the_defaults_of_transformers(family: str) -> None:
    config = AutoConfig.for_model(family)
    written = {"architectures": [AutoModelForCausalLM._model_mapping[type(config)].__name__], "vocab_size": 99,
               "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 40, "num_attention_heads": 64,
               "max_position_embeddings": 64}
    full = type(config)(**{key: value for key, value in written.items() if key != "architectures"})
    ours = spec_from_config(written, {})
    assert ours.num_kv_heads == full.num_key_value_heads
    assert ours.head_dim == (getattr(full, "head_dim", None) or 4)
    assert ours.rms_eps == full.rms_norm_eps
    assert ours.tied_head == full.tie_word_embeddings
    assert ours.rope.theta == full.rope_parameters["rope_theta"] and ours.rope.scaling is None
    assert ours.bos_token_id == full.bos_token_id
    assert ours.eos_token_ids == (() if full.eos_token_id is None else (full.eos_token_id,))
    assert set(ours.windows) == {4096 if family == "mistral" else None}


def test_every_end_of_sequence_id_adds_up() -> None:
    ours = spec_from_config(SMOLLM2 | {"eos_token_id": [7, 8]}, {"eos_token_id": [8, 9]})
    assert ours.eos_token_ids == (7, 8, 9)
    assert spec_from_config(SMOLLM2 | {"eos_token_id": None}, {"eos_token_id": 5}).eos_token_ids == (5,)
    assert spec_from_config(SMOLLM2 | {"eos_token_id": None}, {}).eos_token_ids == ()


def test_generation_defaults_are_kept() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "transformers_version": "5",
                  "pad_token_id": 3}
    assert spec_from_config(SMOLLM2, generation).generation_defaults == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}


def test_both_spellings_of_rope_scaling_are_read() -> None:
    new = spec(rope_parameters=LLAMA31_ROPE | {"rope_theta": 500000.0}, rope_theta=None).rope
    old = spec(rope_scaling=LLAMA31_ROPE, rope_theta=500000.0).rope
    assert old == new
    assert old.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192) and old.theta == 500_000.0
    assert spec(rope_scaling={"type": "linear", "factor": 2}).rope.scaling == LinearScaling(2.0)


def test_a_scaling_lengthens_the_context_it_was_made_for() -> None:
    assert spec(rope_scaling={"type": "linear", "factor": 2.5}).max_context_tokens == 20480
    assert spec(rope_scaling={"type": "dynamic", "factor": 2.0}).max_context_tokens == 16384
    assert spec(rope_scaling=LLAMA31_ROPE, max_position_embeddings=131072).max_context_tokens == 131072
    yarn = spec(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    assert yarn.max_context_tokens == 16384
    assert isinstance(yarn.rope.scaling, YarnScaling)
    assert yarn.rope.scaling.attention_factor == pytest.approx(1.1386294)


def test_llama3_frequencies_of_a_real_model() -> None:
    """Llama 3.1: wavelengths under 2,048 tokens stay, those over 8,192 grow eightfold."""
    llama = spec(rope_scaling=LLAMA31_ROPE, rope_theta=500000.0, head_dim=128)
    frequencies = inverse_frequencies(llama, 131072)
    plain = 500_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    torch.testing.assert_close(frequencies[:29], plain[:29])
    torch.testing.assert_close(frequencies[-29:], plain[-29:] / 8)
    assert ((plain / 8 < frequencies) & (frequencies < plain))[29:-29].all()


@pytest.mark.parametrize(("key", "value"), [
    ("hidden_act", "gelu"), ("num_local_experts", 8), ("num_experts", 60), ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0), ("quantization_config", {"bits": 4}), ("partial_rotary_factor", 0.5),
    ("rope_interleaved", True), ("residual_multiplier", 0.2), ("logits_scaling", 8.0), ("sliding_window", 128),
    ("layer_types", ["sliding_attention"] * 30), ("architectures", ["MixtralForCausalLM"]), ("architectures", None),
    ("rope_scaling.rope_type", "longrope"), ("rope_scaling.rope_type", "mrope"), ("rope_scaling.alpha", 4),
    ("hidden_size", 577),
])
def test_what_cannot_be_computed_is_refused_by_name(key: str, value: Any) -> None:
    section, _, inner = key.partition(".")
    changes = {section: {"rope_type": "dynamic", "factor": 2.0} | {inner: value}} if inner else {key: value}
    with pytest.raises(ConfigError) as caught:
        spec(**changes)
    assert caught.value.key == f"config.json: {key}" and caught.value.value == value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [
    {"layer_types": ["sliding_attention"] * 30}, {"layer_types": ["full_attention"] * 29},
    {"layer_types": ["chunked_attention"] * 30, "use_sliding_window": True},
    {"layer_types": ["sliding_attention"] * 30, "use_sliding_window": True, "sliding_window": None},
])
def test_windows_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        spec_from_config(QWEN2 | changes, {})


def test_qwen_windows() -> None:
    window = {"sliding_window": 512, "max_window_layers": 28}
    assert set(spec_from_config(QWEN2 | window, {}).windows) == {None}
    assert spec_from_config(QWEN2 | window | {"use_sliding_window": True}, {}).windows == (None,) * 28 + (512,) * 2
    assert set(spec_from_config(QWEN2 | window | {"use_sliding_window": True, "sliding_window": None}, {}).windows) \
        == {None}


@pytest.mark.parametrize(("key", "value", "message"), [
    ("vocab_size", None, "vocab_size is missing"), ("num_hidden_layers", "30", "num_hidden_layers='30' must be"),
    ("hidden_size", 0, "hidden_size=0 must be a positive integer"), ("rms_norm_eps", True, "rms_norm_eps=True"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings='yes'"), ("eos_token_id", ["a"], "eos_token_id"),
])
def test_malformed_values_are_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: {message}"):
        spec(**{key: value})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads=2"):
        spec(num_key_value_heads=2)


def test_unknown_keys_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec()
        assert not caplog.records
        spec(mystery=1)
    assert "unknown keys have no effect: mystery" in caplog.text


def test_a_folder_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    local = LocalModel(SourceKind.folder, "tiny", tmp_path)
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        load_spec(local)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_spec(local).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"generation_config\.json: not valid JSON"):
        load_spec(local)


def test_a_dummy_is_a_named_shape_or_a_config_file(tmp_path: Path) -> None:
    def dummy(shape: str) -> ModelSpec:
        return load_spec(LocalModel(SourceKind.dummy, "dummy", None, shape))

    assert dummy("llama-3-8b").family is Family.llama
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert dummy(str(tmp_path / "config.json")) == spec()
    with pytest.raises(ConfigError, match=r"model\.source=dummy:large: .*tiny, smollm2-135m"):
        dummy("large")


def test_reading_a_spec_does_not_import_torch() -> None:
    code = ("import sys; from servekit.model.loader import load_spec; "
            "from servekit.model.local import LocalModel, SourceKind; "
            "load_spec(LocalModel(SourceKind.dummy, 'x', None, 'tiny')); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
