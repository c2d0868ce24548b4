"""The step log: a replay makes the plans that were made, whatever happened; a log that is damaged is told."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.helpers import answer, make_spec
from engine.helpers import build, make_config, run, spec
from servekit.config.compose import compose_serve, recompose
from servekit.config.errors import ConfigError
from servekit.config.resolve import as_dict
from servekit.config.roots import serve_root
from servekit.config.schema import Config, EngineConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, StepResult
from servekit.core.request import FinishReason, RequestId
from servekit.core.scheduler import Scheduler
from servekit.engine.engine import Engine
from servekit.engine.pipeline import Lockstep
from servekit.engine.step_log import (
    Added,
    Opened,
    Planned,
    Record,
    ReplayedStep,
    StepLogError,
    StepLogFile,
    Updated,
    read_step_log,
    replay,
)

SMALL = ("scheduler.max_num_seqs=6", "scheduler.max_step_tokens=64", "scheduler.admission.queue_timeout_s=4",
         "scheduler.admission.request_timeout_s=9", "scheduler.admission.max_queue_requests=12", "model.source=x")
SHAPES = [
    ["scheduler.prefill.chunk_tokens=8"],
    ["scheduler/prefill=whole", "scheduler/preemption=swap", "scheduler/prefix_cache=none"],
    ["scheduler/policy=priority", "scheduler/prefix_cache=radix", "scheduler.prefill.chunk_tokens=8"],
    ["scheduler/policy=vtc", "scheduler/prefill=splitfuse", "scheduler.tenants.weights={t0:2}",
     "scheduler.tenants.quotas={t1:{tokens_per_s:20,burst_tokens:30,kind:hard}}"],
    ["scheduler/policy=srtf", "scheduler.policy.prediction=learned", "scheduler/admission=predicted",
     "scheduler.policy.margin_tokens=2", "scheduler.policy.min_run_tokens=1", "scheduler.prefill.chunk_tokens=8"],
    ["scheduler/policy=mlfq", "scheduler.policy.quantum_s=0.2", "scheduler.prefill.chunk_tokens=8"],
    ["scheduler/batching=dynamic", "scheduler.batching.preferred_batch_sizes=[2,4]", "scheduler/prefill=whole",
     "scheduler/admission=worst_case", "scheduler/preemption=none", "scheduler.batching.max_batch_delay_ms=500"],
]
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_TOKENS, MAX_MODEL_LEN = 24, 8, 4, 64


class Clock:
    """Time that passes only where the test says, by amounts without a short decimal form."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 1e5 + rng.random()

    def __call__(self) -> float:
        self._now += self._rng.random() / 7
        return self._now

    @property
    def now(self) -> float:
        return self._now


class FailingNowAndThen:
    """The fake model, for which some computations fail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def execute(self, plan: Plan) -> StepResult:
        result = answer(plan)
        if result.sampled and self._rng.random() < 0.05:
            failed = self._rng.choice(sorted(result.sampled))
            del result.sampled[failed]
            return StepResult(result.sampled, {failed: "NaN in the logits"})
        return result


def small(*overrides: str) -> Config:
    return compose_serve([*SMALL, *overrides]).config


def scheduler_of(config: Config) -> Scheduler:
    return build_scheduler(config.scheduler, NUM_BLOCKS, BLOCK_TOKENS, MAX_MODEL_LEN, NUM_HOST_BLOCKS)


def opened(config: Config) -> Opened:
    return Opened(as_dict(config), NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_TOKENS, MAX_MODEL_LEN)


def remade(header: Opened) -> Scheduler:
    """A scheduler from nothing but the log."""
    config = recompose(serve_root(), header.config, "step log")
    return build_scheduler(config.scheduler, header.num_kv_blocks, header.block_size_tokens, header.max_model_len,
                           header.num_host_blocks)


def live_through_a_lot(config: Config, path: Path, seed: int, num_steps: int = 250) -> list[Plan]:
    """Run an engine with random arrivals, aborts, failures, timeouts and cache resets; returns what it planned."""
    rng = random.Random(seed)
    clock, plans = Clock(rng), []
    scheduler = scheduler_of(config)

    class Watched:
        def execute(self, plan: Plan) -> StepResult:
            plans.append(plan)
            return FailingNowAndThen(rng).execute(plan)

    with path.open("ab") as file:
        engine = Engine(scheduler, Lockstep(Watched()), clock, StepLogFile(file, opened(config)))
        names = []
        for number in range(num_steps):
            if rng.random() < 0.5:
                names.append(f"r{number}")
                request = make_spec(names[-1], rng.choice([3, 9, 20, 40]), rng.randint(1, 20), arrived_s=clock.now,
                                    tenant=f"t{rng.randint(0, 2)}", priority=rng.randint(0, 2),
                                    predicted=rng.randint(1, 20), timeout_s=rng.choice([None, 3.0]))
                engine.add([dataclasses.replace(request, prompt_token_ids=(*range(9), *request.prompt_token_ids))])
            if names and rng.random() < 0.05:
                engine.abort([RequestId(rng.choice(names))])
            if rng.random() < 0.02:
                engine.reset_prefix_cache()
            if number == num_steps - 20:
                engine.abort_all(FinishReason.shutdown, "the end")
            engine.step()
            engine.check()
    return plans


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(shape)[:60])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_replay_makes_the_same_plans(shape: list[str], seed: int, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    plans = live_through_a_lot(small(*shape), path, seed)
    steps = list(replay(read_step_log(path), remade))
    assert [step.replayed for step in steps] == [step.recorded for step in steps]
    assert [(s.recorded.bound, len(s.recorded.items)) for s in steps if s.recorded.items] == [
        (plan.bound, len(plan.items)) for plan in plans if plan.items]
    assert sum(len(step.recorded.items) for step in steps) > 200, "hardly anything happened"


def test_the_log_holds_preemptions_swaps_and_timeouts(tmp_path: Path) -> None:
    live_through_a_lot(small(*SHAPES[1]), tmp_path / "steps.jsonl", seed=3)
    planned = [record for record in read_step_log(tmp_path / "steps.jsonl") if isinstance(record, Planned)]
    assert any(record.preempted for record in planned)
    assert any(record.swap_out for record in planned) and any(record.swap_in for record in planned)
    assert any(record.ended for record in planned)


def first_difference(steps: Iterator[ReplayedStep]) -> ReplayedStep | None:
    return next((step for step in steps if step.recorded != step.replayed), None)


def test_another_configuration_plans_differently(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    live_through_a_lot(small(*SHAPES[0]), path, seed=1)
    assert first_difference(replay(read_step_log(path), lambda _: scheduler_of(small(*SHAPES[0])))) is None
    other = small("scheduler.prefill.chunk_tokens=7")
    assert first_difference(replay(read_step_log(path), lambda _: scheduler_of(other))) is not None


def test_a_restarted_engine_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for seed in (1, 2):
        live_through_a_lot(small(*SHAPES[0]), path, seed, num_steps=60)
    assert sum(isinstance(record, Opened) for record in read_step_log(path)) == 2
    assert first_difference(replay(read_step_log(path), remade)) is None


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    live_through_a_lot(small(*SHAPES[0]), path, seed=1, num_steps=40)
    whole: list[Record] = list(read_step_log(path))
    path.write_bytes(path.read_bytes()[:-7])
    assert list(read_step_log(path)) == whole[:-1]


@pytest.mark.parametrize(("line", "words"), [
    (b"{]\n", "steps.jsonl:2: "), (b'{"type":"planned","at_s":1}\n', "steps.jsonl:2: .*items"),
    (b'{"type":"opened","format_version":9,"config":{},"num_kv_blocks":1,"num_host_blocks":0,'
     b'"block_size_tokens":1,"max_model_len":1}\n', "version 9 of the format, not 1")])
def test_a_damaged_log_is_told(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        StepLogFile(file, opened(small(*SHAPES[0])))
        file.write(line)
    with pytest.raises(StepLogError, match=words):
        list(read_step_log(path))


def test_a_log_without_its_beginning_cannot_be_replayed() -> None:
    with pytest.raises(StepLogError, match="does not begin"):
        list(replay([Added(0.0, ())], remade))


def test_every_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    one = make_spec("a", 3, 5, tenant="t", priority=-2, predicted=4, timeout_s=0.1)
    one = dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, logit_bias={3: 0.25}))
    with path.open("wb") as file:
        StepLogFile(file, opened(small(*SHAPES[0]))).added([one], 1 / 3)
    assert list(read_step_log(path))[1] == Added(1 / 3, (one,))


def test_a_real_engine_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    built = build(make_config(prefix_cache=True, engine=EngineConfig(threads=1, step_log=str(path))))
    run(built.engine, [spec(range(40), 6), spec([1, 2, 3], 4)])
    records = list(read_step_log(path))
    assert [type(record) for record in records[:3]] == [Opened, Added, Added]
    assert sum(len(record.sampled) for record in records if isinstance(record, Updated)) == 10
    assert all(r.started_s < r.at_s for r in records if isinstance(r, Updated))
    assert first_difference(replay(records, remade)) is None


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    config = make_config(engine=EngineConfig(threads=1, step_log=str(tmp_path / "none" / "steps.jsonl")))
    with pytest.raises(ConfigError, match=r"engine\.step_log=.*cannot be written \(No such file or directory\)"):
        build(config)
