"""Which scheduler components contradict each other, and why."""

from __future__ import annotations

from servekit.config.admission import AdmissionConfig, Reserve, TimeoutAction, WorstCaseAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig
from servekit.config.errors import ConfigError
from servekit.config.policy import (
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    PriorityPolicyConfig,
    SrtfPolicyConfig,
)
from servekit.config.preemption import (
    NoPreemptionConfig,
    PreemptionConfig,
    RecomputePreemptionConfig,
    SwapPreemptionConfig,
    VictimRule,
)
from servekit.config.prefill import PrefillConfig
from servekit.config.prefix_cache import NoPrefixCacheConfig, PrefixCacheConfig


def contradiction(batching: BatchingConfig, policy: PolicyConfig, prefill: PrefillConfig,
                  preemption: PreemptionConfig, prefix_cache: PrefixCacheConfig,
                  admission: AdmissionConfig) -> ConfigError | None:
    """The first contradiction among a scheduler's components; None when they go together."""
    takes_places = _takes_places(policy)
    if takes_places and not isinstance(batching, ContinuousBatchingConfig):
        return ConfigError(
            "scheduler.batching.kind", batching.kind.value,
            f"runs a batch to its end, and scheduler.policy.kind={policy.kind.value} takes running requests' places",
            "set scheduler/batching=continuous or a policy that preempts nobody, such as fifo")
    if (takes_places and isinstance(preemption, RecomputePreemptionConfig | SwapPreemptionConfig)
            and preemption.victim is not VictimRule.policy):
        return ConfigError(
            "scheduler.preemption.victim", preemption.victim.value,
            f"may stop a request that scheduler.policy.kind={policy.kind.value} puts before others",
            "set scheduler.preemption.victim=policy")
    if isinstance(preemption, NoPreemptionConfig):
        if takes_places:
            return ConfigError(
                "scheduler.preemption.kind", preemption.kind.value,
                f"lets nobody give way, and scheduler.policy.kind={policy.kind.value} takes running requests' places",
                "set scheduler/preemption=recompute or a policy that preempts nobody, such as fifo")
        if not _reserves_everything(admission):
            return ConfigError(
                "scheduler.preemption.kind", preemption.kind.value,
                "needs room for every request to its end before it starts, and "
                f"scheduler.admission.kind={admission.kind.value} does not reserve that",
                "set scheduler/admission=worst_case with scheduler.admission.reserve=max_tokens, or "
                "scheduler/preemption=recompute")
    if isinstance(policy, LpmPolicyConfig) and isinstance(prefix_cache, NoPrefixCacheConfig):
        return ConfigError(
            "scheduler.policy.kind", policy.kind.value, "orders by cached prefixes, and there is no prefix cache",
            "set scheduler/prefix_cache=hash or scheduler/policy=fifo")
    if _delays(admission) and not isinstance(policy, FifoPolicyConfig | PriorityPolicyConfig):
        return ConfigError(
            "scheduler.admission.on_timeout", TimeoutAction.delay.value,
            f"puts late requests behind those in time, and scheduler.policy.kind={policy.kind.value} has an order of "
            "its own", "set scheduler.admission.on_timeout=reject, or scheduler/policy=fifo or priority")
    return None


def _takes_places(policy: PolicyConfig) -> bool:
    match policy:
        case PriorityPolicyConfig(preempt=preempt):
            return preempt
        case SrtfPolicyConfig() | MlfqPolicyConfig():
            return True
    return False


def _reserves_everything(admission: AdmissionConfig) -> bool:
    return isinstance(admission, WorstCaseAdmissionConfig) and admission.reserve in (
        Reserve.max_tokens, Reserve.max_model_len)


def _delays(admission: AdmissionConfig) -> bool:
    return TimeoutAction.delay in (admission.on_timeout, *(c.on_timeout for c in admission.classes.values()))
