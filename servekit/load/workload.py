"""What is asked: an endless or finite series of requests, made one at a time as it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Protocol

import numpy as np

from servekit.config.bench import (
    AzureWorkloadConfig,
    FixedWorkloadConfig,
    LognormalWorkloadConfig,
    MooncakeWorkloadConfig,
    SharedPrefixWorkloadConfig,
    WorkloadConfig,
)
from servekit.config.errors import require
from servekit.load.randomness import Stream, generator
from servekit.load.traces import TraceEntry, read_azure, read_mooncake


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to send, whoever it is sent to."""

    index: int
    """Its place in the workload, from 0."""
    prompt_token_ids: Sequence[int]
    output_tokens: int
    """Wanted output length."""
    arrival_s: float | None = None
    """When it is due, in seconds from the start; None: whenever the client is free."""
    tenant: str = ""
    priority: int | None = None
    """Its class; None: none is sent."""
    predicted_output_tokens: int | None = None
    """How long its output is said to be; None: nothing is said."""


class Workload(Protocol):
    """A series of requests that starts anew with each iteration and comes out the same each time."""

    def __iter__(self) -> Iterator[WorkloadRequest]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that random prompts are made of: low <= id < high."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """That many random token ids."""
        drawn: list[int] = rng.integers(self.low, self.high, count).tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt that other prompts may have in common: equal ids give equal tokens."""

    prefix_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A request before its tokens are drawn: shared segments, then tokens of its own."""

    shared: tuple[Segment, ...]
    own_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    tenant: str | None = None
    """Of a trace that says so; so are the next two."""
    priority: int | None = None
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ConfiguredWorkload:
    """A workload of conf/workload. Equal seeds give equal requests; memory does not grow with a trace's length."""

    config: WorkloadConfig
    vocabulary: Vocabulary
    seed: int

    def __iter__(self) -> Iterator[WorkloadRequest]:
        drawn = zip(self._tenants(), self._priorities(), self._prediction_errors(), strict=False)
        for index, shape, (tenant, priority, error) in zip(count(), shapes(self.config, self.seed), drawn,
                                                           strict=False):
            predicted = shape.predicted_tokens if error is None else scaled(shape.output_tokens, error)
            yield WorkloadRequest(
                index, self._prompt(index, shape), shape.output_tokens, shape.arrival_s, shape.tenant or tenant,
                shape.priority if priority is None else priority,
                # Its max_tokens is the wanted length, and a prediction beyond that would be refused.
                predicted if predicted is None else min(predicted, shape.output_tokens))

    def _prompt(self, index: int, shape: Shape) -> list[int]:
        tokens: list[int] = []
        for segment in shape.shared:
            tokens += self.vocabulary.draw(generator(self.seed, Stream.prefix, segment.prefix_id), segment.num_tokens)
        if shape.own_tokens:
            tokens += self.vocabulary.draw(generator(self.seed, Stream.prompt, index), shape.own_tokens)
        return tokens

    def _tenants(self) -> Iterator[str]:
        number = self.config.num_tenants
        if number is None:
            return repeat("")
        rng = generator(self.seed, Stream.tenants)
        return (f"tenant-{rng.integers(number)}" for _ in count())

    def _priorities(self) -> Iterator[int | None]:
        shares = self.config.priorities
        if not shares:
            return repeat(None)
        rng = generator(self.seed, Stream.classes)
        classes, weights = list(shares), np.array(list(shares.values()))
        return (classes[rng.choice(len(classes), p=weights / weights.sum())] for _ in count())

    def _prediction_errors(self) -> Iterator[float | None]:
        """Factors between predicted and wanted output lengths."""
        sigma = self.config.prediction_sigma
        if sigma is None:
            return repeat(None)
        rng = generator(self.seed, Stream.predictions)
        return (float(np.exp(rng.normal(0.0, sigma))) for _ in count())


def shapes(config: WorkloadConfig, seed: int) -> Iterator[Shape]:
    """The lengths, shared prefixes and times of a workload's requests, already scaled.

    Raises ConfigError for a trace that cannot be read, naming the file and the line.
    """
    match config:
        case FixedWorkloadConfig():
            return _fixed_shapes(config)
        case LognormalWorkloadConfig():
            return _lognormal_shapes(config, seed)
        case SharedPrefixWorkloadConfig():
            return _shared_prefix_shapes(config, seed)
        case AzureWorkloadConfig():
            return _azure_shapes(config)
        case MooncakeWorkloadConfig():
            return _mooncake_shapes(config)
        case _:
            raise TypeError(f"{type(config).__name__} is not a workload")


def scaled(tokens: int, scale: float) -> int:
    """A length times the scale factor, in whole tokens, at least one."""
    return max(1, round(tokens * scale))


def _fixed_shapes(config: FixedWorkloadConfig) -> Iterator[Shape]:
    return repeat(Shape((), scaled(config.prompt_tokens, config.length_scale),
                        scaled(config.output_tokens, config.length_scale)))


def _lognormal_shapes(config: LognormalWorkloadConfig, seed: int) -> Iterator[Shape]:
    rng = generator(seed, Stream.lengths)
    while True:
        prompt = _draw_length(rng, config.prompt_median_tokens, config.prompt_sigma, config.max_prompt_tokens)
        output = _draw_length(rng, config.output_median_tokens, config.output_sigma, config.max_output_tokens)
        yield Shape((), scaled(prompt, config.length_scale), scaled(output, config.length_scale))


def _draw_length(rng: np.random.Generator, median: int, sigma: float, maximum: int) -> int:
    # Drawing again keeps the shape below the limit; cutting off would pile requests up at it.
    # The limit is at least the median, so half of the draws pass.
    while True:
        length = max(1, round(median * float(np.exp(rng.normal(0.0, sigma)))))
        if length <= maximum:
            return length


def _shared_prefix_shapes(config: SharedPrefixWorkloadConfig, seed: int) -> Iterator[Shape]:
    rng = generator(seed, Stream.prefix_choice)
    prefix, suffix, output = (scaled(tokens, config.length_scale) for tokens in
                              (config.prefix_tokens, config.suffix_tokens, config.output_tokens))
    while True:
        yield Shape((Segment(int(rng.integers(config.num_prefixes)), prefix),), suffix, output)


def _azure_shapes(config: AzureWorkloadConfig) -> Iterator[Shape]:
    for entry in read_azure(config.path):
        yield _of_trace(config, entry, (), scaled(entry.prompt_tokens, config.length_scale))


def _mooncake_shapes(config: MooncakeWorkloadConfig) -> Iterator[Shape]:
    for entry in read_mooncake(config.path, config.block_tokens):
        prompt = scaled(entry.prompt_tokens, config.length_scale)
        shared = _scaled_blocks(entry.block_ids, config.block_tokens, config.length_scale, prompt)
        yield _of_trace(config, entry, shared, 0)


def _of_trace(config: WorkloadConfig, entry: TraceEntry, shared: tuple[Segment, ...], own_tokens: int) -> Shape:
    """Raises ConfigError for what both the trace and the configuration say."""
    for key, value, of_trace in (("num_tenants", config.num_tenants, entry.tenant),
                                 ("priorities", config.priorities or None, entry.priority),
                                 ("prediction_sigma", config.prediction_sigma, entry.predicted_tokens)):
        require(value is None or of_trace is None, f"workload.{key}", value,
                f"the trace itself says so ({of_trace} in one of its lines)", "leave it out, or the trace's column")
    predicted = entry.predicted_tokens
    return Shape(shared, own_tokens, scaled(entry.output_tokens, config.length_scale), entry.at_s, entry.tenant,
                 entry.priority, None if predicted is None else scaled(predicted, config.length_scale))


def _scaled_blocks(block_ids: Sequence[int], block_tokens: int, scale: float, prompt: int) -> tuple[Segment, ...]:
    """The blocks of a scaled prompt. Borders are scaled by position, so equal leading ids stay equal prefixes."""
    borders = [min(prompt, round(i * block_tokens * scale)) for i in range(len(block_ids))] + [prompt]
    return tuple(Segment(block_id, borders[i + 1] - borders[i]) for i, block_id in enumerate(block_ids))
