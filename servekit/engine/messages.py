"""What crosses the wire between a client and the engine process. msgspec encodes all of it.

One message a step travels back, not one a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from servekit.core.request import RequestEvent, RequestId, RequestSpec
from servekit.core.stats import SchedulerStats, Service, ServiceByGroup
from servekit.model.footprint import MemoryUse


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was measured or derived while the engine started; the configuration is never written to."""

    model_name: str
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Rows of the embedding: the only valid token ids are below it."""
    num_kv_blocks: int
    block_size_tokens: int
    device: str
    dtype: str
    quantization: str
    kv_dtype: str
    kernels: str
    threads: int
    weights_bytes: int
    kv_bytes: int
    load_s: float
    """Seconds spent loading weights."""
    notes: tuple[str, ...] = ()
    """What was derived or lowered, `key: old -> new (why)`, one line each."""
    num_host_blocks: int = 0
    """KV blocks in the host's memory, for requests that are swapped out."""
    memory: MemoryUse | None = None
    """Where the device's memory goes, beside the KV cache."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_kv_blocks * self.block_size_tokens


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Counters since the engine started, by name."""

    bounds: dict[str, int] = field(default_factory=dict)
    """Steps by what bound them (core.plan.Bound)."""
    preemptions: dict[str, int] = field(default_factory=dict)
    """What became of preempted requests (core.plan.PreemptionKind)."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Requests refused on arrival, by reason."""
    classes: dict[str, Service] = field(default_factory=dict)
    """By the requests' priority."""
    tenants: dict[str, Service] = field(default_factory=dict)
    executions: dict[str, int] = field(default_factory=dict)
    """Steps by how they were computed: `graph_8` (a CUDA graph for 8 decodes), or `eager`."""

    @classmethod
    def of(cls, stats: SchedulerStats, executions: Mapping[str, int]) -> Breakdown:
        """What a scheduler has counted until now, and an engine of its steps."""
        return cls(dict(stats.bound), dict(stats.preemptions_by_kind), dict(stats.refused),
                   _copied(stats.classes), _copied(stats.tenants), dict(executions))


def _copied(groups: ServiceByGroup) -> dict[str, Service]:
    return {str(group): replace(service) for group, service in groups.items()}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started (total) and gauges as of the last step."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_blocks_used: int = 0
    """Blocks held by requests; cached blocks that nobody holds are free."""
    kv_blocks_total: int = 0
    num_steps_total: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed, recomputed ones included."""
    cached_tokens_total: int = 0
    """Prompt tokens served from the prefix cache."""
    prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    recomputed_tokens_total: int = 0
    """Tokens computed again after a preemption."""
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    schedule_s_total: float = 0.0
    execute_s_total: float = 0.0
    update_s_total: float = 0.0
    breakdown: Breakdown | None = field(default_factory=Breakdown)
    """None in most messages: as in the last one that had it, at most about a second ago."""

    def after(self, last: EngineStats) -> EngineStats:
        """The same with a breakdown: its own, or else that of the message before."""
        return self if self.breakdown is not None else replace(self, breakdown=last.breakdown)


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Size and duration of one step, for histograms and the step log."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_requests: int
    duration_s: float
    decode_context_tokens: int = 0
    """Keys that the requests with a single token read, their own included."""
    chunks: tuple[tuple[int, int], ...] = ()
    """Of each request with several tokens: how many, and how many were computed before them."""
    num_sampled: int = 0
    num_swapped_blocks: int = 0
    """KV blocks copied to the host and back."""


# Client to engine.


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Requests accepted or refused as one: the choices of one `n`, the prompts of one list."""

    specs: tuple[RequestSpec, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests to end now, wherever they are; unknown ids are ignored."""

    request_ids: tuple[RequestId, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix that no request holds."""


class Reconfigure(msgspec.Struct, frozen=True, tag=True):
    """Go on with the same weights under other settings. Only for an engine without requests."""

    config: bytes
    """The whole configuration, pickled: components are told apart by their classes."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End every request that is left, then the process."""


# Engine to client.


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far start-up is."""

    stage: str
    done: int
    total: int
    unit: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine answers from now on."""

    facts: EngineFacts


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; the process ends after this."""

    message: str
    """One line for the person who started it."""
    setting: tuple[str, str, str, str] | None = None
    """Key, value, limit and remedy of a ConfigError; None when the machine or a file is at fault."""


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Everything one step has to say. Sent without events about once a second, as a heartbeat."""

    events: tuple[RequestEvent, ...]
    stats: EngineStats
    step: StepRecord | None = None


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ResetPrefixCache`."""

    num_blocks_forgotten: int


class Reconfigured(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Reconfigure`: prefix cache, KV cache and counters are as in an engine that has just started."""

    facts: EngineFacts


class ReconfigureRefused(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Reconfigure`: the engine goes on as it was, with its caches emptied."""

    setting: tuple[str, str, str, str]
    """Key, value, limit and remedy of a ConfigError."""


ToEngine = AddRequests | Abort | ResetPrefixCache | Reconfigure | Shutdown
FromEngine = Loading | Ready | StartFailed | StepOutput | PrefixCacheReset | Reconfigured | ReconfigureRefused
