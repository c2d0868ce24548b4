"""What the scheduler counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_GROUPS = 32
"""Classes, and tenants, that are counted one by one."""
OTHERS = "other"
"""All the rest, which clients could make endless."""


@dataclass(slots=True)
class Service:
    """What the requests of a class or of a tenant waited and got."""

    num_started: int = 0
    queue_s: float = 0.0
    """Time from arrival to the first step, summed over the requests that have started."""
    prompt_tokens: int = 0
    """Of the requests that have started, cached ones included. What a preemption makes to be computed again is not
    counted again."""
    generation_tokens: int = 0


class ServiceByGroup(dict[Hashable, Service]):
    """Service by class or tenant: the first MAX_GROUPS that come have an entry of their own, the rest share one."""

    def __missing__(self, group: Hashable) -> Service:
        return self.setdefault(group if len(self) < MAX_GROUPS else OTHERS, Service())


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Plain numbers; whoever reports them copies them."""

    num_steps: int = 0
    prompt_tokens: int = 0
    """Tokens computed that were not sampled in the step before: prompts, and recomputation after preemption."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    recomputed_tokens: int = 0
    """Tokens computed a second time because of a preemption."""
    generation_tokens: int = 0
    preemptions: int = 0
    """How often a request stopped running before its end."""
    preemptions_by_kind: Counter[str] = field(default_factory=Counter)
    """What became of the requests, by PreemptionKind; a paused one whose blocks are taken later counts twice."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals on arrival, by FinishReason."""
    bound: Counter[str] = field(default_factory=Counter)
    """Steps by what bound them, by Bound."""
    classes: ServiceByGroup = field(default_factory=ServiceByGroup)
    """By priority."""
    tenants: ServiceByGroup = field(default_factory=ServiceByGroup)
