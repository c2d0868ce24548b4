"""What is simulated: step times, and the size of the KV cache that goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from servekit.config.errors import ConfigError, require
from servekit.config.schema import SchedulerConfig
from servekit.config.simulate import (
    FittedStepTimeConfig,
    RooflineStepTimeConfig,
    SimulateConfig,
    SimulatedMemoryConfig,
)
from servekit.core.build import build_scheduler
from servekit.core.scheduler import Scheduler
from servekit.engine.step_log import (
    ItemRecord,
    Opened,
    Planned,
    Record,
    StepLogError,
    Updated,
    read_step_log,
)
from servekit.model.shapes import SHAPES, find_shape
from servekit.sim.fitted import FittedStepTime, TimedStep
from servekit.sim.gpus import GPUS
from servekit.sim.replica import Replica
from servekit.sim.step_time import PromptChunk, RooflineStepTime, StepShape, StepTimeModel

_LONGEST_GAP_S = 0.005
"""Between the end of a step and the next plan of an engine that has work; more means that it waited for requests."""


@dataclass(frozen=True)
class EngineModel:
    """The engine that a simulation stands for."""

    name: str
    """What it is, for people."""
    step_time: StepTimeModel
    num_kv_blocks: int
    num_host_blocks: int
    block_size_tokens: int
    max_model_len: int

    def scheduler(self, config: SchedulerConfig) -> Scheduler:
        """A fresh scheduler for its KV cache. Raises ConfigError for settings that contradict the engine's limits."""
        return build_scheduler(config, self.num_kv_blocks, self.block_size_tokens, self.max_model_len,
                               self.num_host_blocks)


def engine_model(config: SimulateConfig) -> EngineModel:
    """The engine that a configuration describes. Raises ConfigError."""
    match config.step_time:
        case RooflineStepTimeConfig():
            return _roofline(config.step_time, config.memory)
        case FittedStepTimeConfig():
            return _fitted(config.step_time, config.memory)
    raise TypeError(f"no step times for {config.step_time}")


def _roofline(config: RooflineStepTimeConfig, memory: SimulatedMemoryConfig) -> EngineModel:
    shape = find_shape(config.model)
    if shape is None:
        raise ConfigError("step_time.model", config.model, "is neither a known shape nor a config.json",
                          f"choose one of {', '.join(SHAPES)}")
    replica = Replica(shape, GPUS[config.gpu], config.tensor_parallel, config.weight_precision, config.kv_precision)
    usable_bytes = replica.memory_bytes * memory.memory_fraction * (1 - memory.headroom)
    room_bytes = usable_bytes - replica.weights_bytes
    num_blocks = int(room_bytes // (memory.block_size_tokens * replica.kv_bytes_per_token))
    require(num_blocks >= 1 or memory.num_kv_blocks is not None, "step_time.model", config.model,
            f"weighs {replica.weights_bytes / 1e9:.1f} GB, and {usable_bytes / 1e9:.1f} GB are usable",
            "set step_time.tensor_parallel, a smaller step_time.weight_precision, or another step_time.gpu")
    name = f"{config.model} on {config.tensor_parallel} x {config.gpu.value}"
    step_time = RooflineStepTime(replica, config.efficiency, memory.block_size_tokens)
    return _sized(name, step_time, memory, num_blocks, memory.block_size_tokens, shape.max_position)


def _fitted(config: FittedStepTimeConfig, memory: SimulatedMemoryConfig) -> EngineModel:
    opened, steps = read_timed_steps(Path(config.log))
    require(bool(steps), "step_time.log", config.log, "has no steps", "log an engine that served requests")
    model = FittedStepTime.fit(steps)
    name = f"the engine of {config.log} ({model.num_steps:,} steps, median error {model.median_error:.1%})"
    return _sized(name, model, memory, opened.num_kv_blocks, opened.block_size_tokens, opened.max_model_len)


def _sized(name: str, step_time: StepTimeModel, memory: SimulatedMemoryConfig, num_blocks: int,
           block_size_tokens: int, max_model_len: int) -> EngineModel:
    num_blocks = memory.num_kv_blocks or num_blocks
    wanted_len = memory.max_model_len or max_model_len
    holds_tokens = num_blocks * block_size_tokens
    require(memory.max_model_len is None or memory.max_model_len <= holds_tokens, "memory.max_model_len", wanted_len,
            f"the KV cache holds {holds_tokens} tokens", f"set memory.max_model_len={holds_tokens} or less")
    num_host_blocks = num_blocks if memory.num_host_blocks is None else memory.num_host_blocks
    return EngineModel(name, step_time, num_blocks, num_host_blocks, block_size_tokens, min(wanted_len, holds_tokens))


def read_timed_steps(path: Path) -> tuple[Opened, list[TimedStep]]:
    """What a logged engine was made of, and its steps. Raises ConfigError for a file that is no step log."""
    try:
        records = read_step_log(path)
        opened = next(records, None)
        if not isinstance(opened, Opened):
            raise StepLogError("it does not begin with its engine's start")
        return opened, list(timed_steps(records))
    except (OSError, StepLogError) as error:
        raise ConfigError("step_time.log", str(path), f"is not a step log ({error})",
                          "make one with servekit serve engine.step_log=FILE") from None


def timed_steps(records: Iterable[Record]) -> Iterator[TimedStep]:
    """The steps of a log that computed something.

    A step lasts from its planning to the planning of the next, which includes what the engine does in between, unless
    it then had nothing to do. Raises StepLogError where steps overlap: no time is then one step's own.
    """
    planned: Planned | None = None
    ended: Updated | None = None
    for record in records:
        if isinstance(record, Updated):
            ended = record
        elif isinstance(record, Planned):
            if planned is not None and ended is None:
                raise StepLogError("its steps overlap, so their times cannot be told apart; log an engine with "
                                   "engine.overlap=false")
            if planned is not None and ended is not None and planned.items:
                follows = record.at_s - ended.at_s < _LONGEST_GAP_S
                yield _timed(planned, ended, record.at_s if follows else ended.at_s)
            planned, ended = record, None
        elif isinstance(record, Opened) and ended is None:
            planned = None  # A crash cut it short.
    if planned is not None and ended is not None and planned.items:
        yield _timed(planned, ended, ended.at_s)


def _timed(planned: Planned, ended: Updated, end_s: float) -> TimedStep:
    num_swapped = len(planned.swap_out) + len(planned.swap_in)
    return TimedStep(_shape(planned.items, len(ended.sampled), num_swapped), end_s - planned.at_s)


def _shape(items: Iterable[ItemRecord], num_sampled: int, num_swapped_blocks: int) -> StepShape:
    decodes = [item for item in items if item.num_tokens == 1]
    chunks = [PromptChunk(item.num_tokens, item.start) for item in items if item.num_tokens > 1]
    return StepShape(len(decodes), sum(item.start + 1 for item in decodes), chunks, num_sampled, num_swapped_blocks)
