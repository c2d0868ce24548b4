"""Random weights of a given shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from servekit.model.spec import ModelSpec, tensor_shapes
from servekit.model.weights import StoredTensor

_STANDARD_DEVIATION = 0.02


class DummyTensors:
    """A checkpoint that never was: norms are one, biases and matrices normal with a standard deviation of 0.02.

    A tensor depends on the seed and on its place in the model alone.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        shapes = tensor_shapes(spec)
        self._seeds = {name: seed * len(shapes) + index for index, name in enumerate(shapes)}
        self._tensors = {name: StoredTensor(shape, 4 * torch.Size(shape).numel()) for name, shape in shapes.items()}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def describe(self, name: str) -> str:
        return f"dummy tensor {name}"

    def read(self, name: str) -> Tensor:
        shape = self._tensors[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(self._seeds[name])
        return torch.empty(shape).normal_(std=_STANDARD_DEVIATION, generator=generator)

    def read_stored(self, name: str) -> None:
        """None: these are plain numbers."""
