"""One replica under a steady load: what it carries, and how long its users wait, for each number of decodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from servekit.sim.step_time import PromptChunk, StepShape, StepTimeModel

FEWEST_DECODES, MOST_DECODES = 1e-9, 1e9
"""Means that stand for an idle replica, and for one whose steps' fixed costs vanish beside their requests'."""
_BISECTIONS = 100


@dataclass(frozen=True)
class Lengths:
    """What the requests are like, on average."""

    prompt_tokens: float
    output_tokens: float
    """At least two: the first comes from the prompt's step, every other from a decode step."""

    @property
    def decode_steps(self) -> float:
        """Steps that a request decodes in."""
        return self.output_tokens - 1


@dataclass(frozen=True)
class OperatingPoint:
    """A replica in equilibrium: as many requests end as arrive. All figures are means."""

    num_decodes: float
    """Requests that decode at once."""
    requests_per_s: float
    tpot_s: float
    ttft_s: float
    prefill_share: float
    """Share of the time in which prompts are computed."""
    e2e_s: float
    kv_tokens: float
    """Tokens that the requests in flight hold, each reckoned at its final length and in whole blocks."""

    @property
    def num_in_flight(self) -> float:
        """Requests that have arrived and not ended, by Little's law (1961)."""
        return self.requests_per_s * self.e2e_s


@dataclass(frozen=True)
class SteadyReplica:
    """Balances what arrives and what is computed on one replica.

    While one token of each of `b` requests is decoded, b / (output - 1) requests end and as many prompts have to be
    computed, in steps of their own. Between two tokens of a request lie a decode step and its share of these:

        TPOT = step(b) + b / (output - 1) x prefill        rate = b / ((output - 1) TPOT), which is Little's law

    A step decodes at least one request; a `b` below one is the share of the time in which there is one.

    A new request waits for the decode step that runs and for the prompts before it, not for a slot. Arrivals are
    taken as Poisson and prompts as equally long, which makes the prompts an M/D/1 queue (Pollaczek and Khinchine).
    """

    step_time: StepTimeModel
    lengths: Lengths
    prefill_batch_tokens: float
    """Prompt tokens computed together in one step, where there are so many."""
    block_size_tokens: int

    def at(self, num_decodes: float) -> OperatingPoint:
        """The equilibrium in which `num_decodes` requests decode at once."""
        decode_s = self.decode_step_s(max(1.0, num_decodes))
        prompts_per_step = num_decodes / self.lengths.decode_steps
        tpot_s = decode_s + prompts_per_step * self.prefill_s
        rate = prompts_per_step / tpot_s
        prefill_share = rate * self.prefill_s
        queue_s = prefill_share / (1 - prefill_share) * self.prefill_s / 2
        ttft_s = min(1.0, num_decodes) * decode_s / 2 + queue_s + self.lone_prefill_s
        kv_tokens = num_decodes * self.request_kv_tokens + rate * self.lone_prefill_s * self.prompt_kv_tokens
        return OperatingPoint(num_decodes, rate, tpot_s, ttft_s, prefill_share,
                              ttft_s + self.lengths.decode_steps * tpot_s, kv_tokens)

    def at_rate(self, requests_per_s: float) -> OperatingPoint:
        """The equilibrium at a rate of arrivals; it must be below `highest_rate`."""
        return self.highest(lambda point: point.requests_per_s <= requests_per_s)

    def highest(self, holds: Callable[[OperatingPoint], bool]) -> OperatingPoint:
        """The fullest equilibrium for which `holds`, which must be true up to some number of decodes and then false."""
        low, high = FEWEST_DECODES, MOST_DECODES
        if holds(self.at(high)):
            return self.at(high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(self.at(middle)) else (low, middle)
        return self.at(low)

    @cached_property
    def highest_rate(self) -> float:
        """Requests per second at which the replica is never idle, whatever memory and patience it had."""
        return self.at(MOST_DECODES).requests_per_s

    def decode_step_s(self, num_decodes: float) -> float:
        """Time of a step in which every request decodes, halfway through its output, in seconds."""
        context_tokens = self.lengths.prompt_tokens + self.lengths.output_tokens / 2
        return self.step_time.step_s(StepShape(num_decodes, num_decodes * context_tokens, num_sampled=num_decodes))

    @cached_property
    def lone_prefill_s(self) -> float:
        """Time to compute one prompt alone, in seconds."""
        return self._prefill_s(num_prompts=1)

    @cached_property
    def prefill_s(self) -> float:
        """What a prompt costs in steps that compute as many as `prefill_batch_tokens` allows, in seconds."""
        num_prompts = max(1, int(self.prefill_batch_tokens / self.lengths.prompt_tokens))
        return self._prefill_s(num_prompts) / num_prompts

    def _prefill_s(self, num_prompts: int) -> float:
        """Time to compute prompts side by side; a prompt longer than a step's tokens takes several steps."""
        total_s = start = 0.0
        while start < self.lengths.prompt_tokens:
            num_tokens = min(self.prefill_batch_tokens, self.lengths.prompt_tokens - start)
            chunks = [PromptChunk(num_tokens, start)] * num_prompts
            start += num_tokens
            num_sampled = num_prompts if start >= self.lengths.prompt_tokens else 0
            total_s += self.step_time.step_s(StepShape(chunks=chunks, num_sampled=num_sampled))
        return total_s

    @cached_property
    def request_kv_tokens(self) -> int:
        """Tokens' worth of blocks that a request holds in the end."""
        return self._in_blocks(self.lengths.prompt_tokens + self.lengths.output_tokens)

    @cached_property
    def prompt_kv_tokens(self) -> int:
        """Tokens' worth of blocks that its prompt holds."""
        return self._in_blocks(self.lengths.prompt_tokens)

    def _in_blocks(self, num_tokens: float) -> int:
        return math.ceil(num_tokens / self.block_size_tokens) * self.block_size_tokens
