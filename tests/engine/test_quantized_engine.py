"""Whole engines on quantised checkpoints: the same greedy answers as on a checkpoint of the numbers they stand for."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import quantized_folders as packers
from engine.helpers import build, make_config, run, spec
from quantized_folders import AWQ, FP8, GPTQ, MXFP4, Packer, write_quantized
from servekit.config.errors import ConfigError
from servekit.config.schema import Config, DType, KernelSet, ModelConfig, Quantization
from servekit.engine.build import BuiltEngine
from servekit.model.local import LocalModel, SourceKind
from transformers_oracle import save, tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}
PROMPTS = [[5, 3, 98, 0, 41], [7] * 20, [60, 12, 33]]


def config(**model: Any) -> Config:
    base = make_config(max_model_len=64, max_step_tokens=24)
    model_config = ModelConfig(source="tiny", dtype=base.model.dtype, max_model_len=64, **model)
    return dataclasses.replace(base, model=model_config)


def engine(folder: Path, **model: Any) -> BuiltEngine:
    return build(config(**model), LocalModel(SourceKind.folder, "tiny", folder))


def answers(built: BuiltEngine) -> list[list[int]]:
    return [heard.tokens for heard in run(built.engine, [spec(prompt, 16) for prompt in PROMPTS])]


@pytest.mark.parametrize(("pack", "stored", "asked", "quantization"), [
    (packers.awq, AWQ, Quantization.auto, "int4"),
    (partial(packers.gptq, offset=0), GPTQ | {"checkpoint_format": "gptq_v2"}, Quantization.auto, "int4"),
    (packers.mxfp4, MXFP4, Quantization.auto, "mxfp4"),
    (partial(packers.fp8, per_channel=False), FP8, Quantization.fp8, "fp8"),
    (packers.mxfp4, MXFP4, Quantization.none, "none"),
])
def test_greedy_answers_are_those_of_the_numbers_that_are_stored(
        pack: Packer, stored: dict[str, Any], asked: Quantization, quantization: str, tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE)
    quantized = engine(write_quantized(model, tmp_path / "quantized", pack, stored), quantization=asked)
    assert quantized.facts.quantization == quantization
    heard = answers(quantized)
    assert heard == answers(engine(save(model, tmp_path / "plain"))) and len({*map(tuple, heard)}) == len(PROMPTS)


@pytest.mark.parametrize(("pack", "stored"), [
    (packers.awq, AWQ),
    (packers.gptq, GPTQ),
    (partial(packers.gptq, symmetric=True), GPTQ),
    (packers.packed_int4, packers.compressed("pack-quantized", packers.INT4))],
    ids=["awq", "gptq", "gptq symmetric", "packed"])
def test_on_a_processor_four_bit_checkpoints_are_multiplied_by_as_integers(
        pack: Packer, stored: dict[str, Any], tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, pack, stored)
    scores = {}
    for kernels in (KernelSet.cpu, KernelSet.reference):
        base = config()
        built = build(dataclasses.replace(
            base, model=dataclasses.replace(base.model, dtype=DType.float32),
            engine=dataclasses.replace(base.engine, kernels=kernels)), LocalModel(SourceKind.folder, "tiny", folder))
        assert (built.facts.kernels, built.facts.quantization) == (kernels.value, "int4")
        *products, _ = map(built.model.kernels.has_own_threads, built.model.decoder.weights.products)
        assert all(products) == (kernels is KernelSet.cpu)
        heard = run(built.engine, [spec(PROMPTS[1] + PROMPTS[0], 1, prompt_logprobs=0)])[0]
        scores[kernels] = [one.logprob for one in heard.events[0].prompt_logprobs or () if one is not None]
    # The C++ products round activations to eight bits: up to 0.13 apart. A zero point that is one off makes it 4.
    assert len(scores[KernelSet.cpu]) == 24 and scores[KernelSet.cpu] != scores[KernelSet.reference]
    assert scores[KernelSet.cpu] == pytest.approx(scores[KernelSet.reference], abs=0.4)


def test_what_was_chosen_is_told(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.fp8, FP8)
    assert "model.quantization: auto -> fp8_dynamic (the checkpoint's own numbers, fp8)" in engine(folder).facts.notes


def test_fixed_scales_of_activations_are_refused_and_the_remedy_works(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path,
                             partial(packers.fp8, per_channel=False, input_scale=True),
                             FP8 | {"activation_scheme": "static"})
    with pytest.raises(ConfigError, match="wants activations rounded") as caught:
        engine(folder)
    assert caught.value.remedy.startswith("set model.quantization=fp8,")
    assert engine(folder, quantization=Quantization.fp8).facts.quantization == "fp8"


@pytest.mark.parametrize("quantization", [kind for kind in Quantization if kind is not Quantization.auto])
def test_plain_numbers_are_rounded_on_load_in_every_way(quantization: Quantization, tmp_path: Path) -> None:
    """The report says by how much, and the engine answers."""
    report = tmp_path / "report.csv"
    folder = save(tiny_model("llama", **SHAPE).bfloat16(), tmp_path / "plain")
    built = engine(folder, quantization=quantization, quantization_report=str(report))
    assert built.facts.quantization == quantization.value
    assert all(len(tokens) > 0 for tokens in answers(built))
    header, *lines = report.read_text().splitlines()
    errors = {name: float(error) for name, error in (line.split(",") for line in lines)}
    head = errors.pop("lm_head.weight")
    assert header == "matrix,relative_error" and len(errors) == 2 * 7
    low, high = {"none": (0, 1e-12), "int8": (2e-3, 2e-2), "int8_dynamic": (4e-3, 2e-2), "int4": (2e-2, 0.1),
                 "fp8": (1e-2, 4e-2), "fp8_dynamic": (2e-2, 5e-2), "mxfp4": (6e-2, 0.2), "nvfp4": (5e-2, 0.15)
                 }[quantization.value]
    assert all(low <= error < high for error in errors.values())
    assert 0 < head < 2e-2 if quantization.value.startswith("int") else head < 1e-12


def test_a_report_that_cannot_be_written_is_a_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization_report=.*cannot be written"):
        engine(save(tiny_model("llama", **SHAPE), tmp_path), quantization_report=str(tmp_path / "none" / "report.csv"))
