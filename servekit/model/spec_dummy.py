"""Specs of `dummy:` models: shapes without weights, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from servekit.config.errors import ConfigError
from servekit.model.spec import Family, ModelSpec, RopeSpec
from servekit.model.spec_huggingface import read_config_spec

SHAPES: Mapping[str, ModelSpec] = MappingProxyType({
    "tiny": ModelSpec(
        family=Family.llama, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, max_position=2048, rms_eps=1e-5, rope=RopeSpec(), windows=(None,) * 2,
        tied_head=True,
    ),
    "smollm2-135m": ModelSpec(
        family=Family.llama, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position=8192, rms_eps=1e-5, rope=RopeSpec(100_000.0),
        windows=(None,) * 30, tied_head=True, checkpoint_dtype="bfloat16",
    ),
    "llama-3-8b": ModelSpec(
        family=Family.llama, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_position=8192, rms_eps=1e-5, rope=RopeSpec(500_000.0),
        windows=(None,) * 32, tied_head=False, checkpoint_dtype="bfloat16",
    ),
    "qwen3-0.6b": ModelSpec(
        family=Family.qwen3, vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, max_position=40960, rms_eps=1e-6, rope=RopeSpec(1_000_000.0),
        windows=(None,) * 28, tied_head=True, qk_norm=True, checkpoint_dtype="bfloat16",
    ),
})
"""Named shapes. They have no end-of-sequence token: random weights would stop a benchmark at random."""


def read_dummy_spec(shape: str) -> ModelSpec:
    """The spec of a named shape, or of the config.json at the path `shape`.

    Raises ConfigError for a name that is neither, and as `read_config_spec` for a config.json.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    if Path(shape).is_file():
        return read_config_spec(Path(shape))
    raise ConfigError("model.source", f"dummy:{shape}", f"no such shape; there are: {', '.join(SHAPES)}",
                      "name one of them, or the path of a config.json")
