"""What `servekit plan` can be told: the load, the model on its GPUs, the limits, and claims to check.

The rules are those of schema.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

from servekit.config.bounds import above_zero, at_least, within
from servekit.config.errors import require
from servekit.config.roofline import EfficiencyConfig, GpuName, Precision


class PlanFormat(Enum):
    """How the plan is printed."""

    text = "text"
    json = "json"


@dataclass(frozen=True)
class PlanMemoryConfig:
    """How a GPU's memory is divided, as in the configuration of an engine."""

    memory_fraction: float = 0.9
    """Share of the memory that the engine may use."""
    headroom: float = 0.1
    """Share of that kept free for peaks."""
    block_size_tokens: int = 16
    """Tokens in one KV block; a request holds whole blocks."""

    def __post_init__(self) -> None:
        within("memory.memory_fraction", self.memory_fraction, 0.01, 1.0, 0.9)
        within("memory.headroom", self.headroom, 0.0, 0.9, 0.1)
        at_least("memory.block_size_tokens", self.block_size_tokens, 1, 16)


@dataclass(frozen=True)
class ClaimConfig:
    """Figures that somebody states about this load, to be checked against the plan. null: not stated."""

    tokens_per_s: float | None = None
    """Output tokens per second that one GPU is said to produce, at `concurrency` if that is stated too."""
    concurrency: float | None = None
    """Requests said to be in flight on one GPU."""
    kv_bytes: float | None = None
    """KV cache said to hold the requests in flight on one GPU: `concurrency`, or else as many as the plan finds."""
    gpus: int | None = None
    """GPUs said to carry the whole rate."""

    def __post_init__(self) -> None:
        for f in fields(self):
            above_zero(f"claim.{f.name}", getattr(self, f.name), 100)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Everything a capacity plan follows from."""

    model: str
    """A named shape, such as llama-3-8b, or the path of a config.json."""
    gpu: GpuName
    """The GPU."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model; together they are one replica."""
    weight_precision: Precision = Precision.bfloat16
    """Number format of the layers' matrices and their products; embedding and head stay in 16 bits."""
    kv_precision: Precision = Precision.bfloat16
    """Number format of the KV cache."""
    prompt_tokens: float
    """Mean prompt length, without what a prefix cache would hold."""
    output_tokens: float
    """Mean output length."""
    rate_per_s: float | None = None
    """Requests per second to carry; null: what `replicas` hold."""
    replicas: int | None = None
    """Replicas that serve; null: as many as `rate_per_s` needs."""
    tpot_s: float | None = None
    """Longest mean time per output token after the first, in seconds. null: no limit."""
    ttft_s: float | None = None
    """Longest mean time to the first token, in seconds. null: no limit."""
    max_utilization: float = 0.7
    """Share of the highest rate that replicas are planned to carry; the rest is for bursts."""
    spare_replicas: int = 1
    """Replicas beyond those that serve, for when one fails."""
    max_num_seqs: int | None = None
    """Requests that one replica decodes at once; null: as many as its KV cache holds."""
    prefill_batch_tokens: int = 8192
    """Prompt tokens that are computed together in one step."""
    memory: PlanMemoryConfig = field(default_factory=PlanMemoryConfig)
    """The memory of each GPU."""
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    """How close to its limits the GPU comes."""
    claim: ClaimConfig = field(default_factory=ClaimConfig)
    """Figures to check against the plan."""
    format: PlanFormat = PlanFormat.text
    """A table for people, or one JSON document."""

    def __post_init__(self) -> None:
        at_least("tensor_parallel", self.tensor_parallel, 1, 1)
        at_least("prompt_tokens", self.prompt_tokens, 1, 1000)
        at_least("output_tokens", self.output_tokens, 2, 200)
        above_zero("rate_per_s", self.rate_per_s, 10)
        at_least("replicas", self.replicas, 1, 4)
        require(self.rate_per_s is not None or self.replicas is not None, "rate_per_s", None,
                "must be given, unless replicas is",
                "set rate_per_s=10 to learn how many replicas it needs, or replicas=4 to learn what they hold")
        above_zero("tpot_s", self.tpot_s, 0.05)
        above_zero("ttft_s", self.ttft_s, 1.0)
        within("max_utilization", self.max_utilization, 0.01, 1.0, 0.7)
        at_least("spare_replicas", self.spare_replicas, 0, 1)
        at_least("max_num_seqs", self.max_num_seqs, 1, 256)
        at_least("prefill_batch_tokens", self.prefill_batch_tokens, 1, 8192)
