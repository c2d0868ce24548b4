"""Decode steps as graphs: the table of sizes, the filling up, the buffers, and tokens equal to those of eager steps.

A recording stands in for a CUDA graph: it does the captured work again on the same tensors, over the same result. The
kernels beside it know no more than a graph's do: they read lengths from the device's tensors only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.helpers import make_spec
from engine.helpers import build, dummy_model, make_config, run, spec
from engine.test_equality import crowd, crowd_alone, outputs
from engine.test_overlap import LateQueue
from engine.test_resolve import CPU, CUDA
from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError
from servekit.config.schema import Config, EngineConfig, KernelSet, ModelConfig, SchedulerConfig
from servekit.core.plan import Plan, PlanItem
from servekit.core.request import Request
from servekit.engine import build as engine_build
from servekit.engine.build import ReconfigurableEngine
from servekit.engine.execution import Execution, default_graph_sizes, resolve_execution
from servekit.kernels import AttentionBatch, Kernels, attention, reference_kernels, rope_and_cache
from servekit.model.loader import load_spec
from servekit.runner.graphs import CapturedWork, DecodeGraphs, GraphInputs, GraphSizes, graph_bytes
from servekit.runner.inputs import SampledTokens, build_inputs
from servekit.runner.memory import MemoryPlan, plan_memory

# --- The table of sizes -----------------------------------------------------------------------------------------------


@given(sizes=st.sets(st.integers(1, 300), min_size=1), num_decodes=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_the_smallest_size_that_holds_them_is_picked(sizes: set[int], num_decodes: int) -> None:
    picked = GraphSizes(tuple(sorted(sizes))).pick(num_decodes)
    assert picked == min((size for size in sizes if size >= num_decodes), default=None)


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)),
                                             (100, (1, 2, 4, 8, 16, 32, 64, 100))])
def test_sizes_double_up_to_the_most_requests(most: int, sizes: tuple[int, ...]) -> None:
    assert default_graph_sizes(most) == sizes


@pytest.mark.parametrize(("sizes", "words"), [
    ("[]", "must not be empty"), ("[4,2]", r"must ascend, each size once; set engine.graph_batch_sizes=\[2,4\]"),
    ("[2,2]", "must ascend, each size once"), ("[0,2]", "must be numbers of at least 1; leave out 0"),
    ("[1,17]", "must not exceed scheduler.max_num_seqs=16")])
def test_bad_sizes_are_refused_with_one_line(sizes: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        compose_serve(["model.source=x", "scheduler.max_num_seqs=16", f"engine.graph_batch_sizes={sizes}"])
    assert refusal.value.key == "engine.graph_batch_sizes" and "\n" not in str(refusal.value)


def test_sizes_beside_no_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs=false"):
        EngineConfig(cuda_graphs=False, graph_batch_sizes=(1,))


def execution(engine: EngineConfig, machine: Any = CUDA, kernels: KernelSet = KernelSet.triton) -> Execution:
    config = Config(ModelConfig("dummy:tiny"), engine, scheduler=SchedulerConfig(max_num_seqs=5))
    return resolve_execution(config, machine, kernels)


def test_what_is_left_open_comes_to_graphs_and_overlap_on_a_gpu() -> None:
    assert execution(EngineConfig()) == Execution(True, (1, 2, 4, 5), (
        "engine.overlap: null -> true", "engine.cuda_graphs: null -> 1, 2, 4, 5"))
    assert execution(EngineConfig(), kernels=KernelSet.reference).graph_sizes == ()
    assert execution(EngineConfig(), CPU, KernelSet.cpu) == Execution(False, (), ())


def test_what_is_asked_for_is_what_comes() -> None:
    assert execution(EngineConfig(overlap=False, cuda_graphs=False)) == Execution(False, (), ())
    assert execution(EngineConfig(overlap=True, graph_batch_sizes=(2, 3))).graph_sizes == (2, 3)
    assert execution(EngineConfig(overlap=True), CPU, KernelSet.cpu).overlap


@pytest.mark.parametrize("engine", [EngineConfig(cuda_graphs=True), EngineConfig(graph_batch_sizes=(1,))], ids=str)
@pytest.mark.parametrize(("machine", "kernels"), [(CPU, KernelSet.cpu), (CUDA, KernelSet.reference)], ids=str)
def test_graphs_are_refused_where_there_can_be_none(engine: EngineConfig, machine: Any, kernels: KernelSet) -> None:
    with pytest.raises(ConfigError, match="CUDA graphs hold the Triton operations on a GPU"):
        execution(engine, machine, kernels)


def test_bytes_of_graphs_grow_with_their_number_and_their_largest() -> None:
    tiny = load_spec(dummy_model())
    sizes: list[tuple[int, ...]] = [(), (1,), (1, 8), (1, 4, 8), (1, 4, 64)]
    found = [graph_bytes(tiny, some, 512, 16, 2) for some in sizes]
    assert found[0] == 0 and found == sorted(set(found))


# --- Plans and buffers ------------------------------------------------------------------------------------------------

BLOCK = 4


def item(name: str, num_tokens: int, start: int, count: int) -> PlanItem:
    request = Request(make_spec(name, num_tokens), 64)
    request.block_ids = list(range(10 * int(name), 10 * int(name) + -(-num_tokens // BLOCK)))
    return PlanItem(request, start, count, start + count == num_tokens)


def plan_of(*items: PlanItem) -> Plan:
    return Plan(items, sum(item.num_tokens for item in items))


DECODES = [item("1", 9, 8, 1), item("2", 4, 3, 1), item("3", 13, 12, 1)]


def test_rows_that_fill_up_write_nowhere_and_read_nothing_even_after_a_larger_step() -> None:
    inputs = GraphInputs(4, 20, BLOCK, torch.device("cpu"))
    inputs.fill(build_inputs(plan_of(*DECODES), BLOCK, SampledTokens(())), 4)
    inputs.fill(build_inputs(plan_of(DECODES[1]), BLOCK, SampledTokens(())), 2)
    graph = inputs.of(2)
    assert graph.batch.slots.tolist() == [20 * BLOCK + 3, -1] and graph.batch.context_lens.tolist() == [4, 0]
    assert graph.positions.tolist() == [3, 0] and graph.batch.query_start.tolist() == [0, 1, 2]
    assert graph.batch.block_tables[0, 0] == 20


def test_inputs_of_all_sizes_lie_at_the_same_addresses() -> None:
    inputs = GraphInputs(4, 20, BLOCK, torch.device("cpu"))
    inputs.fill(build_inputs(plan_of(*DECODES), BLOCK, SampledTokens(())), 4)
    small, large = inputs.of(1), inputs.of(4)
    assert small.token_ids.data_ptr() == large.token_ids.data_ptr() and len(large.token_ids) == 4
    expected = build_inputs(plan_of(*DECODES), BLOCK, SampledTokens(()))
    assert large.token_ids[:3].tolist() == expected.token_ids.tolist()
    assert large.batch.block_tables[:3, :4].tolist() == expected.batch.block_tables.tolist()


def test_only_steps_of_decodes_and_nothing_else_are_graphs() -> None:
    graphs = DecodeGraphs(GraphSizes((2, 4)), GraphInputs(4, 20, BLOCK, torch.device("cpu")),
                          lambda inputs: inputs.token_ids.double().unsqueeze(1), Recorder(), lambda *_: None)
    part, whole = item("4", 9, 3, 1), item("5", 9, 0, 9)
    assert graphs.pick(plan_of(*DECODES)) == 4 and graphs.pick(plan_of(DECODES[0])) == 2
    for others in ([], [*DECODES, part], [*DECODES, whole], [part], [item(str(n), 4, 3, 1) for n in range(5)]):
        assert graphs.pick(plan_of(*others)) is None


# --- A real engine ----------------------------------------------------------------------------------------------------

@dataclass
class Recorded:
    """Work that is done again; its result is written over."""

    work: Callable[[], Tensor]
    result: Tensor
    told: list[int]

    def replay(self) -> Tensor:
        self.told.append(len(self.result))
        self.result.copy_(self.work())
        return self.result


@dataclass
class Recorder:
    """In the place of a GPU's capture."""

    captured: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)

    def capture(self, work: Callable[[], Tensor]) -> CapturedWork:
        result = work().clone()
        self.captured.append(len(result))
        return Recorded(work, result, self.replayed)


def kernels_as_in_a_graph() -> Kernels:
    def rope(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
             slots: Tensor) -> Tensor:
        written = slots >= 0
        rope_and_cache.reference(q[written], k[written], v[written], cos_sin, positions[written], keys, values,
                                 slots[written])
        nowhere = torch.zeros((len(q), *keys.shape[1:]), dtype=keys.dtype)
        return rope_and_cache.reference(q, k, v, cos_sin, positions, nowhere, nowhere.clone(),
                                        torch.arange(len(q)) * keys.shape[2])

    def attend(q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, scale: float,
               window: int | None) -> Tensor:
        """Row by row, since the reference has no answer for a context of 0."""
        lengths, starts = batch.context_lens.tolist(), batch.query_start.tolist()
        seen = [row for row, length in enumerate(lengths) if length]
        out = torch.zeros_like(q)
        for row in seen:
            first, end = starts[row], starts[row + 1]
            one = dataclasses.replace(batch, block_tables=batch.block_tables[row:row + 1],
                                      query_start_host=(0, end - first), context_lens_host=(lengths[row],))
            out[first:end] = attention.reference(q[first:end], keys, values, one, scale, window)
        return out

    return dataclasses.replace(reference_kernels(), rope_and_cache=rope, paged_attention=attend)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Engines of this test run graphs of the sizes that are asked for, as if their device were a GPU."""
    recorder = Recorder()

    def as_on_a_gpu(config: Config, device: object, kernels: object) -> Execution:
        return Execution(config.engine.overlap or False, config.engine.graph_batch_sizes or (), ())

    monkeypatch.setattr(engine_build, "CudaCapturer", lambda: recorder)
    monkeypatch.setattr(engine_build, "reference_kernels", kernels_as_in_a_graph)
    monkeypatch.setattr(engine_build, "resolve_execution", as_on_a_gpu)
    monkeypatch.setattr(engine_build, "work_queue", lambda device, overlap: LateQueue())
    return recorder


def graph_config(overlap: bool = False, sizes: tuple[int, ...] = (1, 3, 5), **options: Any) -> Config:
    return make_config(**({"num_kv_blocks": 26, "block_size": 8, "max_model_len": 96, "chunk_tokens": 16} | options),
                       engine=EngineConfig(threads=1, overlap=overlap, graph_batch_sizes=sizes))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_answer_as_eager_steps_do(recorder: Recorder, overlap: bool, temperature: float) -> None:
    engine = build(graph_config(overlap)).engine
    assert recorder.captured == [5, 3, 1], "the largest claims the memory that the others share"
    assert outputs(run(engine, crowd(temperature=temperature))) == crowd_alone(temperature)
    counts = engine.stats().breakdown
    assert counts is not None and set(counts.executions) == {"eager", "graph_1", "graph_3", "graph_5"}
    assert sum(counts.executions.values()) == engine.stats().num_steps_total
    assert {f"graph_{size}": recorder.replayed.count(size) for size in (1, 3, 5)} == {
        name: count for name, count in counts.executions.items() if name != "eager"}


def test_prompts_and_more_decodes_than_the_largest_graph_are_computed_eagerly(recorder: Recorder) -> None:
    engine = build(graph_config(sizes=(2,))).engine
    run(engine, [spec([number], 4) for number in range(2)])
    # The first step is of prompts of one token, which are like decodes.
    assert recorder.replayed == [2, 2, 2, 2]
    run(engine, [spec([number, 7], 4) for number in range(2)])
    assert recorder.replayed == [2] * 7
    run(engine, [spec([number], 4) for number in range(3)])
    assert recorder.replayed == [2] * 7


def test_the_start_tells_how_many_graphs_are_captured(recorder: Recorder) -> None:
    told: list[tuple[str, int, int, str]] = []
    engine_build.build_engine(graph_config(), dummy_model(), engine_build.Path("unused"),
                              lambda *progress: told.append(progress))
    assert [progress for progress in told if progress[0] == "CUDA graphs"] == [
        ("CUDA graphs", done, 3, "graphs") for done in range(4)]


def test_the_memory_planner_is_told_of_graphs(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def watched(*given: Any) -> MemoryPlan:
        told.append(given[-1])
        return plan_memory(*given)

    monkeypatch.setattr(engine_build, "plan_memory", watched)
    build(graph_config(sizes=(1, 4)))
    assert told == [graph_bytes(load_spec(dummy_model()), (1, 4), 96, 8, 8)] * 2, "before and after the weights came"


def test_other_sizes_are_captured_without_loading_the_model_again(recorder: Recorder) -> None:
    host = ReconfigurableEngine(graph_config(), build(graph_config()))
    host.reconfigure(graph_config(sizes=(2, 4)))
    assert recorder.captured == [5, 3, 1, 4, 2]
    with pytest.raises(ConfigError, match=r"engine=.*cannot change while the model is loaded"):
        host.reconfigure(graph_config(overlap=True))
