"""Runs one policy over a trace of arrivals and tells who started when."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from core.helpers import Harness, make_spec
from servekit.config.admission import OnDemandAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig
from servekit.config.policy import PolicyConfig
from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.config.tenants import TenantsConfig
from servekit.core.build import build_scheduler
from servekit.core.request import RequestSpec

MAX_MODEL_LEN = 128


class Start(NamedTuple):
    """The first step of a request."""

    spec: RequestSpec
    at_s: float


def harness_of(policy: PolicyConfig, *, slots: int = 1, tenants: TenantsConfig | None = None,
               num_blocks: int | None = None, prefix_cache: bool = False, chunk_tokens: int | None = None,
               batching: BatchingConfig | None = None) -> Harness:
    """A scheduler with this policy, no timeouts, and memory for all that run unless `num_blocks` (of 4 tokens) says
    otherwise. A step takes one second."""
    config = SchedulerConfig(
        max_num_seqs=slots, max_step_tokens=1024, policy=policy, tenants=tenants or TenantsConfig(),
        batching=batching or ContinuousBatchingConfig(), prefill=ChunkedPrefillConfig(chunk_tokens=chunk_tokens),
        prefix_cache=HashPrefixCacheConfig() if prefix_cache else NoPrefixCacheConfig(),
        admission=OnDemandAdmissionConfig(max_queue_requests=None, queue_timeout_s=None, request_timeout_s=None))
    blocks = num_blocks or 2 * slots * MAX_MODEL_LEN // 4
    return Harness(build_scheduler(config, blocks, 4, MAX_MODEL_LEN))


def play(harness: Harness, specs: Sequence[RequestSpec], until_s: float = 5000.0) -> list[Start]:
    """Add each request at its time of arrival, step until all have ended or time is up, and list the starts."""
    arrivals = deque(sorted(specs, key=lambda spec: spec.arrived_s))
    starts: dict[str, Start] = {}
    while (arrivals or harness.scheduler.has_requests) and harness.now < until_s:
        while arrivals and arrivals[0].arrived_s <= harness.now:
            harness.add(arrivals.popleft())
        now = harness.now
        for item in harness.step().items:
            starts.setdefault(item.request.request_id, Start(item.request.spec, now))
    return list(starts.values())


def names(starts: Sequence[Start]) -> list[str]:
    return [start.spec.request_id for start in starts]


def overtakings(starts: Sequence[Start], specs: Sequence[RequestSpec]) -> list[tuple[RequestSpec, RequestSpec]]:
    """(i, j) for each start of a request i while j, which came before it, was waiting."""
    order = {start.spec.request_id: place for place, start in enumerate(starts)}
    return [(start.spec, other) for place, start in enumerate(starts) for other in specs
            if other.arrived_s < start.spec.arrived_s and order.get(other.request_id, len(starts)) > place]


def random_specs(rng: random.Random, number: int, *, mean_gap_s: float = 2.0, tenants: int = 1, classes: int = 1,
                 longest_prompt: int = 40, longest_output: int = 30) -> list[RequestSpec]:
    """Requests of random lengths with exponential gaps between them."""
    specs, now = [], 0.0
    for index in range(number):
        now += rng.expovariate(1 / mean_gap_s)
        output = rng.randint(1, longest_output)
        prompt = range(1000 * index, 1000 * index + rng.randint(1, longest_prompt))  # No two share a prefix.
        specs.append(make_spec(f"r{index}", prompt, output, arrived_s=now, tenant=f"t{rng.randrange(tenants)}",
                               priority=rng.randrange(classes), predicted=output))
    return specs
