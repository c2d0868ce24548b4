"""How checkpoints in Hugging Face format store quantised matrices: as which tensors, and which matrices.

The layouts are those of AutoAWQ (GEMM), of AutoGPTQ and GPTQModel, of AutoFP8, and of compressed-tensors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from servekit.config.schema import Quantization
from servekit.model.fields import Fields

_FLOATS = ("F16", "BF16", "F32")
_INT32 = ("I32",)
_PER_WORD = 8
"""Four-bit integers in one int32."""

_MODULE_CLASS = "Linear"
"""What every module with a matrix is, but the embedding."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One of the tensors that a matrix is stored as."""

    types: tuple[str, ...]
    """What it may hold, as safetensors names it."""
    shapes: tuple[Shape, ...]
    is_required: bool = True


_INPUT_SCALE = {"input_scale": Part(_FLOATS, ((), (1,)))}


class Layout(ABC):
    """How one matrix [rows, columns] is stored: as which tensors, by the endings of their names."""

    quantization: Quantization
    """What its weights are kept in, beside activations that are not rounded."""
    group_size: int | None
    """Columns that share a scale; None: all of a row, or more."""

    @abstractmethod
    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors. `columns` is a multiple of the group size."""

    def num_groups(self, columns: int) -> int:
        """Scales for each row."""
        return columns // (self.group_size or columns)


@dataclass(frozen=True)
class AwqLayout(Layout):
    """Eight output channels in a word, in an order of their own (AutoAWQ, version GEMM)."""

    group_size: int | None
    quantization = Quantization.int4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        groups = self.num_groups(columns)
        return {"qweight": Part(_INT32, ((columns, rows // _PER_WORD),)),
                "qzeros": Part(_INT32, ((groups, rows // _PER_WORD),)),
                "scales": Part(_FLOATS, ((groups, rows),))}


@dataclass(frozen=True)
class GptqLayout(Layout):
    """Eight inputs in a word (AutoGPTQ)."""

    group_size: int | None
    is_act_order: bool
    """Whether groups are of inputs that belong together by importance; `g_idx` says which."""
    zero_offset: int
    """What stored zero points lack."""
    quantization = Quantization.int4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        groups = self.num_groups(columns)
        return {"qweight": Part(_INT32, ((columns // _PER_WORD, rows),)),
                "qzeros": Part(_INT32, ((groups, rows // _PER_WORD),)),
                "scales": Part(_FLOATS, ((groups, rows),)),
                "g_idx": Part(_INT32, ((columns,),), is_required=self.is_act_order)}


@dataclass(frozen=True)
class PackedInt4Layout(Layout):
    """Eight inputs in a word, row by row (compressed-tensors, pack-quantized)."""

    group_size: int | None
    is_symmetric: bool
    is_act_order: bool
    quantization = Quantization.int4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        groups = self.num_groups(columns)
        parts = {"weight_packed": Part(_INT32, ((rows, columns // _PER_WORD),)),
                 "weight_scale": Part(_FLOATS, ((rows, groups),)),
                 "weight_shape": Part(("I64", "I32"), ((2,),), is_required=False)}
        if not self.is_symmetric:
            parts["weight_zero_point"] = Part(_INT32, ((rows // _PER_WORD, groups),))
        if self.is_act_order:
            parts["weight_g_idx"] = Part(("I32", "I64"), ((columns,),))
        return parts


@dataclass(frozen=True)
class Int8Layout(Layout):
    """One integer a byte (compressed-tensors, int-quantized)."""

    group_size: int | None
    has_input_scale: bool = False
    quantization = Quantization.int8

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        scales = _row_scales(rows) if self.group_size is None else ((rows, self.num_groups(columns)),)
        parts = {"weight": Part(("I8",), ((rows, columns),)), "weight_scale": Part(_FLOATS, scales)}
        return parts | _INPUT_SCALE if self.has_input_scale else parts


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """One float in e4m3 a byte (AutoFP8; compressed-tensors, float-quantized)."""

    has_input_scale: bool = False
    group_size = None
    quantization = Quantization.fp8

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        parts = {"weight": Part(("F8_E4M3",), ((rows, columns),)), "weight_scale": Part(_FLOATS, _row_scales(rows))}
        return parts | _INPUT_SCALE if self.has_input_scale else parts


@dataclass(frozen=True)
class Mxfp4Layout(Layout):
    """Two floats in e2m1 a byte, and a power of two for every 32 (compressed-tensors, mxfp4-pack-quantized)."""

    group_size = 32
    quantization = Quantization.mxfp4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        return {"weight_packed": Part(("U8",), ((rows, columns // 2),)),
                "weight_scale": Part(("U8", "F8_E8M0"), ((rows, self.num_groups(columns)),))}


@dataclass(frozen=True)
class Nvfp4Layout(Layout):
    """Two floats in e2m1 a byte, a scale for every 16, and a divisor (compressed-tensors, nvfp4-pack-quantized)."""

    has_input_scale: bool = False
    group_size = 16
    quantization = Quantization.nvfp4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        parts = {"weight_packed": Part(("U8",), ((rows, columns // 2),)),
                 "weight_scale": Part(("F8_E4M3",), ((rows, self.num_groups(columns)),)),
                 "weight_global_scale": Part(("F32",), ((), (1,)))}
        return parts | {"input_global_scale": Part(("F32",), ((), (1,)))} if self.has_input_scale else parts


def _row_scales(rows: int) -> tuple[Shape, ...]:
    """One scale for each row, or for all."""
    return (rows, 1), (rows,), (1, 1), (1,), ()


class Inputs(Enum):
    """What the checkpoint was made to have done to the activations that its matrices are multiplied by."""

    kept = "kept"
    rounded_by_row = "rounded by row"
    """To the weights' format, with the scale that each row needs."""
    rounded_otherwise = "rounded otherwise"
    """In a way that no kernel has: with fixed scales, or to four bits."""


ROUNDED_BY_ROW = {Quantization.int8: Quantization.int8_dynamic, Quantization.fp8: Quantization.fp8_dynamic}


@dataclass(frozen=True)
class Modules:
    """Which modules are quantised, by their names: those that a target names and no exception does."""

    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    names: Callable[[str, str], bool]
    """Whether a pattern of either list names a module."""

    def covers(self, module: str) -> bool:
        """Whether a module, such as `model.layers.0.mlp.down_proj`, is quantised."""
        return (any(self.names(target, module) for target in self.targets)
                and not any(self.names(pattern, module) for pattern in self.ignored))


@dataclass(frozen=True)
class StoredQuantization:
    """What a checkpoint says of its quantised matrices."""

    method: str
    """`quant_method`, as config.json has it."""
    layout: Layout
    inputs: Inputs
    modules: Modules

    @property
    def as_made(self) -> Quantization | None:
        """The products that the checkpoint was made for; None where no kernel has them."""
        weights = self.layout.quantization
        match self.inputs:
            case Inputs.kept:
                return weights
            case Inputs.rounded_by_row:
                return ROUNDED_BY_ROW[weights]
            case Inputs.rounded_otherwise:
                return None

    @property
    def kept_by(self) -> tuple[Quantization, ...]:
        """The settings under which its matrices are multiplied by as they are stored."""
        weights = self.layout.quantization
        return tuple(dict.fromkeys(kind for kind in (self.as_made, weights) if kind is not None))


def group_size(fields: Fields, key: str) -> int | None:
    """Columns of a group by that key, 128 where it is missing; None for -1, which means a whole row."""
    return None if fields.get(key) == -1 else fields.integer(key, 128)


def contains(pattern: str, module: str) -> bool:
    """AutoAWQ's rule: any part of a name."""
    return pattern == _MODULE_CLASS or pattern in module


def matches(pattern: str, module: str) -> bool:
    """The others' rule: `re:` and a regular expression, the modules' class, a whole name or the last parts of one."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == _MODULE_CLASS or module == pattern or module.endswith(f".{pattern}")
