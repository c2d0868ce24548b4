"""Every component with every other: random arrivals, aborts and timeouts against the scheduler's promises.

After every call the scheduler checks its own books, and after every step a fake device checks that whatever the plan
reads was written there by the same tokens. On top: budgets hold, outputs are those of a lone request, somebody
advances whenever somebody could, every request ends once, and nothing is left behind.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace

import pytest

from core.components import MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_BLOCKS, PAIRS, Combination, combinations, random_spec
from core.helpers import Harness, expected_tokens
from servekit.config.admission import TimeoutAction
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, PreemptionKind
from servekit.core.request import FinishReason, RequestSpec


class Run:
    """One scheduler under random load."""

    def __init__(self, combination: Combination, seed: int, config: SchedulerConfig | None = None) -> None:
        self.rng = random.Random(seed)
        self.combination = combination
        self.harness = Harness(build_scheduler(config or combination.config(), NUM_BLOCKS, 4, MAX_MODEL_LEN,
                                               num_host_blocks=12))
        self.specs: dict[str, RequestSpec] = {}
        self.aborted: set[str] = set()

    def arrivals(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            spec = random_spec(self.rng, str(len(self.specs)), self.harness.now)
            self.specs[spec.request_id] = spec
            self.harness.add(spec)

    def abort_somebody(self) -> None:
        name = self.rng.choice(list(self.specs))
        if self.harness.finish(name) is None:
            self.aborted.add(name)
        self.harness.abort(name)

    def step(self) -> None:
        has_requests = self.harness.scheduler.has_requests
        plan = self.harness.step()
        self._budgets(plan)
        waits_for_time = plan.wake_s is not None and self.combination.batching != "continuous"
        assert plan.has_work or plan.ended or waits_for_time or not has_requests, "requests are here, nothing happened"

    def _budgets(self, plan: Plan) -> None:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items) <= MAX_MODEL_LEN
        assert len(plan.items) <= MAX_NUM_SEQS
        assert len({item.request.request_id for item in plan.items}) == len(plan.items)
        assert all(item.num_tokens > 0 for item in plan.items)
        if self.combination.preemption == "none":
            assert not plan.preempted
        if self.combination.admission == "worst_case":
            assert all(kind is PreemptionKind.pause for _, kind in plan.preempted) or self._preempts_for_others()

    def _preempts_for_others(self) -> bool:
        """Whether the policy takes running requests' blocks for those that it puts before them."""
        return self.combination.policy in ("srtf", "mlfq", "priority-preempting")

    def drain(self) -> None:
        for _ in range(4000):
            if not self.harness.scheduler.has_requests:
                return
            self.step()
        raise AssertionError("not drained after 4000 steps")

    def nothing_is_left(self) -> None:
        scheduler = self.harness.scheduler
        assert scheduler.kv.pool.num_used == 0, "blocks are held by nobody"
        assert scheduler.kv.host_pool.num_used == 0, "host blocks are held by nobody"
        scheduler.reset_prefix_cache()
        assert scheduler.kv.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize(("batching", "policy"), PAIRS)
def test_promises_hold_in_every_combination(batching: str, policy: str) -> None:
    for combination in combinations(batching, policy):
        seed = secrets.randbits(32)
        try:
            run = Run(combination, seed)
            for _ in range(12):
                run.arrivals()
                if run.specs and run.rng.random() < 0.15:
                    run.abort_somebody()
                run.step()
            run.drain()
            _answers_are_those_of_lone_requests(run)
            run.nothing_is_left()
        except Exception as error:
            error.add_note(f"{combination} with seed {seed}")
            raise


def _answers_are_those_of_lone_requests(run: Run) -> None:
    for name, spec in run.specs.items():
        tokens, expected = run.harness.tokens(name), expected_tokens(spec, MAX_MODEL_LEN)
        if name in run.aborted:
            assert run.harness.finish(name) == "abort"
            assert tokens == expected[:len(tokens)]
        else:
            assert run.harness.finish(name) == "length"
            assert tokens == expected


@pytest.mark.parametrize(("batching", "policy"), PAIRS)
def test_every_request_ends_once_under_limits(batching: str, policy: str) -> None:
    """A bounded queue and timeouts, in one combination of the other components each time."""
    rng = random.Random(secrets.randbits(32))
    for combination in rng.sample(list(combinations(batching, policy)), 8):
        seed = secrets.randbits(32)
        try:
            _run_under_limits(combination, seed)
        except Exception as error:
            error.add_note(f"{combination} with seed {seed}")
            raise


def _run_under_limits(combination: Combination, seed: int) -> None:
    config = combination.config()
    can_delay = combination.policy in ("fifo", "priority", "priority-preempting")
    action = TimeoutAction.delay if can_delay and seed % 2 else TimeoutAction.reject
    admission = replace(config.admission, max_queue_requests=4, queue_timeout_s=6.0, request_timeout_s=20.0,
                        on_timeout=action)
    run = Run(combination, seed, replace(config, admission=admission))
    for _ in range(25):
        run.arrivals()
        run.step()
    run.drain()
    for name, spec in run.specs.items():
        reason = run.harness.finish(name)
        tokens, expected = run.harness.tokens(name), expected_tokens(spec, MAX_MODEL_LEN)
        assert reason in {"length", "queue_full", "queue_timeout", "request_timeout"}
        assert tokens == expected if reason == "length" else tokens == expected[:len(tokens)]
        assert reason != FinishReason.queue_timeout.value or action is TimeoutAction.reject
        assert reason in {"length", "request_timeout"} or not tokens
    run.nothing_is_left()


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans(combination: Combination) -> list[list[tuple[str, int, int]]]:
        run = Run(combination, 5)
        for _ in range(12):
            run.arrivals()
            run.step()
        run.drain()
        return [[(item.request.request_id, item.start, item.num_tokens) for item in plan.items]
                for plan in run.harness.plans]

    rng = random.Random(secrets.randbits(32))
    everything = [combination for pair in PAIRS for combination in combinations(*pair)]
    for combination in rng.sample(everything, 20):
        assert plans(combination) == plans(combination), combination
