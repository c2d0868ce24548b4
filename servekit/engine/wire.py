"""The wire between a client and an engine process: one ZeroMQ pair socket, msgpack messages."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servekit.config.schema import Config
from servekit.engine.messages import FromEngine, ToEngine
from servekit.model.local import LocalModel


@dataclass(frozen=True)
class StartOrder:
    """What an engine process is told on its standard input, pickled, before anything else.

    The input stays open for as long as the client lives; its end tells the engine that it is alone.
    """

    config: Config
    local: LocalModel
    cache_dir: Path
    address: str
    """ZeroMQ address of the client's socket."""


def to_engine_decoder() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


def from_engine_decoder() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine)


def private_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory for a socket that only this user can reach. Socket paths are limited to about 100 bytes."""
    return tempfile.TemporaryDirectory(prefix="servekit-", ignore_cleanup_errors=True)


def address_in(directory: str, generation: int) -> str:
    """A fresh address for each engine process that a client starts."""
    return f"ipc://{Path(directory) / f'engine-{generation}'}"
