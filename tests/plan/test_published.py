"""The offline throughput that the planner finds, against figures that others measured.

TensorRT-LLM 1.0, docs/source/performance/perf-overview.md of its repository: output tokens per second at unlimited
load, in FP8 unless it says FP4. Its engine decodes at most 2048 requests at once by default. That its KV cache was in
FP8 and its engine used 95 % of the memory is assumed here.
"""

from __future__ import annotations

import pytest

from plan.planning import WHOLE_MEMORY
from servekit.config.plan import PlanConfig
from servekit.config.roofline import EfficiencyConfig, GpuName, Precision
from servekit.plan.capacity import plan_capacity

TOLERANCE = 0.15
FP8_ROWS = [
    ("llama-3.1-8b", GpuName.h200, 1, 128, 128, 27_911),
    ("llama-3.1-8b", GpuName.h200, 1, 128, 2048, 26_221),
    ("llama-3.1-8b", GpuName.h200, 1, 1000, 1000, 17_744),
    ("llama-3.1-8b", GpuName.h200, 1, 2048, 128, 3_538),
    ("llama-3.1-8b", GpuName.h200, 1, 2048, 2048, 12_194),
    ("llama-3.1-8b", GpuName.h200, 1, 5000, 500, 3_902),
    ("llama-3.3-70b", GpuName.h200, 1, 128, 128, 3_803),
    ("llama-3.3-70b", GpuName.h200, 1, 1000, 1000, 2_909),
    ("llama-3.3-70b", GpuName.h200, 1, 2048, 128, 442),
    ("llama-3.3-70b", GpuName.h200, 1, 2048, 2048, 2_003),
    ("llama-3.1-8b", GpuName.h100, 1, 128, 128, 28_312),
    ("llama-3.1-8b", GpuName.h100, 1, 128, 2048, 22_714),
    ("llama-3.1-8b", GpuName.h100, 1, 1000, 1000, 15_220),
    ("llama-3.1-8b", GpuName.h100, 1, 2048, 2048, 9_305),
    ("llama-3.3-70b", GpuName.h100, 2, 128, 128, 6_378),
    ("llama-3.3-70b", GpuName.h100, 2, 1000, 1000, 4_205),
]
FP4_ROWS = [(128, 128, 11_147), (1000, 1000, 7_007)]


def offline_tokens_per_s(config: PlanConfig) -> float:
    return plan_capacity(config).binding.requests_per_s * config.output_tokens


@pytest.mark.parametrize(("model", "gpu", "tensor_parallel", "prompt", "output", "published"), FP8_ROWS)
def test_fp8_throughput(model: str, gpu: GpuName, tensor_parallel: int, prompt: int, output: int,
                        published: float) -> None:
    config = PlanConfig(
        model=model, gpu=gpu, tensor_parallel=tensor_parallel, weight_precision=Precision.fp8,
        kv_precision=Precision.fp8, prompt_tokens=prompt, output_tokens=output, replicas=1, max_num_seqs=2048,
        memory=WHOLE_MEMORY)
    assert offline_tokens_per_s(config) == pytest.approx(published, rel=TOLERANCE)


@pytest.mark.parametrize(("prompt", "output", "published"), FP4_ROWS)
def test_fp4_throughput_needs_a_lower_efficiency(prompt: int, output: int, published: float) -> None:
    """What EfficiencyConfig says of fp4: 0.38 fits, and the default promises too much."""
    config = {
        efficiency: PlanConfig(
            model="llama-3.3-70b", gpu=GpuName.b200, weight_precision=Precision.fp4, kv_precision=Precision.fp8,
            prompt_tokens=prompt, output_tokens=output, replicas=1, max_num_seqs=2048, memory=WHOLE_MEMORY,
            efficiency=EfficiencyConfig(compute=efficiency))
        for efficiency in (0.38, 0.55)}
    assert offline_tokens_per_s(config[0.38]) == pytest.approx(published, rel=TOLERANCE)
    assert offline_tokens_per_s(config[0.55]) > 1.3 * published
