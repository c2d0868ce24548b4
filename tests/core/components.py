"""One configuration of every component, small enough for tests, and all that go together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.helpers import make_spec
from servekit.config.admission import (
    AdmissionConfig,
    OnDemandAdmissionConfig,
    PredictedAdmissionConfig,
    WorstCaseAdmissionConfig,
)
from servekit.config.batching import (
    BatchingConfig,
    ContinuousBatchingConfig,
    DynamicBatchingConfig,
    StaticBatchingConfig,
)
from servekit.config.errors import ConfigError
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    PriorityPolicyConfig,
    SjfPolicyConfig,
    SrtfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.config.preemption import (
    NoPreemptionConfig,
    PreemptionConfig,
    RecomputePreemptionConfig,
    SwapPreemptionConfig,
    VictimRule,
)
from servekit.config.prefill import (
    ChunkedPrefillConfig,
    InterleavedPrefillConfig,
    PrefillConfig,
    SeparatePrefillConfig,
    SplitFusePrefillConfig,
    WholePrefillConfig,
)
from servekit.config.prefix_cache import (
    HashPrefixCacheConfig,
    NoPrefixCacheConfig,
    PrefixCacheConfig,
    RadixPrefixCacheConfig,
)
from servekit.config.schema import SchedulerConfig
from servekit.core.request import RequestSpec

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 6
NUM_BLOCKS = 20
"""Of four tokens: one longest request, or three of middling length."""

BATCHINGS: dict[str, BatchingConfig] = {
    "continuous": ContinuousBatchingConfig(),
    "static": StaticBatchingConfig(max_batch_delay_ms=3000.0, early_return=True),
    "static-held": StaticBatchingConfig(max_batch_delay_ms=3000.0, early_return=False),
    "dynamic": DynamicBatchingConfig(batches_in_flight=2, preferred_batch_sizes=(2,), max_batch_delay_ms=2000.0),
}
POLICIES: dict[str, PolicyConfig] = {
    "fifo": FifoPolicyConfig(),
    "sjf": SjfPolicyConfig(),
    "srtf": SrtfPolicyConfig(),
    "priority": PriorityPolicyConfig(preempt=False),
    "priority-preempting": PriorityPolicyConfig(preempt=True),
    "fair": FairPolicyConfig(),
    "vtc": VtcPolicyConfig(),
    "mlfq": MlfqPolicyConfig(),
    "lpm": LpmPolicyConfig(),
}
PREFILLS: dict[str, PrefillConfig] = {
    "chunked": ChunkedPrefillConfig(chunk_tokens=5),
    "whole": WholePrefillConfig(),
    "whole-mixed": WholePrefillConfig(mix_decodes=True),
    "separate": SeparatePrefillConfig(buckets_tokens=(8, 24)),
    "interleaved": InterleavedPrefillConfig(chunk_tokens=8, decode_steps=2),
    "splitfuse": SplitFusePrefillConfig(),
}
PREEMPTIONS: dict[str, PreemptionConfig] = {
    "recompute": RecomputePreemptionConfig(),
    "recompute-newest": RecomputePreemptionConfig(victim=VictimRule.newest),
    "recompute-deadlock": RecomputePreemptionConfig(only_on_deadlock=True),
    "swap": SwapPreemptionConfig(),
    "none": NoPreemptionConfig(),
}
PREFIX_CACHES: dict[str, PrefixCacheConfig] = {
    "none": NoPrefixCacheConfig(),
    "hash": HashPrefixCacheConfig(share_in_batch_tokens=8),
    "radix": RadixPrefixCacheConfig(share_in_batch_tokens=8),
}
NO_LIMITS = {"queue_timeout_s": None, "request_timeout_s": None, "max_queue_requests": None}
ADMISSIONS: dict[str, AdmissionConfig] = {
    "on_demand": OnDemandAdmissionConfig(watermark=0.05, **NO_LIMITS),  # type: ignore[arg-type]
    "worst_case": WorstCaseAdmissionConfig(**NO_LIMITS),  # type: ignore[arg-type]
    "predicted": PredictedAdmissionConfig(**NO_LIMITS),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class Combination:
    """One choice of every component."""

    batching: str
    policy: str
    prefill: str
    preemption: str
    prefix_cache: str
    admission: str

    def config(self) -> SchedulerConfig:
        """Raises ConfigError when the choices contradict each other."""
        return SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_step_tokens=MAX_MODEL_LEN, batching=BATCHINGS[self.batching],
            policy=POLICIES[self.policy], prefill=PREFILLS[self.prefill], preemption=PREEMPTIONS[self.preemption],
            prefix_cache=PREFIX_CACHES[self.prefix_cache], admission=ADMISSIONS[self.admission])

    @property
    def is_valid(self) -> bool:
        try:
            self.config()
        except ConfigError:
            return False
        return True


def combinations(batching: str, policy: str) -> Iterator[Combination]:
    """All that go together with these two."""
    for rest in itertools.product(PREFILLS, PREEMPTIONS, PREFIX_CACHES, ADMISSIONS):
        combination = Combination(batching, policy, *rest)
        if combination.is_valid:
            yield combination


PAIRS = [pair for pair in itertools.product(BATCHINGS, POLICIES) if any(combinations(*pair))]


def random_spec(rng: random.Random, name: str, now: float) -> RequestSpec:
    """Prompts over three shared beginnings, three tenants, three classes."""
    shared = [rng.randrange(3) * 1000 + i for i in range(rng.choice([0, 0, 9, 17]))]
    own = [rng.randrange(50000) for _ in range(rng.randrange(1, 16))]
    max_tokens = rng.randrange(1, 24)
    return replace(make_spec(name, shared + own, max_tokens=max_tokens, arrived_s=now),
                   tenant=rng.choice("abc"), priority=rng.randrange(3), predicted_output_tokens=max_tokens)
