"""The composition root of the scheduler: the only place that turns configured names into objects."""

from __future__ import annotations

from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig
from servekit.config.policy import FifoPolicyConfig, PolicyConfig
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig, PrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.admission import Admission, OnDemandAdmission, QueueLimits
from servekit.core.batching import Batching, ContinuousBatching
from servekit.core.kv import KVManager
from servekit.core.policy import FifoPolicy, Policy
from servekit.core.preemption import Preemption, RecomputePreemption
from servekit.core.prefill import ChunkedPrefill, Prefill
from servekit.core.prefix import HashPrefixIndex, NoPrefixIndex, PrefixIndex
from servekit.core.scheduler import Components, Scheduler


def build_scheduler(config: SchedulerConfig, num_kv_blocks: int, block_size_tokens: int,
                    max_model_len: int) -> Scheduler:
    """Assemble a scheduler from its configuration and the KV cache that the memory planner found room for."""
    kv = KVManager(num_kv_blocks, block_size_tokens, build_prefix_index(config.prefix_cache, block_size_tokens))
    components = Components(
        batching=build_batching(config.batching, config.max_num_seqs),
        policy=build_policy(config.policy),
        prefill=build_prefill(config.prefill),
        preemption=build_preemption(config.preemption),
        admission=build_admission(config.admission),
        limits=QueueLimits(max_requests=config.admission.max_queue_requests,
                           max_tokens=config.admission.max_queue_tokens,
                           queue_timeout_s=config.admission.queue_timeout_s,
                           request_timeout_s=config.admission.request_timeout_s))
    return Scheduler(components, kv, config.max_step_tokens, max_model_len)


def build_batching(config: BatchingConfig, max_num_seqs: int) -> Batching:
    match config:
        case ContinuousBatchingConfig():
            return ContinuousBatching(max_num_seqs)
    raise TypeError(f"no batching component for {config}")


def build_policy(config: PolicyConfig) -> Policy:
    match config:
        case FifoPolicyConfig():
            return FifoPolicy()
    raise TypeError(f"no policy for {config}")


def build_prefill(config: PrefillConfig) -> Prefill:
    match config:
        case ChunkedPrefillConfig(chunk_tokens=chunk_tokens):
            return ChunkedPrefill(chunk_tokens)
    raise TypeError(f"no prefill component for {config}")


def build_preemption(config: PreemptionConfig) -> Preemption:
    match config:
        case RecomputePreemptionConfig():
            return RecomputePreemption()
    raise TypeError(f"no preemption component for {config}")


def build_prefix_index(config: PrefixCacheConfig, block_size_tokens: int) -> PrefixIndex:
    match config:
        case NoPrefixCacheConfig():
            return NoPrefixIndex()
        case HashPrefixCacheConfig():
            return HashPrefixIndex(block_size_tokens)
    raise TypeError(f"no prefix cache for {config}")


def build_admission(config: AdmissionConfig) -> Admission:
    match config:
        case OnDemandAdmissionConfig(watermark=watermark):
            return OnDemandAdmission(watermark)
    raise TypeError(f"no admission rule for {config}")
