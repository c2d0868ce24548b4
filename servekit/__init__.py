"""servekit: assemble an LLM serving engine from named components, serve it, and measure it."""

from importlib import metadata

__version__ = metadata.version("servekit")
