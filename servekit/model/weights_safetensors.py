"""Weights from the safetensors of a folder in Hugging Face format."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_TYPE_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8,
                                  "I32": 4, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class FileTensor:
    """What the files say of a tensor."""

    shape: tuple[int, ...]
    type: str
    """As safetensors names it."""

    @property
    def num_bytes(self) -> int:
        """Size in the file; 0 for a type that cannot be read."""
        return math.prod(self.shape) * _TYPE_BYTES.get(self.type, 0)


class SafetensorsFiles:
    """The tensors of one file, or of the shards that an index names, whatever they stand for."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFileError for a missing, truncated or malformed file."""
        self._folder = folder
        self._files: dict[str, Any] = {}
        self.tensors: dict[str, FileTensor] = {}
        for shard in _shards(folder):
            self._add(shard)

    def describe(self, name: str) -> str:
        """A tensor and where it is, for errors."""
        return f"{self._folder}: tensor {name}"

    def require_type(self, name: str, *readable: str) -> None:
        """Raise ModelFileError for a tensor of another type."""
        if (kind := self.tensors[name].type) not in readable:
            raise ModelFileError(f"{self.describe(name)} has the type {kind}; only {', '.join(readable)} can be read")

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _add(self, path: Path) -> None:
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            names = [name for name in file.keys() if not name.endswith(_HARMLESS_ENDINGS)]  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: not a complete safetensors file ({error}); fetch it again") from error
        for name in names:
            view = file.get_slice(name)
            self.tensors[name] = FileTensor(tuple(view.get_shape()), view.get_dtype())
            self._files[name] = file


class SafetensorsFolder:
    """Tensors of plain numbers."""

    def __init__(self, files: SafetensorsFiles, spec: ModelSpec, without: Collection[str] = ()) -> None:
        """All tensors of the files but those that stand for something else.

        Raises ModelFileError for a tensor of another type, and for a tied head that is not the embedding.
        """
        self._files = files
        self._tensors: dict[str, StoredTensor] = {}
        for name, tensor in files.tensors.items():
            if name not in without:
                files.require_type(name, *FLOAT_TYPES)
                self._tensors[name] = StoredTensor(tensor.shape, tensor.num_bytes)
        if spec.tied_head and _HEAD in self._tensors:
            self._drop_copied_head()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def describe(self, name: str) -> str:
        return self._files.describe(name)

    def read(self, name: str) -> Tensor:
        return self._files.read(name)

    def read_stored(self, name: str) -> None:
        """None: these are plain numbers."""

    def _drop_copied_head(self) -> None:
        """A tied head may be stored, as long as it is the embedding."""
        if not torch.equal(self.read(_HEAD), self.read(_EMBEDDING)):
            raise ModelFileError(f"{self.describe(_HEAD)} differs from {_EMBEDDING}, but config.json says "
                                 "tie_word_embeddings; correct one of them")
        del self._tensors[_HEAD]


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
