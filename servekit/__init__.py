"""servekit: assemble an LLM serving engine from named components, serve it, and measure it."""

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit.engine.llm import LLM

__all__ = ["LLM", "__version__"]

__version__ = metadata.version("servekit")


def __getattr__(name: str) -> object:
    # The offline engine imports torch, which takes seconds; only those who want it wait for it.
    if name == "LLM":
        from servekit.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'servekit' has no attribute {name!r}")
