"""A model that is on this machine, and the error its files raise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class SourceKind(Enum):
    """What a model is stored as."""

    folder = "folder"
    """A folder in Hugging Face format: config.json and safetensors."""
    gguf = "gguf"
    """One .gguf file."""
    dummy = "dummy"
    """Nothing: random weights of a given shape."""


@dataclass(frozen=True)
class LocalModel:
    """Where the files of a model are. Nothing about them has been checked yet."""

    kind: SourceKind
    name: str
    """What clients call it."""
    path: Path | None
    """The folder or the file; None for `dummy`."""
    shape: str = ""
    """For `dummy`: the name of a shape, or the path of a config.json."""
    seed: int = 0
    """For `dummy`: seed of the random weights."""

    @property
    def files(self) -> Path:
        """The folder or the file. Raises ValueError for `dummy`, which has neither."""
        if self.path is None:
            raise ValueError(f"{self.name} has no files")
        return self.path


class ModelFileError(RuntimeError):
    """A model file that is missing, incomplete or wrong; one line naming the file or the tensor."""
