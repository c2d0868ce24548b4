"""What quantisation costs in accuracy, matrix by matrix, as a model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from servekit.config.errors import ConfigError
from servekit.kernels import Product
from servekit.model.weights import TensorSource

_NUM_INPUTS = 16
"""Rows of activations that each matrix is multiplied by."""

_log = logging.getLogger(__name__)


class QuantizationReport:
    """A CSV file with the relative error of the products of each matrix.

    Inputs are normal with a standard deviation of 1. The error of a matrix is |y - x W'| / |x W'|, over all outputs of
    all inputs, with W the checkpoint's numbers and the right side computed in float64.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for a file that cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("model.quantization_report", str(path), f"cannot be written ({error.strerror})",
                              "name a file in a folder to write in, or set model.quantization_report=null") from None
        self._path = path
        self._dtype = dtype
        self._device = device
        self._worst = (0.0, "")
        self._file.write("matrix,relative_error\n")

    def __call__(self, source: TensorSource, names: list[str], product: Product) -> None:
        """Add the matrices that `product` multiplies by; see `OnMatrices`."""
        columns = source.tensors[names[0]].shape[1]
        generator = torch.Generator().manual_seed(columns)
        inputs = torch.randn(_NUM_INPUTS, columns, generator=generator).to(self._device, self._dtype)
        outputs = torch.split(product(inputs), [source.tensors[name].shape[0] for name in names], dim=-1)
        for name, output in zip(names, outputs, strict=True):
            error = _relative_error(output, inputs, source.read(name))
            self._worst = max(self._worst, (error, name))
            self._file.write(f"{name},{error:.3e}\n")

    def close(self) -> None:
        """Write what is left, and log the largest error."""
        self._file.close()
        _log.info("products of %s err most, by %.2e; all matrices: %s", self._worst[1], self._worst[0], self._path)


def _relative_error(output: Tensor, inputs: Tensor, matrix: Tensor) -> float:
    expected = inputs.cpu().double() @ matrix.double().T
    return float((output.cpu().double() - expected).norm() / expected.norm())
