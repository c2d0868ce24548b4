"""Checkpoints that are quantised already: the same logits as a model of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantized_folders as packers
from paged_kv import PagedRun
from quantized_folders import (
    AWQ,
    BY_ROW,
    FLOAT8,
    FP8,
    GPTQ,
    INT4,
    INT8,
    INT_BY_ROW,
    MODULES,
    MXFP4,
    NVFP4,
    Packer,
    compressed,
    write_quantized,
)
from servekit.config.errors import ConfigError
from servekit.config.schema import Quantization
from servekit.kernels import Kernels, Product, reference_kernels
from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.quantization import SideBySide
from transformers_oracle import float64_throughout, logits_of, tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}
TOKENS = [5, 3, 98, 0, 41, 41, 7, 12, 60]
ORDER = {columns: torch.randperm(columns, generator=torch.Generator().manual_seed(7)) for columns in (64, 96)}


def act_order(pack: Callable[..., packers.Packed], **options: Any) -> Packer:
    """A packer whose groups are scattered, in the same way for all matrices of the same inputs."""
    return lambda weight: pack(weight, order=ORDER[weight.shape[1]], **options)


@dataclass(frozen=True)
class Case:
    """A checkpoint's layout whose activations stay as they are."""

    pack: Packer
    config: dict[str, Any]
    quantization: Quantization


CASES = {
    "awq": Case(packers.awq, AWQ, Quantization.int4),
    "awq whole rows": Case(lambda weight: packers.awq(weight, weight.shape[1]), AWQ | {"group_size": -1},
                           Quantization.int4),
    "gptq": Case(packers.gptq, GPTQ, Quantization.int4),
    "gptq v2": Case(partial(packers.gptq, offset=0), GPTQ | {"checkpoint_format": "gptq_v2"}, Quantization.int4),
    "gptq symmetric": Case(partial(packers.gptq, symmetric=True), GPTQ | {"sym": True}, Quantization.int4),
    "gptq without g_idx": Case(partial(packers.gptq, has_g_idx=False), GPTQ, Quantization.int4),
    "gptq act order": Case(act_order(packers.gptq), GPTQ | {"desc_act": True}, Quantization.int4),
    "int4": Case(packers.packed_int4, compressed("pack-quantized", INT4), Quantization.int4),
    "int4 asymmetric": Case(partial(packers.packed_int4, symmetric=False),
                            compressed("pack-quantized", INT4 | {"symmetric": False}), Quantization.int4),
    "int4 act order": Case(act_order(packers.packed_int4),
                           compressed("pack-quantized", INT4 | {"actorder": "group"}), Quantization.int4),
    "int4 ordered weights": Case(packers.packed_int4,
                                 compressed("pack-quantized", INT4 | {"actorder": "weight"}), Quantization.int4),
    "int8": Case(packers.int8, compressed("int-quantized", INT8), Quantization.int8),
    "int8 per tensor": Case(partial(packers.int8, per_channel=False),
                            compressed("int-quantized", INT8 | {"strategy": "tensor"}), Quantization.int8),
    "fp8": Case(packers.fp8, compressed("float-quantized", FLOAT8), Quantization.fp8),
    "fp8 per tensor": Case(partial(packers.fp8, per_channel=False, scale_shape=(1,)),
                           compressed("naive-quantized", FLOAT8 | {"strategy": "tensor"}), Quantization.fp8),
    "fp8 of AutoFP8, weights only": Case(partial(packers.fp8, per_channel=False), FP8, Quantization.fp8),
    "fp8 of AutoFP8 with fixed scales, weights only": Case(
        partial(packers.fp8, per_channel=False, input_scale=True), FP8 | {"activation_scheme": "static"},
        Quantization.fp8),
    "mxfp4": Case(packers.mxfp4, MXFP4, Quantization.mxfp4),
    "nvfp4": Case(packers.nvfp4, NVFP4, Quantization.nvfp4),
}


def load(folder: Path, quantization: Quantization, kernels: Kernels | None = None) -> Decoder:
    local = LocalModel(SourceKind.folder, "tiny", folder)
    return load_decoder(local, load_spec(local), torch.float64, torch.device("cpu"), kernels or reference_kernels(), 64,
                        lambda done, total: None, quantization)


def logits(decoder: Decoder) -> Tensor:
    return PagedRun(decoder, 16, 2).in_chunks("a", TOKENS, 5)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """As far as dequantised numbers in float32 go."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def recording(seen: list[Any], prepare: Callable[[Any], Product]) -> Callable[[Any], Product]:
    """The same preparation of matrices, keeping a list of them."""
    def prepare_and_keep(weight: Any) -> Product:
        seen.append(weight)
        return prepare(weight)

    return prepare_and_keep


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_a_model_with_the_numbers_that_are_stored(name: str, tmp_path: Path) -> None:
    case, model = CASES[name], tiny_model("llama", **SHAPE | {"num_hidden_layers": 1})
    folder = write_quantized(model, tmp_path, case.pack, case.config)
    expected = logits_of(model, TOKENS)
    assert_same(logits(load(folder, case.quantization)), expected)
    assert_same(logits(load(folder, Quantization.none)), expected)


def _rounded_by_row(x: Tensor, most: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / most).to(torch.float32).double()
    return nearest(x / scale).double() * scale


@pytest.mark.parametrize(("quantization", "most", "nearest"), [
    (Quantization.int8_dynamic, 127, torch.round),
    (Quantization.fp8_dynamic, 448, lambda x: x.type(torch.float8_e4m3fn)),
], ids=["int8", "fp8"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_activations_are_rounded_row_by_row_where_the_checkpoint_asks_for_it(
        quantization: Quantization, most: float, nearest: Callable[[Tensor], Tensor], per_channel: bool,
        tmp_path: Path) -> None:
    is_int, strategy = quantization is Quantization.int8_dynamic, "channel" if per_channel else "tensor"
    config = compressed("int-quantized", INT8 | {"strategy": strategy}, INT_BY_ROW) if is_int else compressed(
        "float-quantized", FLOAT8 | {"strategy": strategy}, BY_ROW)
    model = tiny_model("llama", **SHAPE)
    folder = write_quantized(model, tmp_path, partial(packers.int8 if is_int else packers.fp8, per_channel=per_channel),
                             config)
    plain = logits_of(model, TOKENS)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, x: (_rounded_by_row(x[0], most, nearest),))
    with float64_throughout():
        expected = logits_of(model, TOKENS)
    actual = logits(load(folder, quantization))
    assert (actual - expected).norm() < 0.02 * (plain - expected).norm()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton exists for Linux alone")
@pytest.mark.parametrize("name", ["awq", "gptq act order", "int4 asymmetric", "int8", "fp8 per tensor", "mxfp4",
                                  "nvfp4"])
def test_the_triton_kernels_multiply_by_what_is_stored(name: str, tmp_path: Path) -> None:
    """As many outputs as there are matrices below one another, interpreted."""
    from servekit.kernels.triton import Gpu, triton_kernels

    case, model = CASES[name], tiny_model("llama", **SHAPE | {"num_hidden_layers": 1})
    folder = write_quantized(model, tmp_path, case.pack, case.config)
    kernels = triton_kernels(reference_kernels(), Gpu(4, has_fp8=True))
    products = load(folder, case.quantization, kernels).weights.layers[0]
    state = model.state_dict()
    for linear, modules in ((products.qkv, MODULES[:3]), (products.down, MODULES[6:])):
        matrix = torch.cat([state[f"model.layers.0.{module}.weight"] for module in modules]).float()
        x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(linear(x), x @ matrix.T, rtol=1e-4, atol=1e-4)


def test_modules_that_the_checkpoint_leaves_alone_stay_plain_numbers(tmp_path: Path) -> None:
    left = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    model = tiny_model("llama", **SHAPE)
    folder = write_quantized(model, tmp_path, packers.awq, AWQ | {"modules_to_not_convert": left}, ignored=left)
    seen: list[GroupedInt4Weight] = []
    decoder = load(folder, Quantization.int4, replace(reference_kernels(), grouped_int4=recording(
        seen, reference_kernels().grouped_int4)))
    assert_same(logits(decoder), logits_of(model, TOKENS))
    assert isinstance(decoder.weights.layers[0].qkv.product, SideBySide)
    assert [len(weight.integers) for weight in seen] == [32, 32, 64, 192, 64, 128, 64, 192]


def test_matrices_whose_inputs_are_ordered_differently_are_multiplied_by_one_after_the_other(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    model = tiny_model("llama", **SHAPE)

    def pack(weight: Tensor) -> packers.Packed:
        return packers.gptq(weight, order=torch.randperm(weight.shape[1], generator=generator))

    folder = write_quantized(model, tmp_path, pack, GPTQ | {"desc_act": True})
    decoder = load(folder, Quantization.int4)
    assert isinstance(decoder.weights.layers[1].gate_up.product, SideBySide)
    assert_same(logits(decoder), logits_of(model, TOKENS))


def test_a_quantised_head_is_taken_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE, vocab_size=104)
    folder = write_quantized(model, tmp_path, packers.gptq, GPTQ | {"lm_head": True}, packs_head=True)
    assert_same(logits(load(folder, Quantization.int4)), logits_of(model, TOKENS))


@pytest.mark.parametrize("is_tied", [False, True])
def test_biases_norms_and_heads_beside_quantised_matrices(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen2", **SHAPE, tie_word_embeddings=is_tied)
    folder = write_quantized(model, tmp_path, packers.fp8, compressed("float-quantized", FLOAT8))
    assert_same(logits(load(folder, Quantization.fp8)), logits_of(model, TOKENS))


def test_a_setting_other_than_the_checkpoints_rounds_its_numbers_again(tmp_path: Path) -> None:
    """The head and the modules that the checkpoint leaves alone included, as for any other checkpoint."""
    model = tiny_model("llama", **SHAPE)
    folder = write_quantized(model, tmp_path, packers.awq, AWQ)
    seen: list[Int8Weight] = []
    actual = logits(load(folder, Quantization.int8, replace(reference_kernels(), int8=recording(
        seen, reference_kernels().int8))))
    assert len(seen) == 2 * 4 + 1
    expected = logits_of(model, TOKENS)
    assert 1e-4 < (actual - expected).norm() / expected.norm() < 0.1


def test_one_four_bit_float_is_not_taken_for_the_other(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.nvfp4, NVFP4)
    seen: list[Fp4Weight] = []
    load(folder, Quantization.mxfp4, replace(reference_kernels(), fp4=recording(seen, reference_kernels().fp4)))
    assert len(seen) == 2 * 4 and {weight.scales.dtype for weight in seen} == {torch.float8_e8m0fnu}


@pytest.mark.parametrize(("name", "lost"), [
    ("awq", "scales"), ("awq", "qzeros"), ("gptq", "scales"), ("gptq act order", "g_idx"), ("int8", "weight_scale"),
    ("fp8", "weight_scale"), ("mxfp4", "weight_scale"), ("nvfp4", "weight_global_scale"), ("awq", "qweight"),
    ("int4 asymmetric", "weight_zero_point"), ("fp8 of AutoFP8 with fixed scales, weights only", "input_scale"),
])
def test_a_missing_scale_is_named(name: str, lost: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, case.pack, case.config)
    missing = f"model.layers.1.mlp.up_proj.{lost}"
    edit(folder, lambda tensors: tensors.pop(missing))
    with pytest.raises(ModelFileError) as caught:
        load(folder, case.quantization)
    assert f"tensor {missing} is missing" in str(caught.value) and "\n" not in str(caught.value)


def test_a_misshapen_part_is_named(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.awq, AWQ | {"group_size": 16})
    with pytest.raises(ModelFileError, match=r"q_proj\.qzeros has the shape \[2, 8\].*asks for \[4, 8\]"):
        load(folder, Quantization.int4)


def test_a_part_of_another_type_is_named(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.int8,
                             compressed("float-quantized", FLOAT8))
    with pytest.raises(ModelFileError, match=r"q_proj\.weight has the type I8; only F8_E4M3 can be read"):
        load(folder, Quantization.fp8)


def test_quantised_tensors_of_a_module_that_is_left_alone_are_unexpected(tmp_path: Path) -> None:
    left = "model.layers.1.mlp.down_proj"
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.gptq,
                             GPTQ | {"dynamic": {rf"-:{left}": {}}})
    with pytest.raises(ModelFileError, match=r"down_proj\.\w+ has the type I32; only F64"):
        load(folder, Quantization.int4)


def test_groups_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, partial(packers.awq, group_size=64),
                             AWQ | {"group_size": 64})
    with pytest.raises(ConfigError, match=r"group_size=64: model\.layers\.0\.mlp\.down_proj has 96 columns"):
        load(folder, Quantization.int4)


def test_groups_of_different_sizes_are_named(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.gptq, GPTQ)
    edit(folder, lambda tensors: tensors["model.layers.0.mlp.down_proj.g_idx"][:1].fill_(1))
    with pytest.raises(ModelFileError, match=r"mlp\.down_proj cannot be read: the 3 groups of 96 inputs differ"):
        load(folder, Quantization.int4)


def test_what_the_kernels_cannot_multiply_by_is_a_setting_to_change(tmp_path: Path) -> None:
    def refuse(weight: Fp8Weight) -> Any:
        raise ValueError("no such numbers here")

    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.fp8, compressed("float-quantized", FLOAT8))
    with pytest.raises(ConfigError) as caught:
        load(folder, Quantization.fp8, replace(reference_kernels(), fp8=refuse))
    assert caught.value.key == "model.quantization" and "q_proj.weight: no such numbers here" in str(caught.value)


def test_progress_counts_every_part(tmp_path: Path) -> None:
    folder = write_quantized(tiny_model("llama", **SHAPE), tmp_path, packers.nvfp4, NVFP4)
    local = LocalModel(SourceKind.folder, "tiny", folder)
    calls: list[tuple[int, int]] = []
    load_decoder(local, load_spec(local), torch.float32, torch.device("cpu"), reference_kernels(), 64,
                 lambda done, total: calls.append((done, total)), Quantization.nvfp4)
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert calls[0] == (0, total) and calls[-1] == (total, total) and calls == sorted(calls)
