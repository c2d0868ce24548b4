"""The composition root of the scheduler: the only place that turns configured names into objects."""

from __future__ import annotations

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
from servekit.config.errors import require
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    Prediction,
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
    SharingConfig,
)
from servekit.config.schema import SchedulerConfig
from servekit.config.tenants import TenantsConfig
from servekit.core.admission.base import Admission, ClassLimits, QueueLimits
from servekit.core.admission.on_demand import OnDemandAdmission
from servekit.core.admission.predicted import PredictedAdmission
from servekit.core.admission.worst_case import WorstCaseAdmission
from servekit.core.batching.base import Batching
from servekit.core.batching.continuous import ContinuousBatching
from servekit.core.batching.dynamic import DynamicBatching
from servekit.core.batching.static import StaticBatching
from servekit.core.kv import KVManager
from servekit.core.policy.base import Policy
from servekit.core.policy.fair import FairPolicy
from servekit.core.policy.fifo import FifoPolicy
from servekit.core.policy.lpm import LpmPolicy
from servekit.core.policy.mlfq import MlfqPolicy
from servekit.core.policy.prediction import LearnedPredictor, MaxTokensPredictor, OraclePredictor, Predictions
from servekit.core.policy.priority import PriorityPolicy
from servekit.core.policy.queue import Queue, RequestHeap
from servekit.core.policy.quota import QuotaQueue
from servekit.core.policy.sjf import SjfPolicy
from servekit.core.policy.srtf import SrtfPolicy
from servekit.core.policy.vtc import VtcPolicy
from servekit.core.preemption.base import Preemption
from servekit.core.preemption.none import NoPreemption
from servekit.core.preemption.recompute import RecomputePreemption
from servekit.core.preemption.swap import SwapPreemption
from servekit.core.prefill.base import Prefill
from servekit.core.prefill.chunked import ChunkedPrefill
from servekit.core.prefill.interleaved import InterleavedPrefill
from servekit.core.prefill.separate import SeparatePrefill
from servekit.core.prefill.splitfuse import SplitFusePrefill
from servekit.core.prefill.whole import Patience, WholePrefill
from servekit.core.prefix.announced import AnnouncedPrefixes
from servekit.core.prefix.base import PrefixIndex
from servekit.core.prefix.chain import HashChain
from servekit.core.prefix.hash import HashPrefixIndex
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.prefix.radix import RadixPrefixIndex
from servekit.core.quota import TenantQuotas
from servekit.core.scheduler import Components, Scheduler


def build_scheduler(config: SchedulerConfig, num_kv_blocks: int, block_size_tokens: int, max_model_len: int,
                    num_host_blocks: int = 0) -> Scheduler:
    """Assemble a scheduler from its configuration and the KV cache that the memory planner found room for.

    `num_host_blocks` is the room in the host's memory for requests that are swapped out, in KV blocks.

    Raises:
        ConfigError: a component's options contradict the limits on requests and tokens.
    """
    check_steps(config, max_model_len)
    index = build_prefix_index(config.prefix_cache, block_size_tokens)
    quotas = TenantQuotas(config.tenants.quotas, config.tenants.default_quota)
    components = Components(
        batching=build_batching(config.batching, config.max_num_seqs),
        policy=build_policy(config.policy, config.tenants, quotas, index),
        prefill=build_prefill(config.prefill, config.max_step_tokens),
        preemption=build_preemption(config.preemption),
        admission=build_admission(config.admission, max_model_len),
        limits=build_limits(config.admission),
        quotas=quotas,
        share_in_batch_tokens=share_in_batch_tokens(config))
    kv = KVManager(num_kv_blocks, block_size_tokens, index, num_host_blocks,
                   build_announced(config.prefix_cache, block_size_tokens))
    return Scheduler(components, kv, config.max_step_tokens, max_model_len)


def build_batching(config: BatchingConfig, max_num_seqs: int) -> Batching:
    match config:
        case ContinuousBatchingConfig():
            return ContinuousBatching(max_num_seqs)
        case StaticBatchingConfig(max_batch_delay_ms=delay_ms, early_return=early_return):
            return StaticBatching(max_num_seqs, delay_ms / 1000, early_return)
        case DynamicBatchingConfig(batches_in_flight=batches, preferred_batch_sizes=sizes, max_batch_delay_ms=delay_ms):
            return DynamicBatching(config.batch_size(max_num_seqs), batches, sizes, delay_ms / 1000)
    raise TypeError(f"no batching component for {config}")


def build_policy(config: PolicyConfig, tenants: TenantsConfig, quotas: TenantQuotas, index: PrefixIndex) -> Policy:
    queue: Queue = QuotaQueue(quotas) if quotas.has_soft else RequestHeap()
    match config:
        case FifoPolicyConfig():
            return FifoPolicy(queue)
        case SjfPolicyConfig(prediction=prediction, prefill_weight=prefill_weight, ageing_tokens_per_s=ageing):
            return SjfPolicy(queue, build_predictions(prediction), prefill_weight, ageing)
        case SrtfPolicyConfig(prediction=prediction, prefill_weight=prefill_weight):
            return SrtfPolicy(queue, build_predictions(prediction), prefill_weight, config.margin_tokens,
                              config.min_run_tokens)
        case PriorityPolicyConfig():
            return PriorityPolicy(queue, config.preempt, config.class_slots, config.own_batches, config.ageing_s)
        case FairPolicyConfig():
            return FairPolicy(tenants.weights, quotas)
        case VtcPolicyConfig():
            return VtcPolicy(tenants.weights, quotas, config.prompt_weight, config.output_weight, config.charge_cached)
        case MlfqPolicyConfig():
            return MlfqPolicy(queue, config.quantum_s, config.quantum_growth, config.prefill_s_per_token,
                              config.starvation_s)
        case LpmPolicyConfig(max_ranked=max_ranked):
            return LpmPolicy(queue, index, max_ranked)
    raise TypeError(f"no policy for {config}")


def build_predictions(prediction: Prediction) -> Predictions:
    match prediction:
        case Prediction.max_tokens:
            return Predictions(MaxTokensPredictor())
        case Prediction.oracle:
            return Predictions(OraclePredictor())
        case Prediction.learned:
            return Predictions(LearnedPredictor())


def build_prefill(config: PrefillConfig, max_step_tokens: int) -> Prefill:
    match config:
        case ChunkedPrefillConfig(chunk_tokens=chunk_tokens, chunk_multiple_tokens=multiple_tokens):
            return ChunkedPrefill(chunk_tokens, multiple_tokens)
        case SplitFusePrefillConfig():
            return SplitFusePrefill()
        case InterleavedPrefillConfig(chunk_tokens=chunk_tokens, decode_steps=decode_steps):
            return InterleavedPrefill(chunk_tokens, decode_steps, max_step_tokens)
        case WholePrefillConfig(mix_decodes=mix_decodes, waiting_served_ratio=ratio, max_decode_steps=decode_steps):
            return WholePrefill(mix_decodes, None if ratio is None else Patience(ratio, decode_steps))
        case SeparatePrefillConfig(buckets_tokens=buckets_tokens, decode_steps=decode_steps):
            return SeparatePrefill(buckets_tokens, decode_steps)
    raise TypeError(f"no prefill component for {config}")


def build_preemption(config: PreemptionConfig) -> Preemption:
    match config:
        case NoPreemptionConfig():
            return NoPreemption()
        case RecomputePreemptionConfig(victim=victim, only_on_deadlock=only_on_deadlock):
            return RecomputePreemption(victim, only_on_deadlock)
        case SwapPreemptionConfig(victim=victim, only_on_deadlock=only_on_deadlock):
            return SwapPreemption(RecomputePreemption(victim, only_on_deadlock))
    raise TypeError(f"no preemption component for {config}")


def build_prefix_index(config: PrefixCacheConfig, block_size_tokens: int) -> PrefixIndex:
    match config:
        case NoPrefixCacheConfig():
            return NoPrefixIndex()
        case HashPrefixCacheConfig(namespace=namespace):
            return HashPrefixIndex(HashChain(block_size_tokens, namespace))
        case RadixPrefixCacheConfig(namespace=namespace):
            return RadixPrefixIndex(block_size_tokens, namespace)
    raise TypeError(f"no prefix cache for {config}")


def build_announced(config: PrefixCacheConfig, block_size_tokens: int) -> AnnouncedPrefixes | None:
    if not isinstance(config, SharingConfig) or config.share_in_batch_tokens is None:
        return None
    return AnnouncedPrefixes(HashChain(block_size_tokens, config.namespace))


def build_admission(config: AdmissionConfig, max_model_len: int) -> Admission:
    match config:
        case OnDemandAdmissionConfig(watermark=watermark):
            return OnDemandAdmission(watermark)
        case WorstCaseAdmissionConfig(reserve=reserve):
            return WorstCaseAdmission(reserve, max_model_len)
        case PredictedAdmissionConfig():
            return PredictedAdmission(config.start_ratio, config.min_ratio, config.decay_steps,
                                      config.max_output_tokens, config.margin_tokens)
    raise TypeError(f"no admission rule for {config}")


def build_limits(config: AdmissionConfig) -> QueueLimits:
    classes = {priority: ClassLimits(limits.max_queue_requests, limits.queue_timeout_s, limits.on_timeout)
               for priority, limits in config.classes.items()}
    return QueueLimits(config.max_queue_requests, config.max_queue_tokens, config.queue_timeout_s,
                       config.request_timeout_s, config.on_timeout, classes)


def share_in_batch_tokens(config: SchedulerConfig) -> int | None:
    """A batch that runs to its end takes everybody along: who waits for a prefix would miss all of it."""
    if isinstance(config.prefix_cache, SharingConfig) and isinstance(config.batching, ContinuousBatchingConfig):
        return config.prefix_cache.share_in_batch_tokens
    return None


def check_steps(config: SchedulerConfig, max_model_len: int) -> None:
    """Raise `ConfigError` unless every prompt gets on in a step that has its least share of the budget."""
    prefill, max_step_tokens = config.prefill, config.max_step_tokens
    match prefill:
        case WholePrefillConfig() | SeparatePrefillConfig():
            require(max_step_tokens >= max_model_len, "scheduler.max_step_tokens", max_step_tokens,
                    f"must be at least the model's length of {max_model_len} tokens, since "
                    f"scheduler/prefill={prefill.kind.value} computes each prompt in one step",
                    f"set scheduler.max_step_tokens={max_model_len}, lower model.max_model_len or choose "
                    "scheduler/prefill=chunked")
        case InterleavedPrefillConfig(chunk_tokens=chunk_tokens):
            require(chunk_tokens <= max_step_tokens, "scheduler.prefill.chunk_tokens", chunk_tokens,
                    f"must not exceed the step budget scheduler.max_step_tokens={max_step_tokens}",
                    f"set scheduler.prefill.chunk_tokens={max_step_tokens} or raise scheduler.max_step_tokens")
        case ChunkedPrefillConfig(chunk_multiple_tokens=multiple_tokens):
            left_tokens = max_step_tokens - (config.max_num_seqs - 1)
            require(multiple_tokens <= left_tokens, "scheduler.prefill.chunk_multiple_tokens", multiple_tokens,
                    f"must not exceed {left_tokens}, which scheduler.max_step_tokens={max_step_tokens} leaves beside "
                    f"the decodes of scheduler.max_num_seqs={config.max_num_seqs}",
                    f"set scheduler.max_step_tokens={max_step_tokens + multiple_tokens - left_tokens} or lower "
                    "scheduler.max_num_seqs")
