"""Weights from the safetensors of a folder in Hugging Face format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from servekit.model.local import ModelFileError
from servekit.model.spec import ModelSpec
from servekit.model.weights import StoredTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_HARMLESS_ENDINGS = ("rotary_emb.inv_freq", "self_attn.rotary_emb.cos_cached", "self_attn.rotary_emb.sin_cached")
"""Tensors that follow from the configuration; the decoder computes its own."""
_TYPE_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFolder:
    """The tensors of one file, or of the shards that an index names."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ModelFileError for a missing, truncated or malformed file."""
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, StoredTensor] = {}
        for shard in _shards(folder):
            self._add(shard)
        if spec.tied_head and _HEAD in self._tensors:
            self._drop_copied_head()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def describe(self, name: str) -> str:
        return f"{self._folder}: tensor {name}"

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def read_integers(self, name: str) -> None:
        """None: these checkpoints hold floating-point numbers."""

    def _add(self, path: Path) -> None:
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            names = [name for name in file.keys() if not name.endswith(_HARMLESS_ENDINGS)]  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: not a complete safetensors file ({error}); fetch it again") from error
        for name in names:
            self._tensors[name] = _stored(file, name, path)
            self._files[name] = file

    def _drop_copied_head(self) -> None:
        """A tied head may be stored, as long as it is the embedding."""
        if not torch.equal(self.read(_HEAD), self.read(_EMBEDDING)):
            raise ModelFileError(f"{self.describe(_HEAD)} differs from {_EMBEDDING}, but config.json says "
                                 "tie_word_embeddings; correct one of them")
        del self._tensors[_HEAD]


def _stored(file: Any, name: str, path: Path) -> StoredTensor:
    view = file.get_slice(name)
    shape, kind = tuple(view.get_shape()), view.get_dtype()
    if kind not in _TYPE_BYTES:
        raise ModelFileError(f"{path}: tensor {name} has the type {kind}; only {', '.join(_TYPE_BYTES)} can be read")
    return StoredTensor(shape, math.prod(shape) * _TYPE_BYTES[kind])


def _shards(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise ModelFileError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; the model is incomplete")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFileError(f"{index}: not a valid index ({error}); fetch it again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFileError(f"{folder / missing[0]}: is missing, but {_INDEX} names it; the model is incomplete")
    return [folder / name for name in names]
