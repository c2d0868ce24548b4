"""The composition root of the scheduler: the only place that turns configured names into objects."""

from __future__ import annotations

from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig
from servekit.config.policy import FifoPolicyConfig, PolicyConfig
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig, PrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.admission.base import Admission, ClassLimits, QueueLimits
from servekit.core.admission.on_demand import OnDemandAdmission
from servekit.core.batching.base import Batching
from servekit.core.batching.continuous import ContinuousBatching
from servekit.core.kv import KVManager
from servekit.core.policy.base import Policy
from servekit.core.policy.fifo import FifoPolicy
from servekit.core.preemption.base import Preemption
from servekit.core.preemption.recompute import RecomputePreemption
from servekit.core.prefill.base import Prefill
from servekit.core.prefill.chunked import ChunkedPrefill
from servekit.core.prefix.base import PrefixIndex
from servekit.core.prefix.hash import HashPrefixIndex
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.quota import TenantQuotas
from servekit.core.scheduler import Components, Scheduler


def build_scheduler(config: SchedulerConfig, num_kv_blocks: int, block_size_tokens: int, max_model_len: int,
                    num_host_blocks: int = 0) -> Scheduler:
    """Assemble a scheduler from its configuration and the KV cache that the memory planner found room for.

    `num_host_blocks` is the room in the host's memory for requests that are swapped out, in KV blocks.
    """
    index = build_prefix_index(config.prefix_cache, block_size_tokens)
    components = Components(
        batching=build_batching(config.batching, config.max_num_seqs),
        policy=build_policy(config.policy),
        prefill=build_prefill(config.prefill),
        preemption=build_preemption(config.preemption),
        admission=build_admission(config.admission),
        limits=build_limits(config.admission),
        quotas=TenantQuotas({}),
        share_in_batch_tokens=share_in_batch_tokens(config.prefix_cache))
    kv = KVManager(num_kv_blocks, block_size_tokens, index, num_host_blocks)
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


def build_limits(config: AdmissionConfig) -> QueueLimits:
    classes = {priority: ClassLimits(limits.max_queue_requests, limits.queue_timeout_s, limits.on_timeout)
               for priority, limits in config.classes.items()}
    return QueueLimits(config.max_queue_requests, config.max_queue_tokens, config.queue_timeout_s,
                       config.request_timeout_s, config.on_timeout, classes)


def share_in_batch_tokens(config: PrefixCacheConfig) -> int | None:
    return config.share_in_batch_tokens if isinstance(config, HashPrefixCacheConfig) else None
