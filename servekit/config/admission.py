"""What may start, what may wait, and for how long: the components of scheduler.admission."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from servekit.config.bounds import at_least, fixed_kind, within
from servekit.config.errors import require


class Admission(Enum):
    """How much KV memory a request must find free before it may start."""

    on_demand = "on_demand"
    worst_case = "worst_case"
    predicted = "predicted"


class Reserve(Enum):
    """For how long a prompt and output the worst case is reserved."""

    max_tokens = "max_tokens"
    """The prompt and the request's max_tokens."""
    max_model_len = "max_model_len"
    """The model's length, whatever the request."""
    power_of_two = "power_of_two"
    """The prompt and the request's predicted output, rounded up to a power of two."""
    oracle = "oracle"
    """The prompt and the request's predicted output."""


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
        at_least(f"{section}.max_queue_requests", self.max_queue_requests, 1, 512)
        at_least(f"{section}.max_queue_tokens", self.max_queue_tokens, 1, None)
        _check_timeout(f"{section}.queue_timeout_s", self.queue_timeout_s)
        _check_timeout(f"{section}.request_timeout_s", self.request_timeout_s)
        for priority, limits in self.classes.items():
            own = f"{section}.classes.{priority}"
            at_least(f"{own}.max_queue_requests", limits.max_queue_requests, 1, None)
            _check_timeout(f"{own}.queue_timeout_s", limits.queue_timeout_s)


def _check_timeout(key: str, value: float | None) -> None:
    require(value is None or 0 < value < math.inf, key, value, "must be greater than 0",
            f"set {key}=null for no limit")


@dataclass(frozen=True)
class OnDemandAdmissionConfig(AdmissionConfig):
    """A request starts as soon as its prompt's blocks fit beside a small reserve."""

    watermark: float = 0.01
    """Share of the KV blocks that admission leaves free for requests already running."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("admission", self.kind, Admission.on_demand)
        within("scheduler.admission.watermark", self.watermark, 0.0, 0.5, 0.01)


@dataclass(frozen=True)
class WorstCaseAdmissionConfig(AdmissionConfig):
    """A request starts when all the blocks that it can come to need are free, and it gets them at once."""

    kind: Admission = Admission.worst_case
    """Which component this is."""
    reserve: Reserve = Reserve.max_tokens
    """For what length: the request's max_tokens, the model's length, or the predicted output, which may be exceeded.
    A request without a prediction reserves for its max_tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("admission", self.kind, Admission.worst_case)


@dataclass(frozen=True)
class PredictedAdmissionConfig(AdmissionConfig):
    """A request starts when its output, and a share of the running requests' that adapts, still fit (SGLang)."""

    kind: Admission = Admission.predicted
    """Which component this is."""
    start_ratio: float = 0.7
    """Share of the output still allowed that running requests are expected to produce, when the engine was idle."""
    min_ratio: float = 0.098
    """What the share falls to, in equal steps, while memory suffices."""
    decay_steps: int = 600
    """Steps with decodes in which it falls from start_ratio to min_ratio."""
    max_output_tokens: int = 4096
    """What any output is counted as at most."""
    margin_tokens: int = 20
    """Tokens more than it has produced that each request is taken to need when memory ran out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_kind("admission", self.kind, Admission.predicted)
        section = "scheduler.admission"
        within(f"{section}.start_ratio", self.start_ratio, 0.0, 1.0, 0.7)
        within(f"{section}.min_ratio", self.min_ratio, 0.0, 1.0, 0.3)
        require(self.min_ratio <= self.start_ratio, f"{section}.min_ratio", self.min_ratio,
                f"must not exceed {section}.start_ratio={self.start_ratio}, from which the share falls",
                f"set {section}.min_ratio={self.start_ratio} for a share that stays")
        at_least(f"{section}.decay_steps", self.decay_steps, 1, 600)
        at_least(f"{section}.max_output_tokens", self.max_output_tokens, 1, 4096)
        at_least(f"{section}.margin_tokens", self.margin_tokens, 0, 20)
