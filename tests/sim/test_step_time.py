"""Step shapes from plans, and the roofline's step times against arithmetic by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.config.errors import ConfigError
from servekit.config.roofline import EfficiencyConfig, GpuName, Precision
from servekit.core.plan import BlockCopy, Plan, PlanItem
from servekit.core.request import Request, RequestId, RequestSpec, SamplingParams
from servekit.model.shapes import SHAPES
from servekit.sim.gpus import GPUS
from servekit.sim.replica import Replica
from servekit.sim.step_time import PromptChunk, RooflineStepTime, StepShape, step_shape

PERFECT = EfficiencyConfig(compute=1, bandwidth=1, link=1, step_overhead_s=0, layer_overhead_s=0,
                           all_reduce_latency_s=0)
SHAPES_OF_STEPS = st.builds(
    StepShape, st.integers(1, 500), st.integers(1, 10**6),
    st.lists(st.builds(PromptChunk, st.integers(2, 8192), st.integers(0, 8192)), max_size=4),
    st.integers(0, 500), st.integers(0, 100))


def roofline(model: str = "llama-3-8b", gpu: GpuName = GpuName.h200, tensor_parallel: int = 1,
             weights: Precision = Precision.bfloat16, kv: Precision = Precision.bfloat16,
             efficiency: EfficiencyConfig = PERFECT) -> RooflineStepTime:
    return RooflineStepTime(Replica(SHAPES[model], GPUS[gpu], tensor_parallel, weights, kv), efficiency)


def decodes(count: int, context: int = 1024) -> StepShape:
    return StepShape(count, count * context, num_sampled=count)


# --- shapes ----------------------------------------------------------------------------------------------------------

def item(name: str, start: int, num_tokens: int, samples: bool) -> PlanItem:
    spec = RequestSpec(RequestId(name), tuple(range(100)), SamplingParams(max_tokens=9), arrived_s=0.0)
    return PlanItem(Request(spec, max_model_len=200), start, num_tokens, samples)


def test_the_shape_of_a_plan() -> None:
    items = (item("a", 120, 1, True), item("b", 99, 1, True), item("c", 32, 16, False), item("d", 0, 100, True))
    plan = Plan(items=items, num_tokens=118, swap_out=(BlockCopy(1, 2),), swap_in=(BlockCopy(3, 4), BlockCopy(5, 6)))
    shape = step_shape(plan)
    assert shape == StepShape(2, 121 + 100, [PromptChunk(16, 32), PromptChunk(100, 0)], 3, 3)
    assert shape.num_tokens == plan.num_tokens


def test_an_empty_plan_takes_no_time() -> None:
    assert roofline(efficiency=EfficiencyConfig()).step_s(step_shape(Plan(items=(), num_tokens=0))) == 0


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("model", "streamed_bytes", "kv_bytes"), [
    ("llama-2-7b", 13.21e9, 524_288), ("llama-2-70b", 137.4e9, 327_680), ("llama-3-8b", 15.01e9, 131_072)])
def test_bytes_that_a_step_reads(model: str, streamed_bytes: float, kv_bytes: float) -> None:
    replica = Replica(SHAPES[model], GPUS[GpuName.b200])
    assert replica.layer_bytes + replica.head_bytes == pytest.approx(streamed_bytes, rel=1e-3)
    assert replica.kv_bytes_per_token == kv_bytes
    assert replica.weights_bytes == SHAPES[model].num_parameters * 2


def test_only_the_layers_are_quantised() -> None:
    whole, half = (Replica(SHAPES["llama-3-8b"], GPUS[GpuName.h100], weights=precision)
                   for precision in (Precision.bfloat16, Precision.fp8))
    assert whole.weights_bytes - half.weights_bytes == SHAPES["llama-3-8b"].num_matrix_parameters
    assert half.head_bytes == whole.head_bytes == 2 * 128256 * 4096


@pytest.mark.parametrize(("changes", "fragments"), [
    ({"gpu": GpuName.a100, "weights": Precision.fp8}, ["weight_precision=fp8", "bfloat16, int8"]),
    ({"tensor_parallel": 3}, ["tensor_parallel=3", "8 key-value heads"])])
def test_what_does_not_go_together_is_refused(changes: dict[str, object], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        roofline(**changes)  # type: ignore[arg-type]
    assert all(fragment in str(error.value) for fragment in fragments)


def test_sliding_windows_are_refused() -> None:
    windowed = SHAPES["tiny"].__class__(**vars(SHAPES["tiny"]) | {"windows": (None, 128)})
    with pytest.raises(ConfigError, match="sliding window"):
        Replica(windowed, GPUS[GpuName.h100])


# --- times: peak figures, at 1024 tokens of context, worked out by hand -----------------------------------------------

@pytest.mark.parametrize(("model", "gpu", "count", "milliseconds"), [
    ("llama-2-7b", GpuName.a100, 1, 6.74), ("llama-2-7b", GpuName.h100, 32, 9.07),
    ("llama-3-8b", GpuName.a100, 32, 9.47), ("llama-3-8b", GpuName.h200, 1, 3.155),
    ("llama-3-8b", GpuName.h200, 32, 4.02), ("llama-3-8b", GpuName.h200, 256, 11.04),
    ("llama-2-70b", GpuName.h200, 256, 53.4)])
def test_decode_steps(model: str, gpu: GpuName, count: int, milliseconds: float) -> None:
    assert roofline(model, gpu).step_s(decodes(count)) * 1e3 == pytest.approx(milliseconds, rel=5e-3)


def test_a_prompt_is_bound_by_arithmetic() -> None:
    flops = 2 * SHAPES["llama-3-8b"].num_matrix_parameters * 1024 + 4 * 32 * 32 * 128 * 1024 * 1025 / 2
    head_s = 2 * 128256 * 4096 / 4.8e12  # one row: bound by reading
    shape = StepShape(chunks=[PromptChunk(1024, 0)], num_sampled=1)
    assert roofline().step_s(shape) == pytest.approx(flops / 989e12 + head_s)


def test_a_chunk_attends_to_what_was_computed_before() -> None:
    whole = roofline().parts(StepShape(chunks=[PromptChunk(8192, 0)])).attention_s
    parts = sum(roofline().parts(StepShape(chunks=[PromptChunk(2048, start)])).attention_s
                for start in range(0, 8192, 2048))
    assert parts == pytest.approx(whole)


def test_a_chunk_and_decodes_read_the_weights_once() -> None:
    mixed = StepShape(32, 32 * 1024, [PromptChunk(64, 0)], 32)
    assert roofline().parts(mixed).linear_s == roofline().parts(decodes(32)).linear_s


def test_overheads_add() -> None:
    efficiency = EfficiencyConfig(1, 1, 1, step_overhead_s=0.5, layer_overhead_s=0.01, all_reduce_latency_s=0)
    slow, fast = roofline(efficiency=efficiency), roofline()
    assert slow.step_s(decodes(1)) - fast.step_s(decodes(1)) == pytest.approx(0.5 + 32 * 0.01)


def test_all_reduces() -> None:
    efficiency = EfficiencyConfig(1, 1, 0.5, 0, 0, all_reduce_latency_s=1e-5)
    parts = roofline("llama-3-70b", GpuName.h100, 4, Precision.fp8, efficiency=efficiency).parts(decodes(100))
    transfer_s = 2 * 3 / 4 * 100 * 8192 * 2 / (0.5 * 450e9)
    assert parts.communication_s == pytest.approx(160 * (1e-5 + transfer_s))
    assert roofline(efficiency=efficiency).parts(decodes(100)).communication_s == 0


def test_sharding_divides_everything_but_overheads_and_all_reduces() -> None:
    one, two = (roofline(tensor_parallel=n).parts(decodes(64)) for n in (1, 2))
    assert two.linear_s == pytest.approx(one.linear_s / 2) and two.attention_s == pytest.approx(one.attention_s / 2)


def test_swapped_blocks_cross_the_host_link() -> None:
    seconds = roofline().step_s(StepShape(num_swapped_blocks=10))
    assert seconds == pytest.approx(10 * 16 * 131_072 / 64e9)


@pytest.mark.parametrize(("precision", "factor"), [(Precision.fp8, 1 / 2), (Precision.int8, 1 / 2),
                                                   (Precision.fp4, 4.5 / 16)])
def test_smaller_keys_and_values_are_read_faster(precision: Precision, factor: float) -> None:
    small, large = roofline(kv=precision).parts(decodes(9)), roofline().parts(decodes(9))
    assert small.attention_s == pytest.approx(factor * large.attention_s)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES_OF_STEPS)
def test_parts_add_up(shape: StepShape) -> None:
    model = roofline(efficiency=EfficiencyConfig())
    parts = model.parts(shape)
    assert model.step_s(shape) == pytest.approx(
        parts.overhead_s + parts.linear_s + parts.attention_s + parts.communication_s)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES_OF_STEPS)
def test_a_newer_gpu_is_never_slower(shape: StepShape) -> None:
    times = [roofline(gpu=gpu, efficiency=EfficiencyConfig()).step_s(shape) for gpu in GpuName]
    assert times == sorted(times, reverse=True)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES_OF_STEPS, more=st.integers(1, 1000))
def test_more_to_compute_never_takes_less(shape: StepShape, more: int) -> None:
    model = roofline(efficiency=EfficiencyConfig())
    chunks = [*shape.chunks, PromptChunk(more + 1, more)]
    longer = StepShape(shape.num_decodes, shape.decode_context_tokens + more, chunks, shape.num_sampled + 1,
                       shape.num_swapped_blocks + 1)
    assert model.step_s(longer) > model.step_s(shape)
