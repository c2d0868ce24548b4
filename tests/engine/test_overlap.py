"""Overlapped steps answer as plain ones do: under every combination of components, and on a real engine.

The devices here compute late, as a GPU does: when a step's result is asked for, which is after the next one has been
planned and launched. They know of the requests what they were told at the launch.
"""

from __future__ import annotations

import dataclasses
import io
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.components import MAX_MODEL_LEN, NUM_BLOCKS, PAIRS, Combination, combinations, random_spec
from core.helpers import Clock, expected_tokens, make_scheduler, make_spec, next_token
from engine.helpers import Heard, make_engine, run, spec
from engine.test_equality import RECOMPUTE, SWAP, SWAP_LITTLE, crowd, crowd_alone, outputs, random_prompts
from servekit.config.errors import ConfigError
from servekit.config.preemption import PreemptionConfig
from servekit.config.prefix_cache import (
    HashPrefixCacheConfig,
    NoPrefixCacheConfig,
    PrefixCacheConfig,
    RadixPrefixCacheConfig,
)
from servekit.config.schema import EngineConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, Sampled, StepResult
from servekit.core.request import UNKNOWN_TOKEN, FinishReason, RequestId, RequestSpec
from servekit.core.scheduler import Scheduler
from servekit.engine import build as engine_build
from servekit.engine.engine import Engine
from servekit.engine.pipeline import Lockstep, Overlapped
from servekit.engine.step_log import Opened, StepLogFile, read_step_log, replay
from servekit.sim.engine_model import read_timed_steps

BLOCK, HOST_BLOCKS = 4, 12


class Told(NamedTuple):
    """What the launch of a step tells of one item."""

    request_id: RequestId
    salt: str
    tokens: list[int]
    start: int
    num_tokens: int
    samples: bool
    block_ids: tuple[int, ...]


class LateDevice:
    """The fake model with a KV cache, computing late. It finds out when a step reads what is not there."""

    def __init__(self, failing: Callable[[], bool] = lambda: False) -> None:
        self._failing = failing
        self._blocks: dict[int, dict[int, int]] = {}
        self._host_blocks: dict[int, dict[int, int]] = {}
        self._last: dict[RequestId, int] = {}
        """What the step before this one has sampled."""
        self.num_unknown = 0

    def launch(self, plan: Plan) -> LateStep:
        told = [Told(item.request.request_id, item.request.spec.cache_salt,
                     item.request.token_ids[:item.start + item.num_tokens], item.start, item.num_tokens, item.samples,
                     tuple(item.request.block_ids)) for item in plan.items]
        assert all(len(item.request.token_ids) == item.start + item.num_tokens for item in plan.items if item.samples)
        return LateStep(self, plan, told)

    def compute(self, plan: Plan, told: list[Told]) -> StepResult:
        for source, target in plan.swap_out:
            self._host_blocks[target] = dict(self._blocks[source])
        for source, target in plan.swap_in:
            self._blocks[target] = dict(self._host_blocks[source])
        for item in told:
            assert UNKNOWN_TOKEN not in item.tokens[:-1]
            if item.tokens[-1] == UNKNOWN_TOKEN:
                item.tokens[-1] = self._last[item.request_id]
                self.num_unknown += 1
            self._expect(item)
        for item in told:
            for position in range(item.start, item.start + item.num_tokens):
                block = self._blocks.setdefault(item.block_ids[position // BLOCK], {})
                block[position % BLOCK] = _state(item, position)
        self._last = {item.request_id: next_token(item.tokens) for item in told if item.samples}
        failed = {name: "NaN in the logits" for name in self._last if self._failing()}
        return StepResult({name: Sampled(token) for name, token in self._last.items() if name not in failed}, failed)

    def _expect(self, item: Told) -> None:
        for position in range(item.start):
            found = self._blocks.get(item.block_ids[position // BLOCK], {}).get(position % BLOCK)
            assert found == _state(item, position), f"{item.request_id} reads position {position}: {found}"


def _state(item: Told, position: int) -> int:
    return hash((item.salt, *item.tokens[:position + 1]))


@dataclasses.dataclass
class LateStep:
    """Computed when it is asked for."""

    device: LateDevice
    plan: Plan
    told: list[Told]

    def result(self) -> StepResult:
        return self.device.compute(self.plan, self.told)


def stopping(rng: random.Random, one: RequestSpec) -> RequestSpec:
    """The request, now and then with a stop token that it will come to."""
    if rng.random() < 0.5:
        return one
    stop = rng.choice(expected_tokens(one, MAX_MODEL_LEN))
    return dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, stop_token_ids=(stop,)))


def check_heard(heard: dict[RequestId, Heard], specs: dict[RequestId, RequestSpec]) -> None:
    """Everybody has ended once, with the tokens that the fake model has for it, or their beginning."""
    for name, one in specs.items():
        tokens, ends = heard[name].tokens, [event.finish for event in heard[name].events if event.finish is not None]
        assert len(ends) == 1 and heard[name].last.finish is ends[0], name
        expected = expected_tokens(one, MAX_MODEL_LEN)
        is_answer = ends[0] in (FinishReason.stop, FinishReason.length)
        assert tokens == (expected if is_answer else expected[:len(tokens)]), f"{name} {ends[0]}"


def overlapped_life(scheduler: Scheduler, seed: int, log: io.BytesIO, num_steps: int = 40) -> Engine:
    """Arrivals, aborts, failures and resets of the cache, until everybody has ended; all is checked."""
    rng = random.Random(seed)
    device = LateDevice(failing=lambda: rng.random() < 0.02)
    opened = Opened({}, NUM_BLOCKS, HOST_BLOCKS, BLOCK, MAX_MODEL_LEN)
    engine = Engine(scheduler, Overlapped(device), Clock(rng), StepLogFile(log, opened))
    specs: dict[RequestId, RequestSpec] = {}
    heard: dict[RequestId, Heard] = {}
    for number in range(1000):
        for _ in range(rng.choice([0, 0, 1, 2]) if number < num_steps else 0):
            one = stopping(rng, random_spec(rng, str(len(specs)), number * 1.2))
            specs[one.request_id], heard[one.request_id] = one, Heard()
            engine.add([one])
        if specs and rng.random() < 0.1:
            engine.abort([rng.choice(list(specs))])
            engine.check()
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        for event in engine.step().events:
            heard[event.request_id].events.append(event)
        engine.check()
        if number >= num_steps and not engine.has_work:
            break
    assert not engine.has_work and scheduler.kv.pool.num_used == scheduler.kv.host_pool.num_used == 0
    assert device.num_unknown > 0, "no step was planned ahead"
    check_heard(heard, specs)
    return engine


def scheduler_of(combination: Combination) -> Scheduler:
    return build_scheduler(combination.config(), NUM_BLOCKS, BLOCK, MAX_MODEL_LEN, HOST_BLOCKS)


def live_and_replay(combination: Combination, seed: int, path: Path) -> None:
    log = io.BytesIO()
    overlapped_life(scheduler_of(combination), seed, log)
    path.write_bytes(log.getvalue())
    for step in replay(read_step_log(path), lambda _: scheduler_of(combination)):
        assert step.replayed == step.recorded


@pytest.mark.parametrize(("batching", "policy"), PAIRS)
def test_every_policy_answers_as_if_steps_were_plain_and_can_be_replayed(batching: str, policy: str,
                                                                         tmp_path: Path) -> None:
    combination, seed = secrets.choice(list(combinations(batching, policy))), secrets.randbits(32)
    try:
        live_and_replay(combination, seed, tmp_path / "steps.jsonl")
    except AssertionError as error:
        raise AssertionError(f"{combination} with seed {seed}: {error}") from error


ALL = [combination for pair in PAIRS for combination in combinations(*pair)]


@given(combination=st.sampled_from(ALL), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_any_combination_answers_as_if_steps_were_plain(combination: Combination, seed: int) -> None:
    overlapped_life(scheduler_of(combination), seed, io.BytesIO())


def late_engine(device: LateDevice | None = None, **options: Any) -> Engine:
    return Engine(make_scheduler(**options), Overlapped(device or LateDevice()), clock=lambda: 0.0)


def test_the_next_step_is_launched_before_the_last_ones_result_is_asked_for() -> None:
    told: list[str] = []

    class Watched(LateDevice):
        def launch(self, plan: Plan) -> LateStep:
            told.append("launch")
            return super().launch(plan)

        def compute(self, plan: Plan, told_of: list[Told]) -> StepResult:
            told.append("result")
            return super().compute(plan, told_of)

    engine = late_engine(Watched())
    engine.add([make_spec("a", 3, 4)])
    while engine.has_work:
        engine.step()
    assert told == ["launch", "launch", "result", "launch", "result", "launch", "result", "result"]


def test_a_request_is_not_planned_past_its_length_and_one_that_stops_costs_one_token() -> None:
    one = make_spec("a", 3, 5)
    (first, second, *_) = expected_tokens(one, 64)
    for stop, num_steps in (((), 5), ((second,), 3), ((first,), 2)):
        engine = late_engine()
        engine.add([make_spec("a", 3, 5, stop=stop)])
        while engine.has_work:
            assert engine.idle_s() == 0.0
            engine.step()
        assert engine.stats().num_steps_total == num_steps
        assert not engine._pipeline.is_busy, "a step that nobody waits for any more is left"


def test_blocks_that_a_last_token_gives_back_are_waited_for_instead_of_preempting() -> None:
    """`b` needs a third block just when `a`, which has both others, computes its last token."""
    engine = late_engine(num_blocks=4, prefix_cache=False, max_model_len=16)
    engine.add([make_spec("a", 4, 5)])
    engine.add([make_spec("b", 4, 8)])
    heard: list[str] = []
    while engine.has_work:
        heard += [event.request_id for event in engine.step().events if event.finish is FinishReason.length]
        engine.check()
    assert heard == ["a", "b"] and engine.stats().preemptions_total == 0


def test_an_engine_with_a_step_on_its_way_does_not_idle() -> None:
    engine = late_engine(max_num_seqs=1)
    for name in "abc":
        engine.add([make_spec(name, 3, 1)])
    for _ in range(30):
        if not engine.has_work:
            break
        assert engine.idle_s() == 0.0
        engine.step()
    assert not engine.has_work and engine.idle_s() is None and engine.stats().generation_tokens_total == 3


def test_an_abort_of_everything_leaves_a_step_to_wait_for() -> None:
    engine = late_engine()
    engine.add([make_spec("a", 3, 9)])
    engine.step()
    engine.abort_all(FinishReason.shutdown, "the end")
    assert [event.finish for event in engine.step().events] == [FinishReason.shutdown]
    assert not engine.has_work
    engine.check()


# The real engine.

class LateQueue:
    """Does its work when it is asked for, which is as late as any device may be."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], Any]) -> Callable[[], Any]:
        done: list[Any] = []
        self._pending.append(lambda: done.append(work()))

        def wait() -> Any:
            while not done:
                self._pending.pop(0)()
            return done[0]

        return wait


@pytest.fixture(params=["late", "thread"])
def late_or_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "late":
        monkeypatch.setattr(engine_build, "work_queue", lambda device, overlap: LateQueue())


def small_engine(overlap: bool, preemption: PreemptionConfig, cache: PrefixCacheConfig, **options: Any) -> Engine:
    return make_engine(num_kv_blocks=13, block_size=8, max_model_len=96, chunk_tokens=16, preemption=preemption,
                       prefix_cache=cache, engine=EngineConfig(threads=1, overlap=overlap), **options)


@pytest.mark.usefixtures("late_or_thread")
@pytest.mark.parametrize("preemption, cache, temperature", [
    (RECOMPUTE, HashPrefixCacheConfig(), 0.0), (SWAP_LITTLE, RadixPrefixCacheConfig(), 1.0)],
    ids=["recompute", "swap"])
def test_chunks_caches_and_giving_way_change_no_token(preemption: PreemptionConfig, cache: PrefixCacheConfig,
                                                      temperature: float) -> None:
    engine = small_engine(True, preemption, cache)
    assert outputs(run(engine, crowd(temperature=temperature))) == crowd_alone(temperature)
    assert engine.stats().preemptions_total > 0 and engine.stats().cached_tokens_total > 0


EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "top_p": 0.8, "stop_token_ids": tuple(range(0, 512, 20))},
    {"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.8, "presence_penalty": 0.9, "min_p": 0.02},
    {"temperature": 1.1, "frequency_penalty": 0.4, "logprobs": 0}, {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 512, 2))},
    {"temperature": 0.0, "allowed_token_ids": (3, 4), "logit_bias": {4: -0.1}},
    {"temperature": 0.0, "allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 2}]
"""The last one fails: what it may say is banned."""


@pytest.mark.usefixtures("late_or_thread")
def test_every_way_to_sample_answers_alike() -> None:
    prompts = random_prompts(40, 18, 5, 30)
    both = []
    for overlap in (False, True):
        specs = [spec(prompt, 12, seed=number, **EVERYTHING[number % len(EVERYTHING)])
                 for number, prompt in enumerate(prompts)]
        both.append(run(small_engine(overlap, SWAP, NoPrefixCacheConfig()), specs))
    for plain, overlapped in zip(*both, strict=True):
        assert overlapped.tokens == plain.tokens
        assert (overlapped.last.finish, overlapped.last.message) == (plain.last.finish, plain.last.message)
        assert scores_of(overlapped) == pytest.approx(scores_of(plain), abs=1e-9)
    assert {heard.last.finish for heard in both[1]} == {FinishReason.stop, FinishReason.length, FinishReason.error}


def scores_of(heard: Heard) -> list[float]:
    prompt_scores = heard.events[0].prompt_logprobs or ()
    return [scored.logprob for event in heard.events for scored in event.logprobs] + [
        scored.logprob for scored in prompt_scores if scored is not None]


@pytest.mark.usefixtures("late_or_thread")
def test_aborts_change_nothing_for_the_others() -> None:
    engine, specs, rng = small_engine(True, SWAP, RadixPrefixCacheConfig()), crowd(), random.Random(41)
    heard = {one.request_id: Heard() for one in specs}
    for one in specs:
        engine.add([one])
    aborted = {one.request_id for one in rng.sample(specs, 4)}
    for name in aborted:
        for _ in range(rng.randrange(1, 12)):
            for event in engine.step().events:
                heard[event.request_id].events.append(event)
            engine.check()
        engine.abort([name])
        engine.check()
    while engine.has_work:
        for event in engine.step().events:
            heard[event.request_id].events.append(event)
        engine.check()
    for one, reference in zip(specs, crowd_alone(), strict=True):
        tokens = heard[one.request_id].tokens
        assert tokens == (reference[:len(tokens)] if one.request_id in aborted else reference)


def test_a_cpu_overlaps_only_if_told_to() -> None:
    assert isinstance(make_engine()._pipeline, Lockstep)
    assert isinstance(make_engine(engine=EngineConfig(threads=1, overlap=True))._pipeline, Overlapped)


def test_step_times_are_not_learnt_from_a_log_of_overlapped_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = make_engine(engine=EngineConfig(threads=1, overlap=True, step_log=str(path)))
    run(engine, [spec([1, 2, 3], 5)])
    with pytest.raises(ConfigError, match=r"step_time\.log=.*steps overlap.*engine\.overlap=false"):
        read_timed_steps(path)
