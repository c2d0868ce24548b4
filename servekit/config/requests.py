"""What the chosen scheduler components take from a request: other fields would be ignored, and are refused instead."""

from __future__ import annotations

from servekit.config.admission import Reserve, WorstCaseAdmissionConfig
from servekit.config.policy import Policy, Prediction, SjfPolicyConfig, SrtfPolicyConfig
from servekit.config.schema import SchedulerConfig


def honours_priority(scheduler: SchedulerConfig, priority: int) -> bool:
    """Whether a request of this class is treated by it: by the policy, or by limits of its class's own."""
    return scheduler.policy.kind is Policy.priority or priority in scheduler.admission.classes


def honours_predictions(scheduler: SchedulerConfig) -> bool:
    """Whether a request's own prediction of its output length is used, for its place or for its memory."""
    match scheduler.policy:
        case SjfPolicyConfig(prediction=Prediction.oracle) | SrtfPolicyConfig(prediction=Prediction.oracle):
            return True
    match scheduler.admission:
        case WorstCaseAdmissionConfig(reserve=Reserve.power_of_two | Reserve.oracle):
            return True
    return False


def queue_timeout_s(scheduler: SchedulerConfig, priority: int) -> float | None:
    """Longest wait for the first step of a request of this class, in seconds; None: no limit."""
    limits = scheduler.admission.classes.get(priority)
    return scheduler.admission.queue_timeout_s if limits is None else limits.queue_timeout_s
