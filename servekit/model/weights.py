"""From named tensors to the decoder's weights: checks them all, then reads, fuses and converts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from servekit.config.errors import ConfigError, require
from servekit.config.schema import Quantization
from servekit.kernels import Kernels, Product
from servekit.model.decoder import DecoderWeights, LayerWeights, Linear
from servekit.model.local import ModelFileError
from servekit.model.quantization import SCHEMES, QuantizedWeight, Scheme, SideBySide, join, prepare, to_device
from servekit.model.spec import ModelSpec, tensor_shapes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of a tensor before it is read."""

    shape: tuple[int, ...]
    num_bytes: int
    """Size in the checkpoint."""


class TensorSource(Protocol):
    """A checkpoint, whatever its format. Names and shapes are Hugging Face's."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor that has a say in what the model computes."""

    def describe(self, name: str) -> str:
        """The tensor's name in the checkpoint, and where that is; for errors."""

    def read(self, name: str) -> Tensor:
        """The tensor's numbers, in any format, dequantised. Raises ModelFileError if its data is unusable."""

    def read_stored(self, name: str) -> QuantizedWeight | None:
        """The matrix as it is quantised; None if it is not, or in a way that no kernel knows."""


class OnMatrices(Protocol):
    """Told of every product with matrices, once it is prepared."""

    def __call__(self, source: TensorSource, names: list[str], product: Product) -> None:
        """The matrices `names` of the checkpoint, below one another, are multiplied by as `product`."""


def load_weights(source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels,
                 quantization: Quantization, progress: Callable[[int, int], None],
                 on_matrices: OnMatrices | None = None) -> DecoderWeights:
    """Read all weights of a model.

    Args:
        source: The checkpoint.
        spec: The model that the checkpoint must hold: exactly these tensors in exactly these shapes.
        dtype: Number format of what is not quantised.
        device: Where the result lies.
        kernels: Prepare the matrices for their products.
        quantization: Of the matrices; not `auto`. What the checkpoint itself stores so is taken as it is; then its
            exceptions, such as the head, stay plain numbers too. Everything else is rounded from its plain numbers.
        progress: Called with the bytes read so far and the bytes in all.
        on_matrices: Told of every product.

    Raises ModelFileError, naming the tensor, if one is missing, unexpected, misshapen or unusable, and ConfigError if
    the kernels cannot multiply by one in this quantisation.
    """
    check_tensors(source, spec)
    return _Assembler(source, spec, dtype, device, kernels, quantization, progress, on_matrices).decoder()


def check_tensors(source: TensorSource, spec: ModelSpec) -> None:
    """Raise ModelFileError, naming the tensor, unless the checkpoint holds the model's tensors and no others."""
    stored, expected = source.tensors, tensor_shapes(spec)
    for name, shape in expected.items():
        if name not in stored:
            raise ModelFileError(f"{source.describe(name)} is missing; the model is incomplete, fetch it again")
        if stored[name].shape != shape:
            raise ModelFileError(f"{source.describe(name)} has the shape {list(stored[name].shape)}, but the model's "
                                 f"configuration asks for {list(shape)}")
    if unexpected := sorted(stored.keys() - expected.keys()):
        raise ModelFileError(f"{source.describe(unexpected[0])} is unexpected ({len(unexpected)} such in all): the "
                             "model computes something that its configuration does not say")


class _Assembler:
    """Reads tensors in the order of computation and counts their bytes."""

    def __init__(self, source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device,
                 kernels: Kernels, quantization: Quantization, progress: Callable[[int, int], None],
                 on_matrices: OnMatrices | None) -> None:
        stored = spec.stored_quantization
        self._source = source
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._quantization = quantization
        self._scheme = SCHEMES.get(quantization)
        self._keeps_stored = stored is not None and quantization in stored.kept_by
        self._progress = progress
        self._on_matrices = on_matrices
        self._total_bytes = sum(tensor.num_bytes for tensor in source.tensors.values())
        self._read_bytes = 0

    def decoder(self) -> DecoderWeights:
        self._progress(0, self._total_bytes)
        embedding = self._tensor(_EMBEDDING)
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(self._spec.num_layers))
        final_norm = self._tensor("model.norm.weight")
        return DecoderWeights(embedding, layers, final_norm, self._head(embedding))

    def _layer(self, layer: str) -> LayerWeights:
        spec, attention, mlp = self._spec, f"{layer}.self_attn", f"{layer}.mlp"
        return LayerWeights(
            attention_norm=self._tensor(f"{layer}.input_layernorm.weight"),
            qkv=self._linear(spec.qkv_bias, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=self._tensor(f"{attention}.q_norm.weight") if spec.qk_norm else None,
            k_norm=self._tensor(f"{attention}.k_norm.weight") if spec.qk_norm else None,
            o=self._linear(spec.o_bias, f"{attention}.o_proj"),
            mlp_norm=self._tensor(f"{layer}.post_attention_layernorm.weight"),
            gate_up=self._linear(spec.mlp_bias, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._linear(spec.mlp_bias, f"{mlp}.down_proj"),
        )

    def _linear(self, has_bias: bool, *modules: str) -> Linear:
        names = [f"{module}.weight" for module in modules]
        return Linear(product=self._told(names, self._product(names)),
                      bias=self._fused([f"{module}.bias" for module in modules]) if has_bias else None)

    def _head(self, embedding: Tensor) -> Linear:
        names = [_EMBEDDING if self._spec.tied_head else _HEAD]
        return Linear(self._told(names, self._head_product(names, embedding)))

    def _told(self, names: list[str], product: Product) -> Product:
        if self._on_matrices is not None:
            self._on_matrices(self._source, names, product)
        return product

    # A product with the matrices `names` below one another.

    def _product(self, names: list[str]) -> Product:
        if self._scheme is None:
            return self._plain(names)
        return self._kept(names, self._scheme) if self._keeps_stored else self._rounded(names, self._scheme)

    def _head_product(self, names: list[str], embedding: Tensor) -> Product:
        rounded_by = None if self._keeps_stored else self._scheme
        if rounded_by is not None and rounded_by.rounds_head:
            return self._rounded(names, SCHEMES[Quantization.int8])
        if self._spec.tied_head:
            return self._kernels.dense(embedding)
        return self._plain(names) if rounded_by is not None else self._product(names)

    def _plain(self, names: list[str]) -> Product:
        return self._kernels.dense(self._fused(names))

    def _kept(self, names: list[str], scheme: Scheme) -> Product:
        """As the checkpoint has them, each in its own form where they cannot be joined."""
        stored = [self._source.read_stored(name) for name in names]
        weights = [weight for weight in stored if weight is not None]
        if not weights:
            return self._plain(names)
        joined = join(weights) if len(weights) == len(names) else None
        if joined is None:
            return SideBySide(tuple(self._kept([name], scheme) for name in names))
        self._count(names)
        return self._prepared(joined, names, scheme)

    def _rounded(self, names: list[str], scheme: Scheme) -> Product:
        """As the checkpoint has them if all are quantised in this way, else rounded from their numbers."""
        stored = [self._source.read_stored(name) for name in names]
        weights = [weight for weight in stored if weight is not None and scheme.takes(weight)]
        joined = join(weights) if len(weights) == len(names) else None
        weight = self._round(names, scheme) if joined is None else joined
        self._count(names)
        return self._prepared(weight, names, scheme)

    def _round(self, names: list[str], scheme: Scheme) -> QuantizedWeight:
        columns = self._source.tensors[names[0]].shape[1]
        require(columns % scheme.group_size == 0, "model.quantization", self._quantization.value,
                f"{names[0]} has {columns} columns, not a multiple of {scheme.group_size}",
                "set model.quantization=int8")
        return scheme.quantize(torch.cat([self._source.read(name).to(self._device) for name in names]))

    def _prepared(self, weight: QuantizedWeight, names: list[str], scheme: Scheme) -> Product:
        try:
            return prepare(to_device(weight, self._device), self._kernels, scheme.rounds_inputs)
        except ValueError as error:
            raise ConfigError("model.quantization", self._quantization.value, f"{names[0]}: {error}",
                              "set model.quantization=none or engine.kernels=reference") from error

    # Tensors.

    def _fused(self, names: list[str]) -> Tensor:
        """The tensors below one another, each converted straight into its place."""
        shapes = [self._source.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty(sum(rows), *shapes[0][1:], dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            part.copy_(self._source.read(name))
            self._count([name])
        return fused

    def _tensor(self, name: str) -> Tensor:
        return self._fused([name])

    def _count(self, names: list[str]) -> None:
        self._read_bytes += sum(self._source.tensors[name].num_bytes for name in names)
        self._progress(min(self._read_bytes, self._total_bytes), self._total_bytes)
