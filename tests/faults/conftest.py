"""The servers of this folder, each started once, when the first test needs it; all have the same random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.configurations import BUSY, SETTINGS, left_as_found
from faults.outputs import Reference
from faults.serving import Served, served


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a context that takes minutes to fill."""
    path = tmp_path_factory.mktemp("endless") / "config.json"
    path.write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    return f"model.source=dummy:{path}"


@pytest.fixture(scope="session")
def start_once(endless_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """The running server of that name."""
    running: dict[str, Served] = {}
    with ExitStack() as stack:
        def server_named(name: str) -> Served:
            if name not in running:
                settings = (endless_model, *BUSY) if name == "busy" else SETTINGS[name]
                running[name] = stack.enter_context(served(tmp_path_factory.mktemp(name), *settings))
            return running[name]

        yield server_named
        for server in running.values():
            server.process.terminate()


@pytest.fixture(scope="session")
def reference(start_once: Callable[[str], Served]) -> Reference:
    return Reference(start_once("reference"))


@pytest.fixture
def roomy(start_once: Callable[[str], Served]) -> Iterator[Served]:
    yield from left_as_found(start_once("roomy"))


@pytest.fixture
def tight(start_once: Callable[[str], Served]) -> Iterator[Served]:
    yield from left_as_found(start_once("tight"))


@pytest.fixture
def busy(start_once: Callable[[str], Served]) -> Iterator[Served]:
    yield from left_as_found(start_once("busy"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a server of the test's own logs to."""
    return tmp_path
