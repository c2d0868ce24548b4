"""What may start, what may wait, and for how long: the components of scheduler.admission."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from servekit.config.checks import at_least, fixed_kind, fraction
from servekit.config.errors import require


class Admission(Enum):
    """How much KV memory a request must find free before it may start."""

    on_demand = "on_demand"


class TimeoutAction(Enum):
    """What happens to a request that has waited as long as it may."""

    reject = "reject"
    delay = "delay"


@dataclass(frozen=True)
class ClassLimitsConfig:
    """Limits of their own for the requests of one class (one priority)."""

    max_queue_requests: int | None = None
    """Requests of the class that may wait beyond those that a free slot awaits. null: no limit of its own."""
    queue_timeout_s: float | None = None
    """Longest wait for the first step, in seconds. null: no limit."""
    on_timeout: TimeoutAction = TimeoutAction.reject
    """What happens after it: the request is refused, or waits on behind those of its class that are in time."""


@dataclass(frozen=True)
class AdmissionConfig:
    """Base of the admission rules; the limits hold for every rule."""

    kind: Admission = Admission.on_demand
    """Which component this is."""
    max_queue_requests: int | None = 512
    """Requests that may wait beyond those that a free slot awaits; more are refused with 503. null: no limit."""
    max_queue_tokens: int | None = None
    """Prompt tokens that may wait; more are refused with 503. null: no limit."""
    queue_timeout_s: float | None = 60.0
    """Longest wait for the first step, in seconds. null: no limit."""
    request_timeout_s: float | None = 300.0
    """Longest time from arrival to the last token, in seconds. null: no limit."""
    on_timeout: TimeoutAction = TimeoutAction.reject
    """What happens after queue_timeout_s: the request is refused, or waits on behind those that are in time."""
    classes: dict[int, ClassLimitsConfig] = field(default_factory=dict)
    """Queue limits of single classes, by priority; they take the place of those above."""

    def __post_init__(self) -> None:
        section = "scheduler.admission"
        at_least(section, "max_queue_requests", self.max_queue_requests, 1, 512)
        at_least(section, "max_queue_tokens", self.max_queue_tokens, 1, None)
        for name in ("queue_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"{section}.{name}", value, "must be greater than 0",
                    f"set {section}.{name}=null for no limit")


@dataclass(frozen=True)
class OnDemandAdmissionConfig(AdmissionConfig):
    """A request starts as soon as its prompt's blocks fit beside a small reserve."""

    watermark: float = 0.01
    """Share of the KV blocks that admission leaves free for requests already running."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("admission", self.kind, Admission.on_demand)
        fraction("scheduler.admission", "watermark", self.watermark, 0.0, 0.5)
