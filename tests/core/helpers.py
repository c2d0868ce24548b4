"""Schedulers of any shape, and an executor that answers instantly and deterministically."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig, PrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, PlanItem, Sampled, StepResult
from servekit.core.request import RequestEvent, RequestId, RequestSpec, SamplingParams
from servekit.core.scheduler import Scheduler

BLOCK = 4


def make_scheduler(*, num_blocks: int = 64, block_size: int = BLOCK, max_model_len: int = 64, max_num_seqs: int = 8,
                   max_step_tokens: int = 32, chunk_tokens: int | None = 8, prefix_cache: bool = True,
                   admission: AdmissionConfig | None = None, batching: BatchingConfig | None = None,
                   prefill: PrefillConfig | None = None, preemption: PreemptionConfig | None = None) -> Scheduler:
    """A scheduler of these components; those that are not given are the default ones."""
    cache: PrefixCacheConfig = HashPrefixCacheConfig() if prefix_cache else NoPrefixCacheConfig()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, prefix_cache=cache,
        batching=batching or ContinuousBatchingConfig(),
        prefill=prefill or ChunkedPrefillConfig(chunk_tokens=chunk_tokens),
        preemption=preemption or RecomputePreemptionConfig(), admission=admission or OnDemandAdmissionConfig())
    return build_scheduler(config, num_blocks, block_size, max_model_len)


def make_spec(name: str, prompt: int | Sequence[int], max_tokens: int = 4, *, arrived_s: float = 0.0, salt: str = "",
              stop: tuple[int, ...] = (), timeout_s: float | None = None,
              prompt_logprobs: int | None = None, priority: int = 0, tenant: str = "",
              predicted: int | None = None) -> RequestSpec:
    """A request; an integer prompt is a length, filled with tokens that no other name shares."""
    tokens = [hash_token(name, i) for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, prompt_logprobs=prompt_logprobs)
    return RequestSpec(RequestId(name), tuple(tokens), sampling, arrived_s, tenant=tenant, priority=priority,
                       cache_salt=salt, timeout_s=timeout_s, predicted_output_tokens=predicted)


def hash_token(name: str, position: int) -> int:
    return (sum(map(ord, name)) * 7919 + position * 104729) % 50021


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: the next token depends on every token before it."""
    state = len(tokens)
    for token in tokens:
        state = (state * 31 + token + 7) % 50021
    return state


def answer(plan: Plan) -> StepResult:
    """What the fake model computes for a plan. It trusts only what the plan says is computed."""
    sampled = {}
    for item in plan.items:
        assert item.start == item.request.num_computed
        end = item.start + item.num_tokens
        assert item.samples == (end == item.request.num_tokens)
        if item.samples:
            sampled[item.request.request_id] = Sampled(next_token(item.request.token_ids[:end]))
    return StepResult(sampled)


class Clock:
    """Moves on by itself, by a different amount each time it is read."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self._rng.uniform(0.0, 0.6)
        return self._now_s


class FakeDevice:
    """The fake model with a KV cache: it finds out when a plan reads a position that holds something else.

    What is written at a position is the hash of all tokens up to it, as real keys and values depend on all of them.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, dict[int, int]] = {}
        self._host_blocks: dict[int, dict[int, int]] = {}
        self._states: dict[RequestId, list[int]] = {}
        """`next_token` of each beginning of a request's tokens."""

    def execute(self, plan: Plan) -> StepResult:
        """Copies out, copies in, then the items, each of which must find what it has computed so far."""
        for source, target in plan.swap_out:
            self._host_blocks[target] = dict(self._blocks[source])
        for source, target in plan.swap_in:
            self._blocks[target] = dict(self._host_blocks[source])
        for item in plan.items:
            self._expect(item)
        for item in plan.items:
            self._write(item)
        return answer(plan)

    def _expect(self, item: PlanItem) -> None:
        states = self._states_of(item)
        for position in range(item.start):
            block, offset = self._place(item, position)
            found = self._blocks.get(block, {}).get(offset)
            assert found == states[position], f"{item.request} reads position {position} in block {block}: {found}"

    def _write(self, item: PlanItem) -> None:
        states = self._states_of(item)
        for position in range(item.start, item.start + item.num_tokens):
            block, offset = self._place(item, position)
            self._blocks.setdefault(block, {})[offset] = states[position]

    def _states_of(self, item: PlanItem) -> list[int]:
        request = item.request
        states = self._states.setdefault(request.request_id, [])
        while len(states) < request.num_tokens:
            states.append(hash((states[-1] if states else request.spec.cache_salt, request.token_ids[len(states)])))
        return states

    def _place(self, item: PlanItem, position: int) -> tuple[int, int]:
        return item.request.block_ids[position // self._block_size], position % self._block_size


@dataclass
class Harness:
    """Steps a scheduler, checks it after every call, and keeps what each client hears."""

    scheduler: Scheduler
    now: float = 0.0
    heard: dict[str, list[RequestEvent]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    device: FakeDevice = field(init=False)

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.scheduler.kv.block_size_tokens)

    def add(self, *specs: RequestSpec) -> None:
        self._hear(self.scheduler.add(specs, self.now))
        self.scheduler.check()

    def abort(self, name: str) -> None:
        self._hear(self.scheduler.abort([RequestId(name)], self.now))
        self.scheduler.check()

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        self.now += 1.0
        self._hear(self.scheduler.update(plan, self.device.execute(plan), self.now))
        self.scheduler.check()
        return plan

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests:
                return
            self.step()
        raise AssertionError(f"not drained after {limit} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.heard.get(name, []) for token in event.token_ids]

    def finish(self, name: str) -> str | None:
        ends = [event.finish.value for event in self.heard.get(name, []) if event.finish is not None]
        assert len(ends) <= 1, f"{name} ended {len(ends)} times"
        return ends[0] if ends else None

    def _hear(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            assert self.finish(event.request_id) is None, f"{event.request_id} hears of a step after its end"
            self.heard.setdefault(event.request_id, []).append(event)


def expected_tokens(spec: RequestSpec, max_model_len: int) -> list[int]:
    """What a request must produce, alone or in any company."""
    tokens = list(spec.prompt_token_ids)
    limit = min(max_model_len, len(tokens) + spec.sampling.max_tokens)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in spec.sampling.stop_token_ids:
            break
    return tokens[len(spec.prompt_token_ids):]
