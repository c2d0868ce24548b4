"""The quantised matrices that the kernels multiply by: rounded, joined, dequantised, prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from servekit.config.schema import Quantization
from servekit.kernels import (
    Kernels,
    Product,
    fp4_linear,
    fp8_linear,
    grouped_int4_linear,
    int4_linear,
    int8_linear,
)
from servekit.kernels.fp4_linear import MXFP4_GROUP, NVFP4_GROUP, Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight

QuantizedWeight = Int8Weight | Int4Weight | GroupedInt4Weight | Fp8Weight | Fp4Weight


@dataclass(frozen=True)
class Scheme:
    """How a quantisation keeps a matrix."""

    takes: Callable[[QuantizedWeight], bool]
    """Whether it keeps a matrix of a checkpoint as it is."""
    quantize: Callable[[Tensor], QuantizedWeight]
    """Rounds a matrix of plain numbers."""
    group_size: int = 1
    """What the columns must be a multiple of, to be rounded."""
    rounds_inputs: bool = False
    """Whether activations are rounded as well, row by row."""
    rounds_head: bool = False
    """Whether the head is rounded too, to eight-bit integers: a share of the reads that counts in small models."""


def _has_one_scale_a_row(weight: QuantizedWeight) -> bool:
    """As products of two integers need it."""
    return isinstance(weight, Int8Weight) and weight.scales.shape[1] == 1


def _is_fp4(weight: QuantizedWeight, group_size: int) -> bool:
    return isinstance(weight, Fp4Weight) and weight.codes.shape[1] == group_size * weight.scales.shape[1]


SCHEMES: Mapping[Quantization, Scheme] = {
    Quantization.int8: Scheme(lambda weight: isinstance(weight, Int8Weight), int8_linear.quantize, rounds_head=True),
    Quantization.int8_dynamic: Scheme(_has_one_scale_a_row, int8_linear.quantize, rounds_inputs=True,
                                      rounds_head=True),
    Quantization.int4: Scheme(lambda weight: isinstance(weight, Int4Weight | GroupedInt4Weight), int4_linear.quantize,
                              int4_linear.GROUP_SIZE, rounds_head=True),
    Quantization.fp8: Scheme(lambda weight: isinstance(weight, Fp8Weight), fp8_linear.quantize),
    Quantization.fp8_dynamic: Scheme(lambda weight: isinstance(weight, Fp8Weight), fp8_linear.quantize,
                                     rounds_inputs=True),
    Quantization.mxfp4: Scheme(partial(_is_fp4, group_size=MXFP4_GROUP), fp4_linear.quantize_mxfp4, MXFP4_GROUP),
    Quantization.nvfp4: Scheme(partial(_is_fp4, group_size=NVFP4_GROUP), fp4_linear.quantize_nvfp4, NVFP4_GROUP),
}


def dequantize(weight: QuantizedWeight) -> Tensor:
    """[out, in] float32, its columns in the order of the inputs."""
    match weight:
        case Int8Weight():
            return int8_linear.dequantize(weight)
        case Int4Weight():
            return int4_linear.dequantize(weight)
        case Fp8Weight():
            return fp8_linear.dequantize(weight)
        case Fp4Weight():
            return fp4_linear.dequantize(weight)
        case GroupedInt4Weight():
            matrix = grouped_int4_linear.dequantize(weight)
            return matrix if weight.inputs is None else matrix[:, torch.argsort(weight.inputs)]


def prepare(weight: QuantizedWeight, kernels: Kernels, rounds_inputs: bool) -> Product:
    """The kernels' product with this matrix. Raises ValueError for one that they cannot multiply by."""
    match weight:
        case Int8Weight():
            return kernels.int8_dynamic(weight) if rounds_inputs else kernels.int8(weight)
        case Int4Weight():
            return kernels.int4(weight)
        case GroupedInt4Weight():
            return kernels.grouped_int4(weight)
        case Fp8Weight():
            return kernels.fp8_dynamic(weight) if rounds_inputs else kernels.fp8(weight)
        case Fp4Weight():
            return kernels.fp4(weight)


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The matrices below one another; None where they have no common form, such as groups of one size."""
    kind, names = type(weights[0]), [field.name for field in fields(weights[0])]
    if any(type(weight) is not kind for weight in weights):
        return None
    parts = {name: [getattr(weight, name) for weight in weights] for name in names}
    if not all(_have_common_value(parts[name]) if name in _SHARED else _have_common_form(parts[name])
               for name in names):
        return None
    joined: list[Any] = [parts[name][0] if name in _SHARED else torch.cat(parts[name]) for name in names]
    return kind(*joined)


_SHARED = ("inputs", "scale")
"""Fields of a weight that all its rows share; the others have a row for each output channel."""


def _have_common_value(values: Sequence[object]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(value, Tensor) and torch.equal(value, first) for value in values)
    return all(not isinstance(value, Tensor) and value == first for value in values)


def _have_common_form(values: Sequence[Tensor]) -> bool:
    return len({(value.shape[1:], value.dtype) for value in values}) == 1


@dataclass(frozen=True)
class SideBySide:
    """Products that read the same input, and whose outputs stand beside each other."""

    products: tuple[Product, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.cat([product(x) for product in self.products], dim=-1)


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The same on a device."""
    values = [getattr(weight, field.name) for field in fields(weight)]
    moved: list[Any] = [value.to(device) if isinstance(value, Tensor) else value for value in values]
    return type(weight)(*moved)
