"""Step times learnt from steps: what was put in comes out, on steps that were not among them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.config.errors import ConfigError
from servekit.config.roofline import GpuName
from servekit.core.plan import BlockCopy, Bound
from servekit.core.request import RequestId
from servekit.engine.step_log import Added, ItemRecord, Opened, Planned, Record, StepLogFile, Updated
from servekit.model.shapes import SHAPES
from servekit.sim.engine_model import read_timed_steps, timed_steps
from servekit.sim.fitted import FittedStepTime, TimedStep
from servekit.sim.gpus import GPUS
from servekit.sim.replica import Replica
from servekit.sim.step_time import PromptChunk, RooflineStepTime, StepShape

ENGINE = Opened({}, num_kv_blocks=100, num_host_blocks=0, block_size_tokens=16, max_model_len=1024)


def random_shape(rng: random.Random, longest_tokens: int = 1024) -> StepShape:
    num_decodes = rng.choice([0, 1, 2, 4, 8, 16, 32, 64])
    chunks = [PromptChunk(rng.randint(2, longest_tokens // 3), rng.randint(0, 2000)) for _ in range(rng.randint(0, 2))]
    if not num_decodes and not chunks:
        num_decodes = 1
    return StepShape(num_decodes, num_decodes * rng.randint(1, 2000), chunks, num_decodes + rng.randint(0, len(chunks)),
                     rng.choice([0, 0, 0, 5, 40]))


def concave_s(shape: StepShape) -> float:
    """As on a processor: a token of a long step costs less than one of a short step."""
    tokens = shape.num_tokens
    return (2e-3 + 4e-4 * min(tokens, 8) + 2e-4 * min(max(tokens - 8, 0), 120) + 1e-4 * max(tokens - 128, 0)
            + 1e-7 * shape.decode_context_tokens + 2e-4 * shape.num_sampled + 3e-5 * shape.num_swapped_blocks
            + sum(2e-8 * tokens * (before + tokens / 2 + 0.5) for tokens, before in shape.chunks))


def convex_s(shape: StepShape) -> float:
    """As on a GPU: the first 200 tokens cost nothing beside reading the weights."""
    return 5e-3 + 5e-5 * max(shape.num_tokens - 256, 0) + 1e-7 * shape.decode_context_tokens


def fitted(time_s: Callable[[StepShape], float], rng: random.Random, count: int = 1500, noise: float = 0.0,
           longest_tokens: int = 1024) -> FittedStepTime:
    shapes = [random_shape(rng, longest_tokens) for _ in range(count)]
    return FittedStepTime.fit([TimedStep(shape, time_s(shape) * (1 + rng.uniform(-noise, noise))) for shape in shapes])


@pytest.mark.parametrize("time_s", [concave_s, convex_s])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_fresh_steps_are_predicted(time_s: Callable[[StepShape], float], seed: int) -> None:
    rng = random.Random(seed)
    model = fitted(time_s, rng)
    for shape in (random_shape(rng) for _ in range(200)):
        assert model.step_s(shape) == pytest.approx(time_s(shape), rel=1e-3)
    assert model.median_error < 1e-3
    assert model.num_steps == 1500


def test_noise_averages_out() -> None:
    rng = random.Random(7)
    model = fitted(concave_s, rng, count=4000, noise=0.3)
    assert 0.1 < model.median_error < 0.2
    for shape in (random_shape(rng) for _ in range(200)):
        assert model.step_s(shape) == pytest.approx(concave_s(shape), rel=0.1)


def test_short_steps_count_as_much_as_long_ones() -> None:
    """Prompts whose times nothing explains do not blur the decodes, whose times are a hundredth of theirs."""
    rng = random.Random(9)
    decodes = [StepShape(count, 100 * count, (), count) for count in range(1, 9)]
    prompts = [StepShape(0, 0, [PromptChunk(rng.randint(500, 1000), 0)], 1) for _ in range(100)]
    model = FittedStepTime.fit([*(TimedStep(shape, 0.004 + 0.001 * shape.num_decodes) for shape in decodes * 20),
                                *(TimedStep(shape, rng.uniform(0.2, 2.0)) for shape in prompts)])
    for shape in decodes:
        assert model.step_s(shape) == pytest.approx(0.004 + 0.001 * shape.num_decodes, rel=0.02)


def test_a_roofline_is_learnt() -> None:
    """Bends where no knot is, and the largest of two kinds of time: not what the model's form says, and close to it."""
    rng = random.Random(3)
    roofline = RooflineStepTime(Replica(SHAPES["llama-3-8b"], GPUS[GpuName.h100]))
    model = fitted(roofline.step_s, rng)
    errors = sorted(abs(model.step_s(shape) / roofline.step_s(shape) - 1)
                    for shape in (random_shape(rng) for _ in range(400)))
    assert errors[200] < 0.03
    assert errors[380] < 0.10


def test_longer_steps_go_on_at_the_last_slope() -> None:
    rng = random.Random(5)
    model = fitted(concave_s, rng, longest_tokens=300)
    longer = StepShape(0, 0, [PromptChunk(1500, 0)], 1)
    assert model.step_s(longer) == pytest.approx(concave_s(longer), rel=0.02)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_more_work_never_takes_less_time(seed: int) -> None:
    """Whatever the times were: noise alone, here."""
    rng = random.Random(seed)
    model = fitted(lambda shape: rng.uniform(0.001, 0.1), rng, count=60)
    shape = random_shape(rng)
    longer = StepShape(shape.num_decodes + 1, shape.decode_context_tokens + 500, shape.chunks, shape.num_sampled + 1,
                       shape.num_swapped_blocks + 1)
    assert model.step_s(longer) >= model.step_s(shape) > 0 or model.step_s(shape) == 0


def test_nothing_takes_no_time() -> None:
    assert fitted(concave_s, random.Random(1)).step_s(StepShape()) == 0


def test_nothing_to_learn_from() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        FittedStepTime.fit([])


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = fitted(concave_s, random.Random(2))
    model.save(tmp_path / "model.json")
    assert FittedStepTime.load(tmp_path / "model.json") == model


@pytest.mark.parametrize(("content", "problem"), [
    (None, "No such file"),
    (b"", "is not a fitted step-time model"),
    (b'{"format": 1}', "missing required field"),
    (b'{"format": 2, "model": {"knots_tokens": [0], "coefficients": [1, 1, 1, 1, 1, 1, 1], "num_steps": 1, '
     b'"median_error": 0}}', "another version"),
    (b'{"format": 1, "model": {"knots_tokens": [0], "coefficients": [1, 1], "num_steps": 1, "median_error": 0}}',
     "another version")])
def test_another_file_is_refused(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as refusal:
        FittedStepTime.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


# --- steps of a log ---------------------------------------------------------------------------------------------------

def planned(at_s: float, *items: tuple[str, int, int], swaps: int = 0) -> Planned:
    return Planned(at_s, tuple(ItemRecord(RequestId(name), start, count) for name, start, count in items),
                   Bound.nothing_waiting, swap_out=(BlockCopy(0, 0),) * swaps)


def updated(at_s: float, *names: str) -> Updated:
    return Updated(at_s, at_s, {RequestId(name): 1 for name in names})


def test_the_steps_of_a_log() -> None:
    """A step lasts until the next is planned, or until its own end when the engine then waits for requests."""
    records: list[Record] = [
        Added(0.9, ()),
        planned(1.0, ("a", 0, 100)), updated(1.25), Added(1.25, ()),
        planned(1.251, ("a", 100, 30), ("b", 40, 1), swaps=3), updated(1.5, "a", "b"),
        planned(3.0), updated(3.0),
        planned(3.5, ("b", 41, 1)), updated(3.75, "b")]
    assert list(timed_steps(records)) == [
        TimedStep(StepShape(0, 0, [PromptChunk(100, 0)], 0), pytest.approx(0.251)),
        TimedStep(StepShape(1, 41, [PromptChunk(30, 100)], 2, 3), pytest.approx(0.249)),
        TimedStep(StepShape(1, 42, [], 1), pytest.approx(0.25))]


def test_a_step_that_a_crash_cut_short_is_left_out() -> None:
    whole = [planned(1.0, ("a", 0, 5)), updated(1.1, "a")]
    again = [ENGINE, planned(9.0, ("b", 0, 5)), updated(9.1, "b")]
    times = [step.duration_s for step in timed_steps([*whole, planned(1.2, ("a", 5, 1)), *again])]
    assert times == [pytest.approx(0.1), pytest.approx(0.1)]


def test_a_log_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        log = StepLogFile(file, ENGINE)
        for record in (planned(1.0, ("a", 0, 5)), updated(1.1, "a")):
            log._write(record)
    opened, steps = read_timed_steps(path)
    assert opened == ENGINE
    assert steps == [TimedStep(StepShape(0, 0, [PromptChunk(5, 0)], 1), pytest.approx(0.1))]


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b'{"type": "aborted", "at_s": 1, "request_ids": []}\n'])
def test_what_is_no_log_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"step_time\.log=.*is not a step log"):
        read_timed_steps(path)
