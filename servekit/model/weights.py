"""From named tensors to the decoder's weights: checks them all, then reads, fuses and converts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from servekit.model.decoder import DecoderWeights, LayerWeights, Linear
from servekit.model.local import ModelFileError
from servekit.model.spec import ModelSpec, tensor_shapes


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


def load_weights(source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device,
                 progress: Callable[[int, int], None]) -> DecoderWeights:
    """Read all weights of a model.

    Args:
        source: The checkpoint.
        spec: The model that the checkpoint must hold: exactly these tensors in exactly these shapes.
        dtype: Number format of the result.
        device: Where the result lies.
        progress: Called with the bytes read so far and the bytes in all.

    Raises ModelFileError, naming the tensor, if one is missing, unexpected, misshapen or unusable.
    """
    _check(source, tensor_shapes(spec))
    return _Assembler(source, spec, dtype, device, progress).decoder()


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
                 progress: Callable[[int, int], None]) -> None:
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
        head = embedding if self._spec.tied_head else self._tensor("lm_head.weight")
        return DecoderWeights(embedding, layers, final_norm, head)

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
        return Linear(weight=self._fused([f"{name}.weight" for name in names]),
                      bias=self._fused([f"{name}.bias" for name in names]) if has_bias else None)

    def _fused(self, names: list[str]) -> Tensor:
        """The tensors below one another, each converted straight into its place."""
        shapes = [self._source.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty(sum(rows), *shapes[0][1:], dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            part.copy_(self._source.read(name))
            self._read_bytes += self._source.tensors[name].num_bytes
            self._progress(self._read_bytes, self._total_bytes)
        return fused

    def _tensor(self, name: str) -> Tensor:
        return self._fused([name])
