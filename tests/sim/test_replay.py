"""A step log's calls, given to a fresh scheduler, give the same plans: for every combination of components."""

from __future__ import annotations

import io
import random
import secrets
from pathlib import Path

import pytest

from core.components import MAX_MODEL_LEN, NUM_BLOCKS, PAIRS, Combination, combinations, random_spec
from core.helpers import Clock, FakeDevice
from servekit.core.build import build_scheduler
from servekit.core.request import RequestId
from servekit.core.scheduler import Scheduler
from servekit.engine.engine import Engine
from servekit.engine.pipeline import Lockstep
from servekit.engine.step_log import Opened, StepLogFile, read_step_log, replay

HOST_BLOCKS = 12


def scheduler_of(combination: Combination) -> Scheduler:
    return build_scheduler(combination.config(), NUM_BLOCKS, 4, MAX_MODEL_LEN, HOST_BLOCKS)


def logged_run(combination: Combination, seed: int) -> bytes:
    """A short life of an engine, and its log."""
    rng, log = random.Random(seed), io.BytesIO()
    opened = Opened({}, NUM_BLOCKS, HOST_BLOCKS, 4, MAX_MODEL_LEN)
    engine = Engine(scheduler_of(combination), Lockstep(FakeDevice(4)), Clock(rng), StepLogFile(log, opened))
    names: list[RequestId] = []
    for number in range(40):
        for _ in range(rng.choice([0, 0, 1, 2])):
            spec = random_spec(rng, str(len(names)), number * 1.2)
            names.append(spec.request_id)
            engine.add([spec])
        if names and rng.random() < 0.1:
            engine.abort([rng.choice(names)])
        engine.step()
    return log.getvalue()


@pytest.mark.parametrize(("batching", "policy"), PAIRS)
def test_every_plan_is_made_again(batching: str, policy: str, tmp_path: Path) -> None:
    everything = list(combinations(batching, policy))
    for combination in random.Random(secrets.randbits(32)).sample(everything, 12):
        seed = secrets.randbits(32)
        path = tmp_path / "steps.jsonl"
        path.write_bytes(logged_run(combination, seed))
        num_items = 0
        for step in replay(read_step_log(path), lambda _, combination=combination: scheduler_of(combination)):
            assert step.replayed == step.recorded, f"{combination} with seed {seed}"
            num_items += len(step.recorded.items)
        assert num_items > 0
