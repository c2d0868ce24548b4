"""Models by name: shapes without weights, for `dummy:` sources, capacity plans and step-time models.

The figures are those of each model's published config.json (Llama 2: Touvron et al., 2023; Llama 3, 3.1 and 3.3:
Llama Team, 2024; Qwen3: Qwen Team, 2025; SmolLM2: Ben Allal et al., 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from servekit.model.spec import Family, Llama3Scaling, ModelSpec, RopeSpec
from servekit.model.spec_huggingface import read_config_spec

_LLAMA_2_7B = ModelSpec(
    family=Family.llama, vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32,
    num_kv_heads=32, head_dim=128, max_position=4096, rms_eps=1e-5, rope=RopeSpec(), windows=(None,) * 32,
    tied_head=False, checkpoint_dtype="float16",
)
_LLAMA_2_70B = replace(
    _LLAMA_2_7B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8,
    windows=(None,) * 80,
)
_LLAMA_3_8B = ModelSpec(
    family=Family.llama, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position=8192, rms_eps=1e-5, rope=RopeSpec(500_000.0), windows=(None,) * 32,
    tied_head=False, checkpoint_dtype="bfloat16",
)
_LLAMA_3_70B = replace(
    _LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, windows=(None,) * 80,
)
_LLAMA_31_ROPE = RopeSpec(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))

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
    "qwen3-0.6b": ModelSpec(
        family=Family.qwen3, vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, max_position=40960, rms_eps=1e-6, rope=RopeSpec(1_000_000.0),
        windows=(None,) * 28, tied_head=True, qk_norm=True, checkpoint_dtype="bfloat16",
    ),
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-70b": _LLAMA_2_70B,
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": replace(_LLAMA_3_8B, max_position=131072, rope=_LLAMA_31_ROPE),
    "llama-3.3-70b": replace(_LLAMA_3_70B, max_position=131072, rope=_LLAMA_31_ROPE),
})
"""Named shapes. They have no end-of-sequence token: random weights would stop a benchmark at random."""


def find_shape(shape: str) -> ModelSpec | None:
    """The spec of a named shape, or of the config.json at the path `shape`; None if it is neither.

    Raises ConfigError as `read_config_spec` does for a config.json that cannot be used.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    return read_config_spec(Path(shape)) if Path(shape).is_file() else None
