"""Plans to start from."""

from __future__ import annotations

from typing import Any

from servekit.config.plan import PlanConfig, PlanMemoryConfig
from servekit.config.roofline import GpuName, Precision

WHOLE_MEMORY = PlanMemoryConfig(memory_fraction=0.95, headroom=0.0)


def make_config(**changes: Any) -> PlanConfig:
    """Llama-3-8B in 16 bits on one H200, prompts of 1000 and outputs of 200 tokens, 10 requests per second."""
    usual: dict[str, Any] = {"model": "llama-3-8b", "gpu": GpuName.h200, "prompt_tokens": 1000.0,
                             "output_tokens": 200.0, "rate_per_s": 10.0}
    return PlanConfig(**usual | changes)


def make_70b_config(**changes: Any) -> PlanConfig:
    """Llama-2-70B in 8 bits on H100 pairs, 1000 requests per second of 200 and 200 tokens."""
    usual: dict[str, Any] = {
        "model": "llama-2-70b", "gpu": GpuName.h100, "tensor_parallel": 2, "weight_precision": Precision.fp8,
        "kv_precision": Precision.fp8, "prompt_tokens": 200.0, "output_tokens": 200.0, "rate_per_s": 1000.0}
    return PlanConfig(**usual | changes)
