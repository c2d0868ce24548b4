"""Which scheduler components contradict each other, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servekit.config.admission import AdmissionConfig, Reserve, TimeoutAction, WorstCaseAdmissionConfig
from servekit.config.batching import ContinuousBatchingConfig
from servekit.config.errors import ConfigError
from servekit.config.policy import (
    FairPolicyConfig,
    FifoPolicyConfig,
    LpmPolicyConfig,
    MlfqPolicyConfig,
    PolicyConfig,
    PriorityPolicyConfig,
    SrtfPolicyConfig,
    VtcPolicyConfig,
)
from servekit.config.preemption import (
    NoPreemptionConfig,
    RecomputePreemptionConfig,
    SwapPreemptionConfig,
    VictimRule,
)
from servekit.config.prefix_cache import NoPrefixCacheConfig

if TYPE_CHECKING:
    from servekit.config.schema import SchedulerConfig


def contradiction(config: SchedulerConfig) -> ConfigError | None:
    """The first contradiction among a scheduler's components; None when they go together."""
    checks = (_places_contradiction, _memory_contradiction, _order_contradiction, _classes_contradiction,
              _tenants_contradiction)
    return next((problem for check in checks if (problem := check(config)) is not None), None)


def _places_contradiction(config: SchedulerConfig) -> ConfigError | None:
    """Policies that take the places of running requests."""
    batching, policy, preemption = config.batching, config.policy, config.preemption
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
    return None


def _memory_contradiction(config: SchedulerConfig) -> ConfigError | None:
    """Requests that nobody can stop."""
    policy, preemption, admission = config.policy, config.preemption, config.admission
    if isinstance(preemption, NoPreemptionConfig):
        if _takes_places(policy):
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
    return None


def _order_contradiction(config: SchedulerConfig) -> ConfigError | None:
    """Orders that cannot be had, or that contradict each other."""
    policy, admission = config.policy, config.admission
    if isinstance(policy, LpmPolicyConfig) and isinstance(config.prefix_cache, NoPrefixCacheConfig):
        return ConfigError(
            "scheduler.policy.kind", policy.kind.value, "orders by cached prefixes, and there is no prefix cache",
            "set scheduler/prefix_cache=hash or scheduler/policy=fifo")
    if _delays(admission) and not isinstance(policy, FifoPolicyConfig | PriorityPolicyConfig):
        return ConfigError(
            "scheduler.admission.on_timeout", TimeoutAction.delay.value,
            f"puts late requests behind those in time, and scheduler.policy.kind={policy.kind.value} has an order of "
            "its own", "set scheduler.admission.on_timeout=reject, or scheduler/policy=fifo or priority")
    if _delays(admission) and isinstance(policy, PriorityPolicyConfig) and policy.ageing_s is not None:
        return ConfigError(
            "scheduler.policy.ageing_s", policy.ageing_s,
            "lets a request come forward the longer it waits, and scheduler.admission.on_timeout=delay puts it behind",
            "set scheduler.policy.ageing_s=null or scheduler.admission.on_timeout=reject")
    return None


def _classes_contradiction(config: SchedulerConfig) -> ConfigError | None:
    """Slots and batches of single classes."""
    policy = config.policy
    if not isinstance(policy, PriorityPolicyConfig):
        return None
    num_kept = sum(policy.class_slots.values())
    if num_kept >= config.max_num_seqs:
        return ConfigError(
            "scheduler.policy.class_slots", dict(policy.class_slots),
            f"keeps {num_kept} slots for single classes, all that scheduler.max_num_seqs={config.max_num_seqs} has, so "
            "that other classes could never start",
            f"set scheduler.max_num_seqs={num_kept + 1} or more, or keep fewer slots")
    if policy.own_batches and isinstance(config.batching, ContinuousBatchingConfig):
        return ConfigError(
            "scheduler.policy.own_batches", True, "is about batches that are formed as a whole, and "
            "scheduler.batching.kind=continuous forms none",
            "set scheduler.policy.own_batches=false, or scheduler/batching=static or dynamic")
    return None


def _tenants_contradiction(config: SchedulerConfig) -> ConfigError | None:
    """Shares of tenants that nothing looks at."""
    if config.tenants.weights and not isinstance(config.policy, FairPolicyConfig | VtcPolicyConfig):
        return ConfigError(
            "scheduler.tenants.weights", dict(config.tenants.weights),
            f"are shares in the policies fair and vtc, and scheduler.policy.kind={config.policy.kind.value} has none",
            "set scheduler/policy=vtc or fair, or leave the weights out")
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
