"""What one step computes (`Plan`), and what came of it (`StepResult`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from servekit.core.request import FinishReason, Request, RequestId, TokenLogprobs


class Bound(Enum):
    """What kept a step from doing more: the tuner's first diagnostic."""

    nothing_waiting = "nothing_waiting"
    token_budget = "token_budget"
    sequences = "sequences"
    kv_blocks = "kv_blocks"
    batching = "batching"
    """Requests wait for their batch: to fill, for its time, or for the running batch to end."""
    prefill = "prefill"
    """It is the decodes' turn: prompts wait for theirs."""
    policy = "policy"
    """Requests wait because of the policy or for a prefix that another request is computing."""


class PlanItem(NamedTuple):
    """One request's share of a step: tokens `start` up to `start + num_tokens` of its token ids."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether these are its last uncomputed tokens, so that the next token is sampled."""

    @property
    def is_decode(self) -> bool:
        """Whether it computes one output token, and nothing of a prompt or of what a preemption lost."""
        return self.num_tokens == 1 and self.start >= self.request.num_prompt


class BlockCopy(NamedTuple):
    """A KV block to copy between the device and the host's memory, all layers of it."""

    source: int
    target: int


class PreemptionKind(Enum):
    """What became of the keys and values of a preempted request."""

    recompute = "recompute"
    """Given up: they are computed again."""
    swap = "swap"
    """Copied to the host's memory."""
    pause = "pause"
    """Kept on the device: it lost its slot only."""


class Preempted(NamedTuple):
    """A request that stopped running in this step."""

    request: Request
    kind: PreemptionKind


class Ending(NamedTuple):
    """A request that ends without computing anything in this step."""

    request: Request
    reason: FinishReason
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one step does, decided before any of it happens."""

    items: tuple[PlanItem, ...]
    """In the order of the batch: decodes, running prompts, new requests."""
    num_tokens: int
    """Sum of the items' tokens."""
    preempted: tuple[Preempted, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    """From device blocks to host blocks: done before anything else, since the device blocks may be in use again."""
    swap_in: tuple[BlockCopy, ...] = ()
    """From host blocks to device blocks: done after `swap_out` and before the items."""
    ended: tuple[Ending, ...] = ()
    """Timeouts and refusals found while planning."""
    bound: Bound = Bound.nothing_waiting
    wake_s: float | None = None
    """For an empty plan: when scheduling again may find work, on the caller's clock; None: on an arrival."""

    @property
    def has_work(self) -> bool:
        """Whether the executor has anything to do."""
        return bool(self.items or self.swap_out or self.swap_in)


class Sampled(NamedTuple):
    """The executor's answer for one item that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor computed for a plan."""

    sampled: dict[RequestId, Sampled]
    """One entry for each item that samples and did not fail."""
    failed: dict[RequestId, str] = field(default_factory=dict)
    """Requests whose computation failed (for instance NaN in the logits), with one line saying how."""
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For requests that asked: log-probabilities of the prompt tokens after `start`, up to the chunk's end
    (the token at position p is scored by the logits of position p - 1)."""
    graph_size: int | None = None
    """Decodes that the CUDA graph is made for that computed the step; None: no graph did."""
