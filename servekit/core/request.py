"""A request: what a client asked for, and how far its computation has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)

UNKNOWN_TOKEN = -1
"""The last token of a request while a step is planned and the one that samples this token still runs."""


class FinishReason(Enum):
    """Why a request ended. Every request ends with exactly one of these."""

    stop = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    length = "length"
    """`max_tokens` or the model's length was reached."""
    abort = "abort"
    """The client left or asked to stop."""
    queue_timeout = "queue_timeout"
    """It waited longer than scheduler.admission.queue_timeout_s."""
    request_timeout = "request_timeout"
    """It took longer than scheduler.admission.request_timeout_s or its own deadline."""
    queue_full = "queue_full"
    """Refused on arrival: the queue is at its limit."""
    over_quota = "over_quota"
    """Refused on arrival: its tenant has used up its tokens for now (a hard quota)."""
    too_long = "too_long"
    """Refused on arrival: it can never fit the model's length or the KV cache."""
    shutdown = "shutdown"
    """The server stopped before it was done."""
    error = "error"
    """Its computation failed; the event's message says how."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a request is chosen, and when it stops.

    The fields have OpenAI's and vLLM's meanings. `None` switches a feature off. They are validated where a
    request enters (server/protocol.py, engine/llm.py), not here.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int = 0
    """Key of the random draws, together with the position: no draw depends on the batch."""
    min_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request: the model's end-of-sequence ids (unless ignored) and the client's own."""
    logprobs: int | None = None
    """Alternatives to report beside each output token's own log-probability (0: only its own)."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as it enters the engine: immutable, plain data, ready for the wire."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_s: float
    """When the server received it, on the machine's monotonic clock (time.monotonic)."""
    tenant: str = ""
    priority: int = 0
    """Lower is sooner; honoured by priority policies only."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    timeout_s: float | None = None
    """This request's own time limit; it can only shorten the configured one."""
    queue_timeout_s: float | None = None
    """This request's own limit on the wait for its first step; it can only shorten the configured one."""
    predicted_output_tokens: int | None = None
    """How many tokens the client expects; policies that order by length may use it."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first."""


class RequestEvent(NamedTuple):
    """What one step did for one request. The last event of a request has a `finish`."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    """New output tokens, in order; never sent twice."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per new token, if asked for."""
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request; it is the last of its output tokens."""
    message: str = ""
    """One line for the client when `finish` is an error, a refusal or a timeout."""
    num_cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache; set on the event that carries the first token."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, None for the first; set on the event that carries the first token."""
    scheduled_s: float | None = None
    """When the request was first part of a plan; set with the first token."""
    num_preemptions: int = 0
    """How often it has been preempted so far."""
    retry_after_s: float | None = None
    """For a refusal that passes: after how many seconds it may be tried again."""
    at_s: float = 0.0
    """When the step that produced it ended, on the engine's clock (time.monotonic)."""


class Status(Enum):
    """Where a request is."""

    waiting = "waiting"
    running = "running"
    finished = "finished"


class Request:
    """The scheduler's record of a request.

    `num_computed` tokens of `token_ids` (prompt, then output) have their keys and values in the KV cache.
    Prefill, chunked prefill, prefix hits and recompute after preemption are one rule: bring `num_computed` up to
    `num_tokens`. A request whose computed count reaches `num_tokens` gets its next token sampled.
    """

    __slots__ = ("arrived_s", "block_ids", "host_block_ids", "is_late", "max_total_tokens", "num_cached_tokens",
                 "num_computed", "num_lost", "num_preemptions", "num_prompt", "num_registered_blocks",
                 "prefix_hashes", "priority", "prompt_logprobs", "request_id", "sampling", "scheduled_s",
                 "sequence_number", "spec", "status", "stop_token_ids", "tenant", "token_ids")

    def __init__(self, spec: RequestSpec, max_model_len: int) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.sampling = spec.sampling
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.num_prompt = len(spec.prompt_token_ids)
        self.max_total_tokens = min(max_model_len, self.num_prompt + spec.sampling.max_tokens)
        self.stop_token_ids = frozenset(spec.sampling.stop_token_ids)
        self.arrived_s = spec.arrived_s
        self.tenant = spec.tenant
        self.priority = spec.priority
        """Its class: lower is sooner."""
        self.is_late = False
        """Its queue timeout has passed, and it waits behind those of its class that are in time."""
        self.sequence_number = -1
        """Order of arrival in the scheduler; breaks ties."""
        self.status = Status.waiting
        self.num_computed = 0
        self.block_ids: list[int] = []
        """KV blocks on the device. A waiting request may keep them (it is paused) until another needs the room.
        Between steps an equal block of the prefix cache may take the place of a full one."""
        self.host_block_ids: list[int] = []
        """Blocks in the host's memory that hold its `num_computed` tokens while it is swapped out."""
        self.prefix_hashes: list[bytes] = []
        """Chain hash of each full block of `token_ids` hashed so far."""
        self.num_registered_blocks = 0
        """Leading blocks already known to the prefix cache."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when the request first started."""
        self.num_preemptions = 0
        self.num_lost = 0
        """Computed tokens whose keys and values the last preemption gave up."""
        self.scheduled_s: float | None = None
        """When it was first part of a plan."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """Of the prompt tokens scored so far; the first has no score."""

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether it has been part of a plan."""
        return self.scheduled_s is not None

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    def __repr__(self) -> str:
        return (f"Request({self.request_id}, {self.status.value}, computed {self.num_computed} of "
                f"{len(self.token_ids)} tokens, {len(self.block_ids)} blocks)")
