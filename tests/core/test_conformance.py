"""Random arrivals, aborts and limits against the scheduler's invariants, for every component it is built from.

After every step the scheduler's own `check` runs; here are the promises about behaviour: budgets hold, each token
is computed exactly once unless a preemption gave it up, outputs are those of a lone request, somebody advances
whenever somebody could, order is kept, and every request ends once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import BLOCK, Harness, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import OnDemandAdmissionConfig
from servekit.core.plan import Plan, PreemptionKind
from servekit.core.request import RequestSpec, Status


@dataclass(frozen=True)
class Shape:
    """One scheduler to test."""

    num_blocks: int
    max_num_seqs: int
    max_step_tokens: int
    chunk_tokens: int | None
    prefix_cache: bool
    watermark: float


SHAPES = [
    Shape(num_blocks=16, max_num_seqs=6, max_step_tokens=16, chunk_tokens=5, prefix_cache=True, watermark=0.0),
    Shape(num_blocks=16, max_num_seqs=6, max_step_tokens=16, chunk_tokens=5, prefix_cache=False, watermark=0.1),
    Shape(num_blocks=20, max_num_seqs=4, max_step_tokens=4, chunk_tokens=1, prefix_cache=True, watermark=0.05),
    Shape(num_blocks=64, max_num_seqs=8, max_step_tokens=40, chunk_tokens=None, prefix_cache=True, watermark=0.01),
    Shape(num_blocks=17, max_num_seqs=1, max_step_tokens=7, chunk_tokens=7, prefix_cache=True, watermark=0.3),
]
MAX_MODEL_LEN = 64


def build(shape: Shape, **limits: float | int | None) -> Harness:
    no_limits: dict[str, float | None] = {"queue_timeout_s": None, "request_timeout_s": None}
    admission = OnDemandAdmissionConfig(watermark=shape.watermark, **(no_limits | limits))  # type: ignore[arg-type]
    return Harness(make_scheduler(
        num_blocks=shape.num_blocks, max_model_len=MAX_MODEL_LEN, max_num_seqs=shape.max_num_seqs,
        max_step_tokens=shape.max_step_tokens, chunk_tokens=shape.chunk_tokens, prefix_cache=shape.prefix_cache,
        admission=admission))


def random_spec(rng: random.Random, name: str, now: float) -> RequestSpec:
    """Prompts over three shared beginnings, so that prefix hits happen."""
    shared = [rng.randrange(3) * 1000 + i for i in range(rng.randrange(0, 24))]
    own = [rng.randrange(50000) for _ in range(rng.randrange(1, 20))]
    return make_spec(name, shared + own, max_tokens=rng.randrange(1, 30), arrived_s=now)


class Promises:
    """Watches each plan of one run."""

    def __init__(self, harness: Harness, shape: Shape) -> None:
        self.harness = harness
        self.shape = shape
        self.computed: dict[str, int] = {}
        """Tokens whose keys and values exist, as the plans so far say."""
        self.admitted: list[str] = []

    def step(self) -> Plan:
        scheduler = self.harness.scheduler
        could_advance = scheduler.has_requests
        held_before = {request.request_id: list(request.block_ids) for request in scheduler._running}
        plan = self.harness.step()
        self._budgets(plan)
        self._each_token_once(plan)
        self._room_for_every_token(plan, held_before)
        assert not could_advance or plan.items or plan.ended, "requests are here and nothing happened"
        return plan

    def _budgets(self, plan: Plan) -> None:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items) <= self.shape.max_step_tokens
        assert len(plan.items) <= self.shape.max_num_seqs
        assert len({item.request.request_id for item in plan.items}) == len(plan.items)
        assert all(item.num_tokens > 0 for item in plan.items)
        if self.shape.chunk_tokens is not None:
            assert all(item.num_tokens <= self.shape.chunk_tokens for item in plan.items)

    def _each_token_once(self, plan: Plan) -> None:
        for request, kind in plan.preempted:
            if kind is PreemptionKind.recompute:
                self.computed[request.request_id] = 0
        for request, start, num_tokens, _ in plan.items:
            done = self.computed.get(request.request_id, 0)
            if start != done:
                assert done == 0 and self.shape.prefix_cache and start % BLOCK == 0, (
                    f"{request} starts at {start} with {done} tokens computed")
            self.computed[request.request_id] = start + num_tokens

    def _room_for_every_token(self, plan: Plan, held_before: dict[str, list[int]]) -> None:
        for request, start, num_tokens, _ in plan.items:
            if request.status is Status.running:
                assert len(request.block_ids) * BLOCK >= start + num_tokens
                before = held_before.get(request.request_id, [])
                assert request.block_ids[:len(before)] == before, "a block table changed under its request"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_promises_hold_under_random_arrivals_and_aborts(shape: Shape, seed: int) -> None:
    rng = random.Random(seed)
    harness = build(shape)
    promises = Promises(harness, shape)
    specs: dict[str, RequestSpec] = {}
    aborted: set[str] = set()
    for number in range(30):
        for _ in range(rng.choice([0, 0, 1, 3])):
            spec = random_spec(rng, f"{number}.{len(specs)}", harness.now)
            specs[spec.request_id] = spec
            harness.add(spec)
        if specs and rng.random() < 0.1:
            victim = rng.choice(list(specs))
            if harness.finish(victim) is None:
                aborted.add(victim)
            harness.abort(victim)
        promises.step()
    for _ in range(4000):
        if not harness.scheduler.has_requests:
            break
        promises.step()
    for name, spec in specs.items():
        expected = expected_tokens(spec, MAX_MODEL_LEN)
        if len(spec.prompt_token_ids) >= MAX_MODEL_LEN:
            assert harness.finish(name) == "too_long"
        elif name in aborted:
            assert harness.finish(name) == "abort"
            assert harness.tokens(name) == expected[:len(harness.tokens(name))]
        else:
            assert harness.finish(name) == "length"
            assert harness.tokens(name) == expected
    kv = harness.scheduler.kv
    assert kv.pool.num_used == 0, "blocks are held by nobody"
    harness.scheduler.reset_prefix_cache()
    assert kv.pool.num_free == shape.num_blocks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_under_timeouts_and_a_bounded_queue(shape: Shape, seed: int) -> None:
    rng = random.Random(seed)
    harness = build(shape, max_queue_requests=4, queue_timeout_s=6, request_timeout_s=15)
    specs = []
    for number in range(40):
        for _ in range(rng.choice([0, 1, 2])):
            specs.append(random_spec(rng, f"{number}.{len(specs)}", harness.now))
            harness.add(specs[-1])
        harness.step()
    harness.drain()
    for spec in specs:
        reason = harness.finish(spec.request_id)
        tokens, expected = harness.tokens(spec.request_id), expected_tokens(spec, MAX_MODEL_LEN)
        assert reason in {"length", "queue_full", "queue_timeout", "request_timeout"}
        assert tokens == expected if reason == "length" else tokens == expected[:len(tokens)]
        assert reason in {"length", "request_timeout"} or not tokens
    assert harness.scheduler.kv.pool.num_used == 0


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_fifo_starts_requests_in_order_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    harness = build(SHAPES[0])
    specs = [random_spec(rng, str(i), 0.0) for i in range(12)]
    harness.add(*(spec for spec in specs if len(spec.prompt_token_ids) < MAX_MODEL_LEN))
    harness.drain()
    first_seen: dict[str, int] = {}
    for number, plan in enumerate(harness.plans):
        for item in plan.items:
            first_seen.setdefault(item.request.request_id, number)
    starts = [first_seen[spec.request_id] for spec in specs if spec.request_id in first_seen]
    assert starts == sorted(starts)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_no_decode_waits_while_memory_lasts(seed: int) -> None:
    """Stall-free: without preemption, a request that has begun to answer gets a token every step."""
    rng = random.Random(seed)
    shape = Shape(num_blocks=400, max_num_seqs=8, max_step_tokens=12, chunk_tokens=6, prefix_cache=True, watermark=0.0)
    harness = build(shape)
    harness.add(*(random_spec(rng, str(i), 0.0) for i in range(10)))
    harness.drain()
    assert harness.scheduler.stats.preemptions == 0
    for events in harness.heard.values():
        gaps = {later.at_s - earlier.at_s for earlier, later in itertools.pairwise(events)}
        assert gaps <= {1.0}


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_budget_is_used_while_prompts_are_unfinished(seed: int) -> None:
    """Work conservation: a step that leaves a running prompt unfinished for lack of budget spends all of it."""
    rng = random.Random(seed)
    shape = Shape(num_blocks=400, max_num_seqs=8, max_step_tokens=12, chunk_tokens=None, prefix_cache=False,
                  watermark=0.0)
    harness = build(shape)
    harness.add(*(random_spec(rng, str(i), 0.0) for i in range(10)))
    while harness.scheduler.has_requests:
        plan = harness.step()
        if any(not item.samples for item in plan.items):
            assert plan.num_tokens == shape.max_step_tokens


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_preemptions_and_recomputation_stay_bounded(seed: int) -> None:
    """Oversubscribed threefold, no request is preempted without end (no ping-pong between resume and preemption)."""
    rng = random.Random(seed)
    harness = build(Shape(num_blocks=18, max_num_seqs=6, max_step_tokens=16, chunk_tokens=4, prefix_cache=False,
                          watermark=0.0))
    specs = [make_spec(str(i), rng.randrange(10, 30), max_tokens=30) for i in range(6)]
    harness.add(*specs)
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0, "the pool was meant to be too small"
    useful = sum(len(spec.prompt_token_ids) + len(harness.tokens(spec.request_id)) for spec in specs)
    computed = sum(plan.num_tokens for plan in harness.plans)
    assert computed <= 3 * useful
    assert max(event.num_preemptions for events in harness.heard.values() for event in events) <= 5


def test_the_same_arrivals_give_the_same_plans() -> None:
    def run() -> list[list[tuple[str, int, int]]]:
        rng = random.Random(5)
        harness = build(SHAPES[0])
        for number in range(20):
            harness.add(random_spec(rng, str(number), harness.now))
            harness.step()
        harness.drain()
        return [[(item.request.request_id, item.start, item.num_tokens) for item in plan.items]
                for plan in harness.plans]

    assert run() == run()
