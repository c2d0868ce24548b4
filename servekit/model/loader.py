"""From files to a decoder: reading a model's spec, then its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.config.schema import Quantization
from servekit.model.local import LocalModel, SourceKind
from servekit.model.spec import ModelSpec
from servekit.model.spec_dummy import read_dummy_spec
from servekit.model.spec_gguf import read_gguf_spec
from servekit.model.spec_huggingface import read_huggingface_spec

if TYPE_CHECKING:
    import torch

    from servekit.kernels import Kernels
    from servekit.model.decoder import Decoder
    from servekit.model.sharding import Shard
    from servekit.model.weights import TensorSource


def load_spec(local: LocalModel) -> ModelSpec:
    """Read what a model is, without its weights and without importing torch.

    Raises ModelFileError for a missing or malformed file, ConfigError for a model that cannot be computed.
    """
    match local.kind:
        case SourceKind.folder:
            return read_huggingface_spec(local.files)
        case SourceKind.gguf:
            return read_gguf_spec(local.files)
        case SourceKind.dummy:
            return read_dummy_spec(local.shape)


def load_decoder(local: LocalModel, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels,
                 max_model_len: int, progress: Callable[[int, int], None],
                 quantization: Quantization = Quantization.none, report: str | None = None,
                 shard: Shard | None = None) -> Decoder:
    """Read a model's weights and build its decoder.

    Args:
        local: Where the model is.
        spec: What `load_spec` returned for it.
        dtype: Number format of weights and activations.
        device: Where the weights go.
        kernels: Implementation of the operations.
        max_model_len: Longest context that will be asked for, in tokens.
        progress: Called with the bytes read so far and the bytes in all, of the checkpoint.
        quantization: Of the weight matrices; see `load_weights`.
        report: File for the error of each matrix's products; None: none is measured.
        shard: This rank's part of the model; None: all of it.

    Raises ModelFileError for a file or tensor that is missing, unexpected, misshapen or truncated, ConfigError for a
    quantisation that the kernels do not have for it and for a report that cannot be written.
    """
    from servekit.model.decoder import Decoder
    from servekit.model.quantization_report import QuantizationReport
    from servekit.model.sharding import cut, with_sums
    from servekit.model.weights import load_weights

    errors = None if report is None else QuantizationReport(Path(report), dtype, device)
    source = _tensor_source(local, spec)
    if shard is not None:
        source, spec = cut(source, spec, shard)
    weights = load_weights(source, spec, dtype, device, kernels, quantization, progress, errors)
    if errors is not None:
        errors.close()
    return Decoder(spec, weights if shard is None else with_sums(weights, shard), kernels, max_model_len)


def _tensor_source(local: LocalModel, spec: ModelSpec) -> TensorSource:
    from servekit.model.weights_dummy import DummyTensors
    from servekit.model.weights_gguf import GgufTensors
    from servekit.model.weights_quantized import QuantizedFolder
    from servekit.model.weights_safetensors import SafetensorsFiles, SafetensorsFolder

    match local.kind:
        case SourceKind.folder:
            files = SafetensorsFiles(local.files)
            stored = spec.stored_quantization
            return SafetensorsFolder(files, spec) if stored is None else QuantizedFolder(files, spec, stored)
        case SourceKind.gguf:
            return GgufTensors(local.files, spec)
        case SourceKind.dummy:
            return DummyTensors(spec, local.seed)
