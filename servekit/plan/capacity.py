"""How many replicas carry a load, which limit decides it, and what cannot be carried at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from servekit.config.errors import ConfigError, require
from servekit.config.plan import PlanConfig
from servekit.model.footprint import memory_use
from servekit.model.shapes import SHAPES, find_shape
from servekit.model.spec import ModelSpec
from servekit.plan.steady import FEWEST_DECODES, Lengths, OperatingPoint, SteadyReplica
from servekit.sim.gpus import GPUS
from servekit.sim.replica import Replica
from servekit.sim.step_time import RooflineStepTime

_ROUNDING = 1e-9
"""What a quotient may exceed a whole number by before one more replica is asked for."""

_LOGITS_ROWS = 256
"""Requests whose tokens are drawn at once, as far as the memory of their logits goes, where `max_num_seqs` is open."""


class Limit(Enum):
    """What can keep a replica from carrying more."""

    throughput = "throughput"
    """Its time: prompts and decode steps, with any number of requests at once."""
    prefill = "prefill alone"
    """Its time, if prompts were all there is: a part of the throughput limit, and never the one that binds."""
    kv = "KV cache"
    """Its memory: by Little's law, the requests in flight at that rate fill the KV cache."""
    max_num_seqs = "max_num_seqs"
    """Its slots: as many requests decode at once as may."""
    tpot = "TPOT"
    """The decode steps, and the prompts between them, get longer than users may wait for a token."""
    ttft = "TTFT"
    """The first token comes later than users may wait for it."""


@dataclass(frozen=True)
class Bound:
    """The most that one replica carries within one limit."""

    limit: Limit
    requests_per_s: float
    point: OperatingPoint | None
    """The equilibrium there; None where any number of requests is at once on the replica."""


@dataclass(frozen=True)
class Memory:
    """Where the memory of a replica goes, in bytes."""

    total_bytes: int
    usable_bytes: int
    """After `memory_fraction` and `headroom`."""
    weights_bytes: int
    activation_bytes: int
    """Temporary tensors of the largest step."""
    kv_tokens: int
    """Tokens that the rest holds, in whole blocks."""

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values."""
        return self.usable_bytes - self.weights_bytes - self.activation_bytes


@dataclass(frozen=True)
class CapacityPlan:
    """What carries a load, and how it fares there."""

    config: PlanConfig
    replica: Replica
    memory: Memory
    steady: SteadyReplica
    bounds: tuple[Bound, ...]
    rate_per_s: float
    """Requests per second over all replicas."""
    replicas: int
    """Replicas that serve, without spares."""

    @cached_property
    def binding(self) -> Bound:
        """The bound that allows least."""
        return min(self.bounds, key=lambda bound: bound.requests_per_s)

    @property
    def highest_rate_per_s(self) -> float:
        """Requests per second that the replicas carry at most; the queue grows without end above it."""
        return self.replicas * self.binding.requests_per_s

    @property
    def utilization(self) -> float:
        """Share of that rate that they carry."""
        return self.rate_per_s / self.highest_rate_per_s

    @cached_property
    def point(self) -> OperatingPoint:
        """Each replica's equilibrium under its share of the rate."""
        return self.steady.at_rate(self.rate_per_s / self.replicas)

    @property
    def gpus(self) -> int:
        """GPUs that serve."""
        return self.replicas * self.replica.tensor_parallel

    @property
    def gpus_with_spares(self) -> int:
        """GPUs to buy."""
        return (self.replicas + self.config.spare_replicas) * self.replica.tensor_parallel


def plan_capacity(config: PlanConfig) -> CapacityPlan:
    """Plan a load. Raises ConfigError, with the reason, for one that cannot be carried."""
    replica = Replica(_model(config), GPUS[config.gpu], config.tensor_parallel, config.weight_precision,
                      config.kv_precision)
    step_time = RooflineStepTime(replica, config.efficiency, config.memory.block_size_tokens)
    lengths = Lengths(config.prompt_tokens, config.output_tokens)
    steady = SteadyReplica(step_time, lengths, config.prefill_batch_tokens, config.memory.block_size_tokens)
    memory = _memory(config, replica)
    _check_lengths(config, replica.model, memory, steady)
    _check_waits(config, replica, steady)
    bounds = tuple(_bounds(config, memory, steady))
    highest = min(bound.requests_per_s for bound in bounds)
    return CapacityPlan(config, replica, memory, steady, bounds, *_sizes(config, highest))


def _model(config: PlanConfig) -> ModelSpec:
    spec = find_shape(config.model)
    if spec is None:
        raise ConfigError("model", config.model, f"no such shape; there are: {', '.join(SHAPES)}",
                          "name one of them, or the path of a config.json")
    return spec


def _memory(config: PlanConfig, replica: Replica) -> Memory:
    total = int(replica.memory_bytes)
    activations = replica.activation_bytes(config.prefill_batch_tokens, config.max_num_seqs or _LOGITS_ROWS)
    use = memory_use(total, total, config.memory.memory_fraction, config.memory.headroom, replica.weights_bytes,
                     activations)
    usable = use.usable_bytes - use.headroom_bytes
    require(use.room_bytes > 0, "tensor_parallel", config.tensor_parallel,
            f"the weights take {use.weights_bytes / 1e9:.1f} GB, the largest step {use.activation_bytes / 1e9:.1f} GB, "
            f"and {config.tensor_parallel} x {replica.gpu.name} leaves {usable / 1e9:.1f} GB for them "
            f"(memory.memory_fraction={config.memory.memory_fraction}, memory.headroom={config.memory.headroom})",
            "raise tensor_parallel, or choose a smaller weight_precision, prefill_batch_tokens or a larger gpu")
    block_tokens = config.memory.block_size_tokens
    blocks = use.room_bytes // (block_tokens * replica.kv_bytes_per_token)
    return Memory(total, usable, use.weights_bytes, use.activation_bytes, int(blocks) * block_tokens)


def _check_lengths(config: PlanConfig, model: ModelSpec, memory: Memory, steady: SteadyReplica) -> None:
    total = config.prompt_tokens + config.output_tokens
    require(total <= model.max_context_tokens, "prompt_tokens", f"{config.prompt_tokens:g}",
            f"with output_tokens={config.output_tokens:g} it exceeds the model's {model.max_context_tokens} tokens",
            "shorten them, or choose a model for longer contexts")
    require(memory.kv_tokens >= steady.request_kv_tokens, "prompt_tokens", f"{config.prompt_tokens:g}",
            f"one request of {total:g} tokens does not fit: beside the weights there is room for keys and values of "
            f"{memory.kv_tokens} tokens", "raise tensor_parallel or memory.memory_fraction, or choose a smaller "
            "weight_precision or kv_precision")


def _check_waits(config: PlanConfig, replica: Replica, steady: SteadyReplica) -> None:
    """Refuse limits that an otherwise idle replica would miss."""
    floor_s, alone = replica.weight_streaming_s, steady.at(FEWEST_DECODES)
    require(config.tpot_s is None or config.tpot_s > floor_s, "tpot_s", config.tpot_s,
            f"reading the weights once, which every token needs, takes {floor_s:.4f} s at full bandwidth",
            "raise tensor_parallel, or choose a smaller weight_precision or a faster gpu")
    require(config.tpot_s is None or config.tpot_s > alone.tpot_s, "tpot_s", config.tpot_s,
            f"a single request gets a token every {alone.tpot_s:.4f} s ({floor_s:.4f} s at full bandwidth and without "
            "overhead)", "raise tensor_parallel, choose a smaller weight_precision or a faster gpu, or correct "
            "efficiency.* from measurements")
    require(config.ttft_s is None or config.ttft_s > alone.ttft_s, "ttft_s", config.ttft_s,
            f"computing the prompt takes {alone.ttft_s:.4f} s on an idle replica",
            "raise tensor_parallel, choose a faster gpu, or shorten prompt_tokens")


def _bounds(config: PlanConfig, memory: Memory, steady: SteadyReplica) -> Iterator[Bound]:
    yield Bound(Limit.throughput, steady.highest_rate, None)
    yield Bound(Limit.prefill, 1 / steady.prefill_s, None)
    yield _bound(Limit.kv, steady.highest(lambda point: point.kv_tokens <= memory.kv_tokens))
    if (most := config.max_num_seqs) is not None:
        yield _bound(Limit.max_num_seqs, steady.at(most))
    if (tpot_s := config.tpot_s) is not None:
        yield _bound(Limit.tpot, steady.highest(lambda point: point.tpot_s <= tpot_s))
    if (ttft_s := config.ttft_s) is not None:
        yield _bound(Limit.ttft, steady.highest(lambda point: point.ttft_s <= ttft_s))


def _bound(limit: Limit, point: OperatingPoint) -> Bound:
    return Bound(limit, point.requests_per_s, point)


def _sizes(config: PlanConfig, highest: float) -> tuple[float, int]:
    """The rate and the replicas that serve it, when one replica carries `highest` requests per second at most."""
    if config.replicas is None:
        assert config.rate_per_s is not None, "the configuration has one of them"
        return config.rate_per_s, replicas_for(config.rate_per_s, config.max_utilization * highest)
    holds = config.replicas * highest
    if config.rate_per_s is None:
        return config.max_utilization * holds, config.replicas
    require(config.rate_per_s < holds, "replicas", config.replicas,
            f"they carry {holds:.4g} requests per second at most, so at rate_per_s={config.rate_per_s:g} the queue "
            f"grows by {config.rate_per_s - holds:.3g} requests each second "
            f"(utilisation {config.rate_per_s / holds:.2f})",
            f"set replicas={replicas_for(config.rate_per_s, config.max_utilization * highest)}, or lower the rate")
    return config.rate_per_s, config.replicas


def replicas_for(rate_per_s: float, each_per_s: float) -> int:
    """The fewest replicas that carry a rate when each carries `each_per_s`."""
    return max(1, math.ceil(rate_per_s / each_per_s - _ROUNDING))
