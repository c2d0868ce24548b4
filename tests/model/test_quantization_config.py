"""What config.json may say of a quantised checkpoint: read, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quantized_folders import (
    AWQ,
    BY_ROW,
    FLOAT4,
    FLOAT8,
    FP8,
    GPTQ,
    INT4,
    INT8,
    INT_BY_ROW,
    MXFP4,
    NVFP4,
    compressed,
)
from servekit.config.errors import ConfigError
from servekit.config.schema import Quantization
from servekit.model.local import ModelFileError
from servekit.model.spec_huggingface import spec_from_config
from servekit.model.stored_quantization import AwqLayout, GptqLayout, StoredQuantization

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
DOWN = "model.layers.1.mlp.down_proj"


def stored(config: dict[str, Any], key: str = "quantization_config") -> StoredQuantization:
    found = spec_from_config(LLAMA | {key: config}, {}).stored_quantization
    assert found is not None
    return found


def test_a_checkpoint_of_plain_numbers_stores_none() -> None:
    assert spec_from_config(LLAMA, {}).stored_quantization is None
    assert spec_from_config(LLAMA | {"quantization_config": None}, {}).stored_quantization is None


@pytest.mark.parametrize(("config", "as_made", "weights"), [
    (AWQ, Quantization.int4, Quantization.int4),
    (GPTQ, Quantization.int4, Quantization.int4),
    (FP8, Quantization.fp8_dynamic, Quantization.fp8),
    (FP8 | {"activation_scheme": "static"}, None, Quantization.fp8),
    (compressed("float-quantized", FLOAT8), Quantization.fp8, Quantization.fp8),
    (compressed("float-quantized", FLOAT8, BY_ROW), Quantization.fp8_dynamic, Quantization.fp8),
    (compressed("float-quantized", FLOAT8, BY_ROW | {"dynamic": False, "strategy": "tensor"}), None, Quantization.fp8),
    (compressed("float-quantized", FLOAT8, BY_ROW | {"strategy": "tensor"}), None, Quantization.fp8),
    (compressed("int-quantized", INT8, INT_BY_ROW), Quantization.int8_dynamic, Quantization.int8),
    (compressed("int-quantized", INT8, INT_BY_ROW | {"symmetric": False}), None, Quantization.int8),
    (compressed("int-quantized", INT8, BY_ROW), None, Quantization.int8),
    (MXFP4, Quantization.mxfp4, Quantization.mxfp4),
    (NVFP4, Quantization.nvfp4, Quantization.nvfp4),
    (compressed("nvfp4-pack-quantized", FLOAT4 | {"group_size": 16}, FLOAT4 | {"group_size": 16, "dynamic": "local"}),
     None, Quantization.nvfp4),
])
def test_the_products_that_a_checkpoint_is_made_for(config: dict[str, Any], as_made: Quantization | None,
                                                    weights: Quantization) -> None:
    found = stored(config)
    assert found.as_made is as_made and found.layout.quantization is weights
    assert set(found.kept_by) == {as_made, weights} - {None} and len(set(found.kept_by)) == len(found.kept_by)


def test_the_options_of_integers_in_groups() -> None:
    assert stored(AWQ | {"group_size": -1}).layout == AwqLayout(None)
    assert stored({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}).layout == AwqLayout(64)
    assert stored(GPTQ).layout == GptqLayout(32, is_act_order=False, zero_offset=1)
    assert stored(GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}).layout == GptqLayout(
        32, is_act_order=True, zero_offset=0)


def test_the_older_key_of_compressed_tensors_is_read() -> None:
    assert stored(compressed("float-quantized", FLOAT8), "compression_config").as_made is Quantization.fp8


@pytest.mark.parametrize(("config", "left_alone"), [
    (AWQ, {"lm_head"}),
    (AWQ | {"modules_to_not_convert": ["layers.1.mlp"]}, {"lm_head", DOWN}),
    (GPTQ, {"lm_head"}),
    (GPTQ | {"lm_head": True}, set()),
    (GPTQ | {"dynamic": {r"-:.*\.1\.mlp\..*": {}}}, {"lm_head", DOWN}),
    (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]}, {"lm_head", DOWN}),
    (FP8 | {"ignored_layers": [DOWN]}, {"lm_head", DOWN}),
    (compressed("float-quantized", FLOAT8, ignore=()), set()),
    (compressed("float-quantized", FLOAT8, ignore=("re:.*lm_head", "re:.*down_proj")), {"lm_head", DOWN}),
    (compressed("float-quantized", FLOAT8, targets=["re:.*self_attn.*"]), {"lm_head", DOWN}),
])
def test_modules_that_are_left_alone(config: dict[str, Any], left_alone: set[str]) -> None:
    modules = stored(config).modules
    names = {"lm_head", DOWN, "model.layers.0.self_attn.q_proj"}
    assert {name for name in names if not modules.covers(name)} == left_alone


@pytest.mark.parametrize(("config", "key"), [
    ({"quant_method": "bitsandbytes"}, "quant_method"), ({"quant_method": 4}, "quant_method"),
    (AWQ | {"bits": 8}, "bits"), (AWQ | {"version": "gemv"}, "version"), (AWQ | {"zero_point": False}, "zero_point"),
    (GPTQ | {"bits": 3}, "bits"), (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
    (GPTQ | {"dynamic": {r"+:.*\.1\..*": {"bits": 8}}}, "dynamic"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    (FP8 | {"weight_block_size": [128, 128]}, "weight_block_size"), (FP8 | {"fmt": "e5m2"}, "fmt"),
    (FP8 | {"kv_cache_scheme": {}}, "kv_cache_scheme"), (FP8 | {"activation_scheme": "none"}, "activation_scheme"),
    (compressed("float-quantized", FLOAT8) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (compressed("float-quantized", FLOAT8) | {"transform_config": {"rotations": 1}}, "transform_config"),
    (compressed("float-quantized", FLOAT8) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    (compressed("float-quantized", FLOAT8) | {"config_groups": {}}, "config_groups"),
    (compressed("marlin-24", INT4), "format"), (compressed("float-quantized", INT4), "format"),
    (compressed("pack-quantized", INT8), "format"),
    (compressed("float-quantized", FLOAT8, output_activations=BY_ROW), "config_groups.group_0.output_activations"),
    (compressed("float-quantized", FLOAT8, novel=1), "config_groups.group_0.novel"),
    (compressed("float-quantized", FLOAT8 | {"strategy": "block"}), "config_groups.group_0.weights.strategy"),
    (compressed("int-quantized", INT8 | {"symmetric": False}), "config_groups.group_0.weights.symmetric"),
    (compressed("float-quantized", FLOAT8 | {"novel": 1}), "config_groups.group_0.weights.novel"),
    (compressed("pack-quantized", INT4 | {"actorder": "random"}), "config_groups.group_0.weights.actorder"),
    (compressed("mxfp4-pack-quantized", FLOAT4 | {"group_size": 64}), "config_groups.group_0.weights.group_size"),
])
def test_what_cannot_be_read_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stored(config)
    assert caught.value.key == f"config.json: quantization_config.{key}" and "\n" not in str(caught.value)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="quant_method=hqq: only awq, gptq, fp8, compressed-tensors can be read"):
        stored({"quant_method": "hqq"})


@pytest.mark.parametrize("config", [[], 4, AWQ | {"group_size": 0}, GPTQ | {"desc_act": "yes"},
                                    AWQ | {"modules_to_not_convert": "lm_head"}, GPTQ | {"dynamic": []},
                                    compressed("float-quantized", FLOAT8 | {"num_bits": "8"})])
def test_malformed_keys_are_named(config: Any) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: quantization_config"):
        stored(config)


def test_keys_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    stored(AWQ | {"backend": "autoawq", "novelty": 3})
    assert caplog.messages == ["config.json: quantization_config: unknown keys have no effect: novelty"]
