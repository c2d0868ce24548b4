"""What the scheduler counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
