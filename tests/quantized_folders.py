"""Tiny checkpoints in the layouts of quantised ones, each packed number by number from its format's definition.

AWQ: WQLinear_GEMM of AutoAWQ. GPTQ: AutoGPTQ's format, `gptq` and `gptq_v2`. FP8: AutoFP8. The rest:
compressed-tensors, formats pack-quantized, int-quantized, float-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from transformers_oracle import save

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix by the endings of their names, and the numbers [out, in] that they stand for, in float64."""
Packer = Callable[[Tensor], Packed]


def write_quantized(model: Any, folder: Path, pack: Packer, quantization: Mapping[str, Any],
                    ignored: Iterable[str] = (), packs_head: bool = False) -> Path:
    """Save a model with its matrices packed; the model then has the numbers that they stand for."""
    save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = {}
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        is_packed = module.endswith(MODULES) or (packs_head and module == "lm_head")
        if is_packed and name.endswith(".weight") and module not in ignored:
            parts, numbers = pack(value.double())
            tensors |= {f"{module}.{ending}": part.contiguous() for ending, part in parts.items()}
            value.copy_(numbers)
        elif not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            tensors[name] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- four-bit integers ------------------------------------------------------------------------------------------------

def awq(weight: Tensor, group_size: int = 32) -> Packed:
    """Words of eight output channels, in AutoAWQ's order."""
    integers, zeros, scales, numbers = _int4(weight, torch.arange(weight.shape[1]) // group_size)

    def words(values: Tensor) -> Tensor:
        return _words([values[:, position::8] for position in AWQ_ORDER])

    return {"qweight": words(integers.T), "qzeros": words(zeros.T), "scales": scales.T}, numbers


def gptq(weight: Tensor, group_size: int = 32, offset: int = 1, order: Tensor | None = None, has_g_idx: bool = True,
         symmetric: bool = False) -> Packed:
    """Words of eight inputs; input `order[i]` belongs to group i / group_size."""
    columns = weight.shape[1]
    groups = torch.empty(columns, dtype=torch.int64)
    groups[torch.arange(columns) if order is None else order] = torch.arange(columns) // group_size
    integers, zeros, scales, numbers = _int4(weight, groups, symmetric)
    parts = {"qweight": _words([integers.T[position::8] for position in range(8)]),
             "qzeros": _words([zeros.T[:, position::8] - offset for position in range(8)]), "scales": scales.T}
    return parts | ({"g_idx": groups.int()} if has_g_idx else {}), numbers


def packed_int4(weight: Tensor, group_size: int = 32, symmetric: bool = True, order: Tensor | None = None) -> Packed:
    """Words of eight inputs, row by row, with 8 added to each number."""
    columns = weight.shape[1]
    groups = torch.empty(columns, dtype=torch.int64)
    groups[torch.arange(columns) if order is None else order] = torch.arange(columns) // group_size
    integers, zeros, scales, numbers = _int4(weight, groups, symmetric)
    parts = {"weight_packed": _words([integers[:, position::8] for position in range(8)]), "weight_scale": scales,
             "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = _words([zeros[position::8] for position in range(8)])
    return parts | ({} if order is None else {"weight_g_idx": groups.int()}), numbers


def _int4(weight: Tensor, groups: Tensor, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [out, in], zero points and scales [out, groups] for groups of inputs, and what they stand for."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    num_groups = int(groups.max()) + 1
    scales = torch.stack([weight[:, groups == group].abs().amax(1) / 7 for group in range(num_groups)], 1).half()
    zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(1, 16, scales.shape, generator=generator)
    integers = (weight / scales.double()[:, groups] + zeros[:, groups]).round().clamp(0, 15).long()
    return integers, zeros, scales, (integers - zeros[:, groups]).double() * scales.double()[:, groups]


def _words(nibbles: Iterable[Tensor]) -> Tensor:
    """int32 words from eight matrices of numbers from 0 to 15, that of the lowest bits first."""
    total = sum(nibble.long() << 4 * position for position, nibble in enumerate(nibbles))
    assert isinstance(total, Tensor)
    return (total - (total >> 31 << 32)).int()


# --- eight bits -------------------------------------------------------------------------------------------------------

def int8(weight: Tensor, per_channel: bool = True) -> Packed:
    largest = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max()
    scale = (largest / 127).float()
    integers = (weight / scale.double()).round().to(torch.int8)
    return {"weight": integers, "weight_scale": scale}, integers.double() * scale.double()


def fp8(weight: Tensor, per_channel: bool = True, scale_shape: tuple[int, ...] | None = None,
        input_scale: bool = False) -> Packed:
    largest = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max()
    scale = (largest / 448).float()
    numbers = (weight / scale.double()).float().to(torch.float8_e4m3fn)
    stored = scale if scale_shape is None else scale.reshape(scale_shape)
    parts = {"weight": numbers, "weight_scale": stored.clone()}
    return parts | ({"input_scale": torch.tensor(0.5)} if input_scale else {}), numbers.double() * scale.double()


# --- four-bit floats --------------------------------------------------------------------------------------------------

def mxfp4(weight: Tensor) -> Packed:
    """A byte holds two numbers, the first in its lower bits; every 32 have an exponent, with 127 added to it."""
    groups = weight.reshape(len(weight), -1, 32)
    exponents = groups.abs().amax(-1).log2().floor().long() - 2
    codes, numbers = _e2m1(groups / 2.0 ** exponents.double().unsqueeze(-1))
    return ({"weight_packed": _bytes(codes), "weight_scale": (exponents + 127).to(torch.uint8)},
            (numbers * 2.0 ** exponents.double().unsqueeze(-1)).reshape(weight.shape))


def nvfp4(weight: Tensor) -> Packed:
    """Every 16 have a scale in e4m3, which is divided by one number for the whole matrix."""
    groups = weight.reshape(len(weight), -1, 16)
    divisor = (448 * 6 / weight.abs().max()).float()
    scales = (groups.abs().amax(-1) / 6 * divisor).float().to(torch.float8_e4m3fn)
    steps = (scales.double() / divisor.double()).unsqueeze(-1)
    codes, numbers = _e2m1(groups / steps)
    return ({"weight_packed": _bytes(codes), "weight_scale": scales, "weight_global_scale": divisor.reshape(1)},
            (numbers * steps).reshape(weight.shape))


def _e2m1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and values of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    nearest = (x.abs().unsqueeze(-1) - values).abs().argmin(-1)
    is_negative = x < 0
    return nearest + 8 * is_negative, torch.where(is_negative, -values[nearest], values[nearest])


def _bytes(codes: Tensor) -> Tensor:
    flat = codes.reshape(len(codes), -1)
    return (flat[:, 0::2] + 16 * flat[:, 1::2]).to(torch.uint8)


# --- config.json ------------------------------------------------------------------------------------------------------

def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None,
               ignore: Iterable[str] = ("lm_head",), **group: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    return {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "kv_cache_scheme": None,
            "quantization_status": "compressed", "global_compression_ratio": 1.5, "version": "0.9.4",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": inputs, "output_activations": None,
                "weights": {"observer": "minmax", "observer_kwargs": {}, "dynamic": False, "block_structure": None,
                            "actorder": None, **weights}} | group}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": False,
        "checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
BY_ROW = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
INT_BY_ROW = BY_ROW | {"type": "int"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
MXFP4 = compressed("mxfp4-pack-quantized", FLOAT4)
NVFP4 = compressed("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16})
