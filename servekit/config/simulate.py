"""What `servekit simulate` can be told: the step times, the scheduler, the memory, the load and the objective.

The rules are those of schema.py. `step_time` is a component group: `step_time=roofline` or `step_time=fitted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from servekit.config.bench import (
    ArrivalConfig,
    LognormalWorkloadConfig,
    PoissonArrivalConfig,
    SloConfig,
    WorkloadConfig,
    check_load,
)
from servekit.config.bounds import above_zero, at_least, fixed_kind, within
from servekit.config.errors import require
from servekit.config.roofline import EfficiencyConfig, GpuName, Precision
from servekit.config.schema import SchedulerConfig


class StepTimeKind(Enum):
    """Where the times of the simulated steps come from."""

    roofline = "roofline"
    fitted = "fitted"


@dataclass(frozen=True)
class StepTimeConfig:
    """Base of the step-time models."""

    kind: StepTimeKind = StepTimeKind.roofline
    """Which component this is."""


@dataclass(frozen=True)
class RooflineStepTimeConfig(StepTimeConfig):
    """From a GPU's data sheet and a model's shape."""

    model: str = "llama-3-8b"
    """A named shape, such as llama-3-8b, or the path of a config.json."""
    gpu: GpuName = GpuName.h100
    """The GPU."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model."""
    weight_precision: Precision = Precision.bfloat16
    """Number format of the layers' matrices and their products."""
    kv_precision: Precision = Precision.bfloat16
    """Number format of the KV cache."""
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    """How close to its limits the GPU comes."""

    def __post_init__(self) -> None:
        fixed_kind("step_time", self.kind, StepTimeKind.roofline)
        at_least("step_time.tensor_parallel", self.tensor_parallel, 1, 1)


@dataclass(frozen=True, kw_only=True)
class FittedStepTimeConfig(StepTimeConfig):
    """Learnt from a real engine's steps; memory and model length are those of that engine."""

    kind: StepTimeKind = StepTimeKind.fitted
    """Which component this is."""
    log: str
    """A step log, as `servekit serve engine.step_log=FILE` writes it."""

    def __post_init__(self) -> None:
        fixed_kind("step_time", self.kind, StepTimeKind.fitted)
        require(self.log != "", "step_time.log", self.log, "must not be empty", "name a step log")


@dataclass(frozen=True)
class SimulatedMemoryConfig:
    """The KV cache of the simulated engine."""

    block_size_tokens: int = 16
    """Tokens in one KV block."""
    num_kv_blocks: int | None = None
    """KV blocks; null: what the GPU's memory leaves, or what the logged engine had."""
    num_host_blocks: int | None = None
    """Blocks for requests that are swapped out; null: as many as num_kv_blocks."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; null: the model's own length, or the logged engine's."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory that the engine may use."""
    headroom: float = 0.1
    """Share of that kept free for activations and peaks."""

    def __post_init__(self) -> None:
        at_least("memory.block_size_tokens", self.block_size_tokens, 1, 16)
        at_least("memory.num_kv_blocks", self.num_kv_blocks, 1, 4096)
        at_least("memory.num_host_blocks", self.num_host_blocks, 0, 4096)
        at_least("memory.max_model_len", self.max_model_len, 2, 8192)
        within("memory.memory_fraction", self.memory_fraction, 0.01, 1.0, 0.9)
        within("memory.headroom", self.headroom, 0.0, 0.9, 0.1)


@dataclass(frozen=True)
class SimulateConfig:
    """Everything one simulated run is made of."""

    step_time: StepTimeConfig = field(default_factory=RooflineStepTimeConfig)
    """How long each step takes."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The scheduler, as `servekit serve` takes it."""
    memory: SimulatedMemoryConfig = field(default_factory=SimulatedMemoryConfig)
    """The KV cache."""
    workload: WorkloadConfig = field(default_factory=LognormalWorkloadConfig)
    """Prompts and lengths, as `servekit bench` takes them."""
    arrival: ArrivalConfig = field(default_factory=PoissonArrivalConfig)
    """When requests arrive."""
    num_requests: int | None = 1000
    """Requests to measure; null: until the trace ends or `duration_s` is over."""
    duration_s: float | None = None
    """Virtual seconds during which requests arrive; null: until `num_requests`."""
    warmup_requests: int = 0
    """Requests at the start, in addition to `num_requests`, that are left out of every figure."""
    timeout_s: float = 600.0
    """Longest time for one request from sending to its end, in virtual seconds."""
    seed: int | None = None
    """Seed of prompts, lengths and arrivals; null: a new one each run, printed and recorded."""
    vocab_low: int = 100
    """Smallest token id in prompts."""
    vocab_high: int = 30000
    """Token ids in prompts are below this."""
    slo: SloConfig = field(default_factory=SloConfig)
    """What goodput is judged against."""
    out: str | None = None
    """JSON file to write: everything measured and one row a request; null: none."""
    perfetto: str | None = None
    """JSON file for ui.perfetto.dev to write: steps and requests on a time line; null: none."""
    timeline: str | None = None
    """HTML page to write that draws the batches on a time line; null: none."""
    timeline_s: float = 60.0
    """How much of the run, in virtual seconds from its start, goes into `perfetto` and `timeline`."""
    overwrite: bool = False
    """Replace files that exist."""

    def __post_init__(self) -> None:
        above_zero("timeline_s", self.timeline_s, 60)
        check_load(self)
