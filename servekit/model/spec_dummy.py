"""The spec of a `dummy:` source: a shape without weights."""

from __future__ import annotations

from servekit.config.errors import ConfigError
from servekit.model.shapes import SHAPES, find_shape
from servekit.model.spec import ModelSpec


def read_dummy_spec(shape: str) -> ModelSpec:
    """The spec of a named shape, or of the config.json at the path `shape`.

    Raises ConfigError for a name that is neither, and as `read_config_spec` for a config.json.
    """
    spec = find_shape(shape)
    if spec is None:
        raise ConfigError("model.source", f"dummy:{shape}", f"no such shape; there are: {', '.join(SHAPES)}",
                          "name one of them, or the path of a config.json")
    return spec
