"""Plans: the limit that binds, what more or less of anything does to them, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plan.planning import make_70b_config, make_config
from servekit.config.errors import ConfigError
from servekit.config.plan import PlanConfig, PlanMemoryConfig
from servekit.config.roofline import EfficiencyConfig, GpuName, Precision
from servekit.config.schema import Config, Device, KernelSet, MemoryConfig, ModelConfig, Quantization, SchedulerConfig
from servekit.model.shapes import SHAPES
from servekit.plan.capacity import CapacityPlan, Limit, plan_capacity, replicas_for
from servekit.runner.device import DeviceFacts
from servekit.runner.memory import Formats, plan_memory

CONFIGS = st.builds(
    make_config, gpu=st.sampled_from(GpuName), rate_per_s=st.floats(0.01, 1000),
    prompt_tokens=st.integers(1, 6000), output_tokens=st.integers(2, 2000), tensor_parallel=st.sampled_from([1, 2, 8]),
    tpot_s=st.none() | st.floats(0.003, 0.2), ttft_s=st.none() | st.floats(0.02, 5),
    max_num_seqs=st.none() | st.integers(1, 1000), max_utilization=st.floats(0.1, 1))


def plan_or_none(config: PlanConfig) -> CapacityPlan | None:
    try:
        return plan_capacity(config)
    except ConfigError:
        return None


def planned(config: PlanConfig) -> CapacityPlan:
    plan = plan_or_none(config)
    assume(plan is not None)
    assert plan is not None
    return plan


# --- which limit binds -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("changes", "limit"), [
    ({}, Limit.kv), ({"tpot_s": 0.05}, Limit.tpot), ({"tpot_s": 0.5}, Limit.kv),
    ({"tpot_s": 0.05, "ttft_s": 0.045}, Limit.ttft), ({"max_num_seqs": 16, "tpot_s": 0.05}, Limit.max_num_seqs)])
def test_the_binding_limit(changes: dict[str, Any], limit: Limit) -> None:
    plan = plan_capacity(make_config(**changes))
    assert plan.binding.limit is limit
    assert plan.binding.requests_per_s == min(bound.requests_per_s for bound in plan.bounds)


def test_every_bound_lies_on_its_limit() -> None:
    config = make_config(tpot_s=0.05, ttft_s=0.1, max_num_seqs=64)
    plan = plan_capacity(config)
    points = {bound.limit: bound.point for bound in plan.bounds}
    assert points[Limit.throughput] is None and points[Limit.prefill] is None
    assert points[Limit.kv].kv_tokens == pytest.approx(plan.memory.kv_tokens)  # type: ignore[union-attr]
    assert points[Limit.tpot].tpot_s == pytest.approx(0.05)  # type: ignore[union-attr]
    assert points[Limit.ttft].ttft_s == pytest.approx(0.1)  # type: ignore[union-attr]
    assert points[Limit.max_num_seqs].num_decodes == 64  # type: ignore[union-attr]


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS)
def test_the_plan_keeps_its_limits(config: PlanConfig) -> None:
    """At the planned rate, and a little below the highest; there is no smaller plan that does."""
    plan = planned(config)
    for rate in (plan.rate_per_s, 0.999 * plan.highest_rate_per_s):
        point = plan.steady.at_rate(rate / plan.replicas)
        assert config.tpot_s is None or point.tpot_s <= config.tpot_s * (1 + 1e-6)
        assert config.ttft_s is None or point.ttft_s <= config.ttft_s * (1 + 1e-6)
        assert config.max_num_seqs is None or point.num_decodes <= config.max_num_seqs * (1 + 1e-6)
        assert point.kv_tokens <= plan.memory.kv_tokens * (1 + 1e-6)
    assert plan.utilization <= config.max_utilization * (1 + 1e-6)
    if plan.replicas > 1:
        fewer = (plan.replicas - 1) * plan.binding.requests_per_s
        assert plan.rate_per_s > config.max_utilization * fewer * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS)
def test_prefill_alone_never_binds(config: PlanConfig) -> None:
    plan = planned(config)
    rates = {bound.limit: bound.requests_per_s for bound in plan.bounds}
    assert plan.binding.limit is not Limit.prefill and rates[Limit.throughput] < rates[Limit.prefill]


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS)
def test_littles_law_over_all_replicas(config: PlanConfig) -> None:
    plan = planned(config)
    assert plan.replicas * plan.point.num_in_flight == pytest.approx(plan.rate_per_s * plan.point.e2e_s, rel=1e-4)


# --- more and less ---------------------------------------------------------------------------------------------------

@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, factor=st.floats(1, 100))
def test_a_higher_rate_never_needs_fewer(config: PlanConfig, factor: float) -> None:
    assert config.rate_per_s is not None
    more = replace(config, rate_per_s=config.rate_per_s * factor)
    assert planned(more).replicas >= planned(config).replicas


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, other=st.sampled_from(GpuName))
def test_a_bigger_gpu_never_needs_more(config: PlanConfig, other: GpuName) -> None:
    small, big = sorted((config.gpu, other), key=list(GpuName).index)
    plan = planned(replace(config, gpu=small))
    assert plan_capacity(replace(config, gpu=big)).replicas <= plan.replicas


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, change=st.sampled_from(["prompt_tokens", "output_tokens"]), factor=st.floats(1, 4))
def test_longer_requests_never_need_fewer(config: PlanConfig, change: str, factor: float) -> None:
    longer = replace(config, **{change: getattr(config, change) * factor})
    assert planned(longer).replicas >= planned(config).replicas


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, change=st.sampled_from(["tpot_s", "ttft_s", "max_num_seqs", "max_utilization"]))
def test_a_dropped_limit_never_needs_more(config: PlanConfig, change: str) -> None:
    without = replace(config, **{change: 1.0 if change == "max_utilization" else None})
    plan = planned(config)
    assert plan_capacity(without).replicas <= plan.replicas


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, name=st.sampled_from(["compute", "bandwidth", "link"]))
def test_better_kernels_never_need_more(config: PlanConfig, name: str) -> None:
    better = replace(config, efficiency=EfficiencyConfig(**{name: 1.0}))
    plan = planned(config)
    assert plan_capacity(better).replicas <= plan.replicas


@settings(max_examples=50, deadline=None)
@given(config=CONFIGS, replicas=st.integers(1, 50))
def test_what_replicas_hold_needs_as_many(config: PlanConfig, replicas: int) -> None:
    """The two questions are each other's inverse."""
    holds = planned(replace(config, rate_per_s=None, replicas=replicas))
    assert holds.replicas == replicas and holds.utilization == pytest.approx(config.max_utilization)
    assert planned(replace(config, rate_per_s=holds.rate_per_s)).replicas == replicas


@settings(max_examples=50, deadline=None)
@given(rate=st.floats(1e-6, 1e6), each=st.floats(1e-3, 1e3))
def test_replicas_for(rate: float, each: float) -> None:
    count = replicas_for(rate, each)
    assert count >= 1 and count * each >= rate * (1 - 1e-6) and (count - 1) * each <= rate


# --- memory and GPUs -------------------------------------------------------------------------------------------------

def test_where_the_memory_goes() -> None:
    memory = plan_capacity(make_70b_config(memory=PlanMemoryConfig(0.9, 0.2))).memory
    assert memory.total_bytes == 160e9 and memory.usable_bytes == pytest.approx(0.9 * 0.8 * 160e9)
    assert memory.weights_bytes == pytest.approx(69.5e9, rel=1e-3)
    # Of each GPU, whole hidden states and logits, and half of the feed-forward and the heads.
    step_bytes = 8192 * 2 * (4 * 8192 + 3 * 28672 // 2 + 80 * 128 // 2) + 2 * 4 * 256 * 32000
    assert memory.activation_bytes == 2 * step_bytes
    assert memory.kv_bytes == memory.usable_bytes - memory.weights_bytes - memory.activation_bytes
    assert memory.kv_tokens == memory.kv_bytes // (16 * 163_840) * 16


def test_the_reckoning_is_the_engines() -> None:
    """A capacity plan and the memory planner of an engine on such a GPU find the same room for keys and values."""
    planned = plan_capacity(make_config(max_num_seqs=200)).memory
    gpu = DeviceFacts(Device.cuda, "H200", 8, 141 * 10**9, 141 * 10**9, 0)
    config = Config(ModelConfig("dummy:llama-3-8b"), memory=MemoryConfig(memory_fraction=0.9, headroom=0.1),
                    scheduler=SchedulerConfig(max_num_seqs=200, max_step_tokens=8192))
    engine = plan_memory(config, SHAPES["llama-3-8b"], gpu, Formats(Quantization.none, KernelSet.triton, 2, 2))
    assert engine.use.weights_bytes == planned.weights_bytes
    assert engine.use.activation_bytes == planned.activation_bytes
    assert engine.num_kv_blocks * 16 == planned.kv_tokens


def test_gpus_and_spares() -> None:
    plan = plan_capacity(make_70b_config(spare_replicas=2))
    assert (plan.gpus, plan.gpus_with_spares) == (2 * plan.replicas, 2 * plan.replicas + 4)


def test_a_model_from_its_config_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, '
                    '"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, '
                    '"num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05}')
    named, read = (plan_capacity(make_config(model=model)) for model in ("llama-2-7b", str(path)))
    assert read.bounds == named.bounds


# --- what cannot be carried ------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"tpot_s": 0.003}, ["tpot_s=0.003", "reading the weights once", "0.0031 s at full bandwidth"]),
    ({"tpot_s": 0.004}, ["tpot_s=0.004", "a single request gets a token every", "tensor_parallel"]),
    ({"ttft_s": 0.02}, ["ttft_s=0.02", "computing the prompt takes"]),
    ({"model": "llama-3-70b"}, ["tensor_parallel=1", "the weights take 141.1 GB", "114.2 GB"]),
    ({"model": "llama-2-70b", "gpu": GpuName.h100, "weight_precision": Precision.fp8, "prompt_tokens": 3000.0,
      "memory": PlanMemoryConfig(0.969), "prefill_batch_tokens": 512},
     ["prompt_tokens=3000", "does not fit", "192 tokens"]),
    ({"prompt_tokens": 8000.0}, ["prompt_tokens=8000", "output_tokens=200", "8192 tokens"]),
    ({"replicas": 1, "rate_per_s": 100.0}, ["replicas=1", "the queue grows by", "utilisation 3.98", "set replicas=6"]),
    ({"gpu": GpuName.a100, "weight_precision": Precision.fp8}, ["weight_precision=fp8", "bfloat16, int8"]),
    ({"tensor_parallel": 3}, ["tensor_parallel=3", "8 key-value heads"]),
    ({"model": "llama-9b"}, ["model=llama-9b", "llama-3-8b", "config.json"]),
]


@pytest.mark.parametrize(("changes", "fragments"), REFUSED)
def test_the_impossible_is_refused_with_its_reason(changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_capacity(make_config(**changes))
    assert [fragment for fragment in fragments if fragment not in str(error.value)] == [], error.value


@pytest.mark.parametrize(("changes", "key"), [
    ({"rate_per_s": None}, "rate_per_s"), ({"rate_per_s": 0.0}, "rate_per_s"), ({"rate_per_s": math.nan}, "rate_per_s"),
    ({"rate_per_s": math.inf}, "rate_per_s"), ({"replicas": 0}, "replicas"), ({"prompt_tokens": 0.0}, "prompt_tokens"),
    ({"output_tokens": 1.0}, "output_tokens"), ({"tpot_s": 0.0}, "tpot_s"), ({"ttft_s": -1.0}, "ttft_s"),
    ({"max_utilization": 1.1}, "max_utilization"), ({"spare_replicas": -1}, "spare_replicas"),
    ({"max_num_seqs": 0}, "max_num_seqs"), ({"tensor_parallel": 0}, "tensor_parallel"),
    ({"prefill_batch_tokens": 0}, "prefill_batch_tokens")])
def test_bounds_of_the_settings(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(**changes)
    assert error.value.key == key


def test_the_remedies_work() -> None:
    """What a refusal says is enough, or too little, is."""
    floor_s = plan_capacity(make_config()).replica.weight_streaming_s
    alone_s = plan_capacity(make_config()).steady.at(1e-9).tpot_s
    assert floor_s < alone_s
    assert plan_or_none(make_config(tpot_s=alone_s * 0.999)) is None
    assert plan_or_none(make_config(tpot_s=alone_s * 1.001)) is not None
    assert plan_or_none(make_config(replicas=6, rate_per_s=100.0)) is not None
