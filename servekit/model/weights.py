"""From named tensors to the decoder's weights: checks them all, then reads, fuses and converts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from servekit.config.errors import require
from servekit.config.schema import Quantization
from servekit.kernels import Kernels, Product, int4_linear, int8_linear
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.decoder import DecoderWeights, LayerWeights, Linear
from servekit.model.local import ModelFileError
from servekit.model.spec import ModelSpec, tensor_shapes

Integers = TypeVar("Integers", Int8Weight, Int4Weight)


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
        """The tensor, in any number format. Raises ModelFileError if its data is unusable."""

    def read_integers(self, name: str) -> Int8Weight | Int4Weight | None:
        """The matrix as the integers that the checkpoint stores; None if it stores others, or none."""


def load_weights(source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels,
                 quantization: Quantization, progress: Callable[[int, int], None]) -> DecoderWeights:
    """Read all weights of a model.

    Args:
        source: The checkpoint.
        spec: The model that the checkpoint must hold: exactly these tensors in exactly these shapes.
        dtype: Number format of what is not quantised.
        device: Where the result lies.
        kernels: Prepare the matrices for their products.
        quantization: Of the matrices: none, int8 by output channel, or int4 by groups of 32 with an int8 head. What
            the checkpoint itself stores in such integers is taken as it is.
        progress: Called with the bytes read so far and the bytes in all.

    Raises ModelFileError, naming the tensor, if one is missing, unexpected, misshapen or unusable.
    """
    _check(source, tensor_shapes(spec))
    return _Assembler(source, spec, dtype, device, kernels, quantization, progress).decoder()


def _check(source: TensorSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    stored = source.tensors
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
                 kernels: Kernels, quantization: Quantization, progress: Callable[[int, int], None]) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self._source = source
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._total_bytes = sum(tensor.num_bytes for tensor in source.tensors.values())
        self._read_bytes = 0

    def decoder(self) -> DecoderWeights:
        self._progress(0, self._total_bytes)
        embedding = self._tensor("model.embed_tokens.weight")
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(self._spec.num_layers))
        final_norm = self._tensor("model.norm.weight")
        return DecoderWeights(embedding, layers, final_norm, self._head(embedding))

    def _head(self, embedding: Tensor) -> Linear:
        name = "model.embed_tokens.weight" if self._spec.tied_head else "lm_head.weight"
        if self._quantization is not Quantization.none:
            return Linear(self._int8([name]))
        return Linear(self._kernels.dense(embedding if self._spec.tied_head else self._tensor(name)))

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

    def _linear(self, has_bias: bool, *names: str) -> Linear:
        return Linear(product=self._product([f"{name}.weight" for name in names]),
                      bias=self._fused([f"{name}.bias" for name in names]) if has_bias else None)

    def _product(self, names: list[str]) -> Product:
        """The matrices below one another, ready to multiply."""
        match self._quantization:
            case Quantization.int8:
                return self._int8(names)
            case Quantization.int4:
                return self._int4(names)
            case _:
                return self._kernels.dense(self._fused(names))

    def _int8(self, names: list[str]) -> Product:
        return self._kernels.int8(self._integers(names, Int8Weight, int8_linear.quantize))

    def _int4(self, names: list[str]) -> Product:
        columns = self._source.tensors[names[0]].shape[1]
        require(columns % int4_linear.GROUP_SIZE == 0, "model.quantization", "int4",
                f"{names[0]} has {columns} columns, not a multiple of {int4_linear.GROUP_SIZE}",
                "set model.quantization=int8")
        return self._kernels.int4(self._integers(names, Int4Weight, int4_linear.quantize))

    def _integers(self, names: list[str], kind: type[Integers], quantize: Callable[[Tensor], Integers]) -> Integers:
        """The matrices below one another: the checkpoint's own integers if all are of this kind, else rounded here."""
        stored = [self._source.read_integers(name) for name in names]
        parts = [part for part in stored if isinstance(part, kind)]
        if len(parts) < len(names):
            parts = [quantize(self._source.read(name)) for name in names]
        self._count(names)
        return kind(*(torch.cat(fields).to(self._device) for fields in zip(*map(_fields, parts), strict=True)))

    def _fused(self, names: list[str]) -> Tensor:
        """The tensors below one another, each converted straight into its place."""
        shapes = [self._source.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty(sum(rows), *shapes[0][1:], dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            part.copy_(self._source.read(name))
            self._count([name])
        return fused

    def _count(self, names: list[str]) -> None:
        self._read_bytes += sum(self._source.tensors[name].num_bytes for name in names)
        self._progress(min(self._read_bytes, self._total_bytes), self._total_bytes)

    def _tensor(self, name: str) -> Tensor:
        return self._fused([name])


def _fields(weight: Int8Weight | Int4Weight) -> tuple[Tensor, ...]:
    """The tensors of a quantised weight; each has one row for each output channel."""
    return tuple(getattr(weight, field.name) for field in fields(weight))
