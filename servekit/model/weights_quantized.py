"""Weights from a folder in Hugging Face format whose matrices are quantised."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from servekit.config.errors import ConfigError
from servekit.kernels import fp4_linear, grouped_int4_linear
from servekit.kernels.fp4_linear import Fp4Weight
from servekit.kernels.fp8_linear import Fp8Weight
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.local import ModelFileError
from servekit.model.quantization import QuantizedWeight, dequantize
from servekit.model.spec import ModelSpec, tensor_shapes
from servekit.model.stored_quantization import (
    AwqLayout,
    Fp8Layout,
    GptqLayout,
    Int8Layout,
    Layout,
    Mxfp4Layout,
    Nvfp4Layout,
    PackedInt4Layout,
    StoredQuantization,
)
from servekit.model.weights import StoredTensor
from servekit.model.weights_safetensors import SafetensorsFiles, SafetensorsFolder

_EMBEDDING = "model.embed_tokens.weight"


class QuantizedFolder:
    """Every tensor by the name that it has in a checkpoint of plain numbers, whether it is quantised or not."""

    def __init__(self, files: SafetensorsFiles, spec: ModelSpec, stored: StoredQuantization) -> None:
        """Raises ModelFileError, naming the tensor, where a part of a quantised matrix is missing or unusable."""
        self._files = files
        self._stored = stored
        self._matrices: dict[str, StoredTensor] = {}
        parts: set[str] = set()
        for name, shape in tensor_shapes(spec).items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and name != _EMBEDDING and stored.modules.covers(module):
                names = self._check_parts(module, shape)
                parts |= names
                self._matrices[name] = StoredTensor(shape, sum(files.tensors[part].num_bytes for part in names))
        self._plain = SafetensorsFolder(files, spec, without=parts)
        self._tensors = {**self._plain.tensors, **self._matrices}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def describe(self, name: str) -> str:
        return self._files.describe(name)

    def read(self, name: str) -> Tensor:
        """The numbers that a quantised matrix stands for, in float32; another tensor as it is."""
        weight = self.read_stored(name)
        return self._plain.read(name) if weight is None else dequantize(weight)

    def read_stored(self, name: str) -> QuantizedWeight | None:
        if name not in self._matrices:
            return None
        module, layout = name.removesuffix(".weight"), self._stored.layout
        rows, columns = self._matrices[name].shape
        parts = {ending: self._files.read(f"{module}.{ending}") for ending in layout.parts(rows, columns)
                 if f"{module}.{ending}" in self._files.tensors}
        try:
            return _weight(layout, parts, rows, columns)
        except ValueError as error:
            raise ModelFileError(f"{self.describe(module)} cannot be read: {error}") from error

    def _check_parts(self, module: str, shape: tuple[int, ...]) -> set[str]:
        """The tensors that the matrix is stored as."""
        rows, columns = shape
        layout, method = self._stored.layout, self._stored.method
        if columns % (layout.group_size or 1):
            raise ConfigError(f"config.json: {method}, group_size", layout.group_size,
                              f"{module} has {columns} columns, which are no whole groups", "choose another checkpoint")
        found = set()
        for ending, part in layout.parts(rows, columns).items():
            name = f"{module}.{ending}"
            tensor = self._files.tensors.get(name)
            if tensor is None:
                if part.is_required:
                    raise ModelFileError(f"{self.describe(name)} is missing, and config.json says that {module} is "
                                         f"quantised ({method}); the model is incomplete, fetch it again")
                continue
            self._files.require_type(name, *part.types)
            if tensor.shape not in part.shapes:
                raise ModelFileError(f"{self.describe(name)} has the shape {list(tensor.shape)}, but {method} of a "
                                     f"matrix of {rows} x {columns} asks for {list(part.shapes[0])}")
            found.add(name)
        return found


def _weight(layout: Layout, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
    """A matrix from its tensors, by the endings of their names. Raises ValueError for groups of different sizes."""
    match layout:
        case AwqLayout():
            return grouped_int4_linear.from_awq(parts["qweight"], parts["qzeros"], parts["scales"])
        case GptqLayout(zero_offset=zero_offset):
            groups = parts.get("g_idx", _in_order(columns, len(parts["scales"])))
            return grouped_int4_linear.from_gptq(parts["qweight"], parts["qzeros"], parts["scales"], groups,
                                                 zero_offset)
        case PackedInt4Layout():
            return _packed_int4(parts, columns)
        case Int8Layout():
            return Int8Weight(parts["weight"], _by_row(parts["weight_scale"], rows))
        case Fp8Layout():
            return Fp8Weight(parts["weight"], _by_row(parts["weight_scale"], rows).squeeze(1).contiguous())
        case Mxfp4Layout():
            scales = parts["weight_scale"].view(torch.uint8).view(torch.float8_e8m0fnu)
            return Fp4Weight(fp4_linear.unpack(parts["weight_packed"]), scales)
        case Nvfp4Layout():
            divisor = float(parts["weight_global_scale"])
            return Fp4Weight(fp4_linear.unpack(parts["weight_packed"]), parts["weight_scale"], 1 / divisor)
    raise AssertionError(f"{layout} is read nowhere")


def _packed_int4(parts: Mapping[str, Tensor], columns: int) -> GroupedInt4Weight:
    """GPTQ's words, but row by row. Integers and zero points are stored with 8 added to them."""
    scales = parts["weight_scale"].T
    no_zeros = torch.full((scales.shape[1] // 8, scales.shape[0]), _EIGHT_EIGHTS, dtype=torch.int32)
    zeros = parts.get("weight_zero_point", no_zeros)
    groups = parts.get("weight_g_idx", _in_order(columns, len(scales)))
    return grouped_int4_linear.from_gptq(parts["weight_packed"].T, zeros.T, scales, groups, zero_offset=0)


_EIGHT_EIGHTS = 0x88888888 - (1 << 32)
"""An int32 of eight zero points that are 0, with 8 added to each."""


def _in_order(columns: int, num_groups: int) -> Tensor:
    """The group of each input where groups lie in order."""
    return torch.arange(num_groups).repeat_interleave(columns // num_groups)


def _by_row(scales: Tensor, rows: int) -> Tensor:
    """[rows, groups] float32 of scales for each group of a row, for each row, or for all."""
    return scales.float().reshape(-1, scales.shape[1] if scales.dim() == 2 else 1).expand(rows, -1).contiguous()
