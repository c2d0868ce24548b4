"""In which order requests are served: the components of scheduler.policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from servekit.config.bounds import above_zero, at_least, fixed_kind
from servekit.config.errors import require


class Policy(Enum):
    """In which order waiting requests are admitted."""

    fifo = "fifo"
    sjf = "sjf"
    srtf = "srtf"
    priority = "priority"
    fair = "fair"
    vtc = "vtc"
    mlfq = "mlfq"
    lpm = "lpm"


class Prediction(Enum):
    """How the length of an answer is foretold."""

    max_tokens = "max_tokens"
    """The most that the request allows."""
    oracle = "oracle"
    """What the request says it expects; the most that it allows, if it says nothing."""
    learned = "learned"
    """The mean of the latest answers to prompts of about the same length."""


@dataclass(frozen=True)
class PolicyConfig:
    """Base of the ordering policies."""

    kind: Policy = Policy.fifo
    """Which component this is."""


@dataclass(frozen=True)
class FifoPolicyConfig(PolicyConfig):
    """First come, first served."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.fifo)


@dataclass(frozen=True)
class SjfPolicyConfig(PolicyConfig):
    """Shortest job first, by predicted work, with ageing."""

    kind: Policy = Policy.sjf
    """Which component this is."""
    prediction: Prediction = Prediction.max_tokens
    """How the length of an answer is foretold."""
    prefill_weight: float = 0.5
    """Work of one prompt token, where that of one output token is 1."""
    ageing_tokens_per_s: float = 20.0
    """How much work a second of waiting makes up for; a request is overtaken only by those that arrive within
    (difference in work) / ageing_tokens_per_s after it. 0: pure shortest job first, under which long ones can
    starve."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.sjf)
        at_least("scheduler.policy.prefill_weight", self.prefill_weight, 0, 0.5)
        at_least("scheduler.policy.ageing_tokens_per_s", self.ageing_tokens_per_s, 0, 20)


@dataclass(frozen=True)
class SrtfPolicyConfig(PolicyConfig):
    """Shortest remaining time first: a running request gives way to one with much less work left."""

    kind: Policy = Policy.srtf
    """Which component this is."""
    prediction: Prediction = Prediction.max_tokens
    """How the length of an answer is foretold."""
    prefill_weight: float = 0.5
    """Work of one prompt token, where that of one output token is 1."""
    margin_tokens: float = 64.0
    """How much less work than a running request one must have left to take its place."""
    min_run_tokens: int = 16
    """Output tokens that a request gives after each start before it may be displaced."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.srtf)
        at_least("scheduler.policy.prefill_weight", self.prefill_weight, 0, 0.5)
        at_least("scheduler.policy.margin_tokens", self.margin_tokens, 0, 64)
        at_least("scheduler.policy.min_run_tokens", self.min_run_tokens, 0, 16)


@dataclass(frozen=True)
class PriorityPolicyConfig(PolicyConfig):
    """The class of a request decides: its `priority`, lower is sooner."""

    kind: Policy = Policy.priority
    """Which component this is."""
    preempt: bool = True
    """A waiting request takes the place of a running one of a lower class when slots or KV blocks lack."""
    class_slots: dict[int, int] = field(default_factory=dict)
    """Slots kept for a class, by priority: lower classes do not start in them, even while they are free."""
    own_batches: bool = False
    """Batches that are formed as a whole (static, dynamic) hold requests of one class only."""
    ageing_s: float | None = None
    """A request waits at most this long for those of the next better class that arrive after it. null: for all."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.priority)
        above_zero("scheduler.policy.ageing_s", self.ageing_s, 30)
        for priority, slots in self.class_slots.items():
            at_least(f"scheduler.policy.class_slots.{priority}", slots, 1, 4)


@dataclass(frozen=True)
class FairPolicyConfig(PolicyConfig):
    """Tenants take turns, one request each."""

    kind: Policy = Policy.fair
    """Which component this is."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.fair)


@dataclass(frozen=True)
class VtcPolicyConfig(PolicyConfig):
    """Tenants get equal numbers of tokens (virtual token counter, OSDI'24)."""

    kind: Policy = Policy.vtc
    """Which component this is."""
    prompt_weight: float = 1.0
    """Charge for one prompt token."""
    output_weight: float = 2.0
    """Charge for one output token."""
    charge_cached: bool = True
    """Prompt tokens that the prefix cache has are charged like others."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.vtc)
        at_least("scheduler.policy.prompt_weight", self.prompt_weight, 0, 1)
        at_least("scheduler.policy.output_weight", self.output_weight, 0, 2)
        require(self.prompt_weight + self.output_weight > 0, "scheduler.policy.output_weight", self.output_weight,
                f"must be greater than 0 beside scheduler.policy.prompt_weight={self.prompt_weight}, or nothing counts",
                "set scheduler.policy.output_weight=2")


@dataclass(frozen=True)
class MlfqPolicyConfig(PolicyConfig):
    """Skip-join multi-level feedback queue: the longer a request has run, the lower its level (FastServe)."""

    kind: Policy = Policy.mlfq
    """Which component this is."""
    quantum_s: float = 0.01
    """Step time that a request gets on the top level before it goes down one."""
    quantum_growth: float = 2.0
    """How many times the quantum of a level is that of the level above."""
    prefill_s_per_token: float = 0.0001
    """Time that a prompt token takes: a request joins on the first level whose quantum its prompt fits in."""
    starvation_s: float | None = 3.0
    """A request that has not been served for so long goes to the top level. null: never."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.mlfq)
        above_zero("scheduler.policy.quantum_s", self.quantum_s, 0.01)
        require(1 < self.quantum_growth <= 1000, "scheduler.policy.quantum_growth", self.quantum_growth,
                "must be greater than 1 and at most 1000", "for example scheduler.policy.quantum_growth=2")
        at_least("scheduler.policy.prefill_s_per_token", self.prefill_s_per_token, 0, 0.0001)
        above_zero("scheduler.policy.starvation_s", self.starvation_s, 3)


@dataclass(frozen=True)
class LpmPolicyConfig(PolicyConfig):
    """Longest prefix match: the request whose cached prefix is longest comes first (SGLang)."""

    kind: Policy = Policy.lpm
    """Which component this is."""
    max_ranked: int = 128
    """While more requests wait than this, they are served in order of arrival."""

    def __post_init__(self) -> None:
        fixed_kind("policy", self.kind, Policy.lpm)
        at_least("scheduler.policy.max_ranked", self.max_ranked, 1, 128)
