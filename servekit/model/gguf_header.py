"""The header of a GGUF file: its metadata and where each tensor lies, read in one pass.

The layout is that of the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian:
magic, version, counts, key-value pairs, tensor descriptions, padding, tensor data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servekit.model.local import ModelFileError

GgufValue = int | float | bool | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct letters of the scalar value types."""
_DEFAULT_ALIGNMENT_BYTES = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's description."""

    name: str
    shape: tuple[int, ...]
    """Dimensions as the file gives them, fastest-varying first: the reverse of torch's order."""
    ggml_type: int
    """Number of the ggml type; gguf.GGMLQuantizationType names it."""
    offset_bytes: int
    """Position of its data from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything a GGUF file says before its tensor data."""

    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises ModelFileError if it is missing, truncated or malformed."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).header()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from error
    except ValueError as error:
        raise ModelFileError(f"{path}: not a complete GGUF file ({error}); fetch it again") from error


class _Parser:
    """Reads one value after another. Raises ValueError where the bytes make no sense."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        if self._data[:len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are little-endian 2 and 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata = dict(self._pair() for _ in range(num_pairs))
        described = [self._tensor() for _ in range(num_tensors)]
        start = self._start_of_data(metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES))
        return GgufHeader(metadata, {name: GgufTensor(name, shape, ggml_type, start + offset)
                                     for name, shape, ggml_type, offset in described})

    def _pair(self) -> tuple[str, GgufValue]:
        key = self._string()
        return key, self._value(self._scalar("I"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalars("Q", self._scalar("I")))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _start_of_data(self, alignment_bytes: GgufValue) -> int:
        if not isinstance(alignment_bytes, int) or alignment_bytes < 1:
            raise ValueError(f"its general.alignment is {alignment_bytes}")
        return -(-self._at // alignment_bytes) * alignment_bytes

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        value: GgufValue = self._scalar(_letter(kind))
        return value

    def _array(self) -> list[GgufValue]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return [*self._strings(length)]
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        return self._scalars(_letter(kind), length)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are some 10^5 strings."""
        data, at, size = self._data, self._at, len(self._data)
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise ValueError("it ends inside its header")
            strings.append(data[start:at].decode())
        self._at = at
        return strings

    def _scalar(self, letter: str) -> Any:
        return self._scalars(letter, 1)[0]

    def _scalars(self, letter: str, count: int) -> list[Any]:
        start = self._at
        self._at = start + struct.calcsize(f"<{letter}") * count
        if self._at > len(self._data):
            raise ValueError("it ends inside its header")
        return list(struct.unpack_from(f"<{count}{letter}", self._data, start))


def _letter(kind: int) -> str:
    if kind not in _SCALAR_FORMATS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _SCALAR_FORMATS[kind]
