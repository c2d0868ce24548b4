"""A model divided among ranks: each has some of the heads and some of the feed-forward's columns, in every layer.

The matrices that read the hidden state (queries, keys, values, gate, up) are cut by rows, those that write it (o, down)
by columns, so that a layer's two outputs are sums over the ranks (Shoeybi et al., Megatron-LM, 2019). Embedding, norms
and head are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from servekit.config.errors import ConfigError, require
from servekit.config.schema import Quantization
from servekit.kernels import Product
from servekit.kernels.grouped_int4_linear import GroupedInt4Weight
from servekit.model.decoder import DecoderWeights, Linear
from servekit.model.quantization import SCHEMES, QuantizedWeight
from servekit.model.spec import ModelSpec
from servekit.model.stored_quantization import GptqLayout, PackedInt4Layout
from servekit.model.weights import StoredTensor, TensorSource, check_tensors

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Their biases are whole on every rank: they are added to the sum."""
_KEY = "engine.tensor_parallel"
_GGUF_INT8, _GGUF_GROUP = "Q8_0", 32


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int
    """Ranks in all."""
    add_up: Callable[[Tensor], Tensor]
    """The sum of all ranks' values."""

    def part(self, length: int) -> slice:
        """This rank's part of a dimension that is a multiple of the ranks."""
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def shard_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """What one of `size` ranks computes with, and keeps keys and values of."""
    return replace(spec, num_heads=spec.num_heads // size, num_kv_heads=spec.num_kv_heads // size,
                   intermediate_size=spec.intermediate_size // size)


def require_divisible(spec: ModelSpec, quantization: Quantization, size: int) -> None:
    """Raise ConfigError, with the sizes that work, for a model that `size` ranks cannot share."""
    require(size == 1 or not _is_scattered(spec, quantization), _KEY, size, "the checkpoint's columns are in the order "
            "of their importance, and the groups of its quantisation scattered over them", f"set {_KEY}=1")
    group = _column_group(spec, quantization)
    works = [1, *(n for n in range(2, spec.num_kv_heads + 1) if _divides(spec, group, n))]
    whole_groups = f", the columns into whole groups of {group}" if group > 1 else ""
    require(size in works, _KEY, size,
            f"must divide the model's {spec.num_kv_heads} key-value heads and {spec.intermediate_size} feed-forward "
            f"columns{whole_groups}", f"set {_KEY} to {' or '.join(map(str, works))}")


def _divides(spec: ModelSpec, group: int, size: int) -> bool:
    attention_columns = spec.num_heads * spec.head_dim
    return (spec.num_kv_heads % size == 0 and spec.intermediate_size % (size * group) == 0
            and attention_columns % (size * group) == 0)


def _is_scattered(spec: ModelSpec, quantization: Quantization) -> bool:
    stored = spec.stored_quantization
    return (stored is not None and quantization in stored.kept_by
            and isinstance(stored.layout, GptqLayout | PackedInt4Layout) and stored.layout.is_act_order)


def _column_group(spec: ModelSpec, quantization: Quantization) -> int:
    """Neighbouring columns of a matrix that share a scale and stay together; 1 where any cut will do."""
    stored = spec.stored_quantization
    if stored is not None and quantization in stored.kept_by:
        return stored.layout.group_size or 1
    if quantization is Quantization.int8 and spec.checkpoint_dtype == _GGUF_INT8:
        return _GGUF_GROUP
    return SCHEMES[quantization].group_size if quantization in SCHEMES else 1


def cut(source: TensorSource, spec: ModelSpec, shard: Shard) -> tuple[TensorSource, ModelSpec]:
    """One rank's part of a checkpoint and of its model. Raises ModelFileError for a checkpoint of another model."""
    check_tensors(source, spec)
    return _ShardedTensors(source, shard), shard_spec(spec, shard.size)


class _ShardedTensors:
    """The tensors of a checkpoint as one rank has them."""

    def __init__(self, source: TensorSource, shard: Shard) -> None:
        self._source = source
        self._shard = shard

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {name: self._cut(name, tensor) for name, tensor in self._source.tensors.items()}

    def describe(self, name: str) -> str:
        return self._source.describe(name)

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        if _is_cut_by_rows(name):
            return tensor[self._shard.part(len(tensor))]
        return tensor[:, self._shard.part(tensor.shape[1])] if name.endswith(_BY_COLUMNS) else tensor

    def read_stored(self, name: str) -> QuantizedWeight | None:
        """This rank's part of a quantised matrix. Raises ConfigError where the cut would fall into a group."""
        weight = self._source.read_stored(name)
        if weight is None:
            return None
        if _is_cut_by_rows(name):
            return _rows(weight, self._shard)
        return self._columns(name, weight) if name.endswith(_BY_COLUMNS) else weight

    def _cut(self, name: str, tensor: StoredTensor) -> StoredTensor:
        axis = 0 if _is_cut_by_rows(name) else 1 if name.endswith(_BY_COLUMNS) else None
        if axis is None or len(tensor.shape) <= axis:
            return tensor
        shape = list(tensor.shape)
        shape[axis] //= self._shard.size
        return StoredTensor(tuple(shape), tensor.num_bytes // self._shard.size)

    def _columns(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        try:
            return _columns(weight, self._shard)
        except ValueError as error:
            raise ConfigError(_KEY, self._shard.size, f"{name} cannot be cut: {error}",
                              f"set {_KEY}=1, or model.quantization=none") from error


def _is_cut_by_rows(name: str) -> bool:
    return any(f".{module}." in name for module in _BY_ROWS)


def _rows(weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Every field with a row for each output channel; what all rows share stays."""
    return _changed(weight, lambda field, values: values if field == "inputs"
                    else values[shard.part(len(values))].contiguous())


def _columns(weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Codes by columns, and scales with them where a row has more than one. Raises ValueError for a cut in a group."""
    if isinstance(weight, GroupedInt4Weight) and weight.inputs is not None:
        raise ValueError("its columns are in the order of their importance, and groups are scattered")

    def cut(_: str, values: Tensor) -> Tensor:
        if values.dim() == 1 or values.shape[1] == 1:
            return values
        if values.shape[1] % shard.size:
            raise ValueError(f"its {values.shape[1]} groups of columns are no multiple of the ranks")
        return values[:, shard.part(values.shape[1])].contiguous()

    return _changed(weight, cut)


def _changed(weight: QuantizedWeight, change: Callable[[str, Tensor], Tensor]) -> QuantizedWeight:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    changed: dict[str, Any] = {name: change(name, value) if isinstance(value, Tensor) else value
                               for name, value in values.items()}
    return type(weight)(**changed)


@dataclass(frozen=True)
class Summed:
    """A product of which each rank has a part of the columns."""

    product: Product
    add_up: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in / ranks] to [..., out]."""
        return self.add_up(self.product(x))


def with_sums(weights: DecoderWeights, shard: Shard) -> DecoderWeights:
    """The weights of one rank, whose layers' outputs are those of the whole model."""
    def summed(linear: Linear) -> Linear:
        return Linear(Summed(linear.product, shard.add_up), linear.bias)

    return replace(weights, layers=tuple(replace(layer, o=summed(layer.o), down=summed(layer.down))
                                         for layer in weights.layers))
