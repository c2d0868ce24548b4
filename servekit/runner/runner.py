"""The runner: a plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from servekit.core.plan import BlockCopy, Plan, PlanItem, Sampled, StepResult
from servekit.core.request import Request, RequestId, TokenLogprobs
from servekit.kernels import Kernels
from servekit.model.decoder import Decoder
from servekit.runner.graphs import DecodeGraphs
from servekit.runner.group import ONE_RANK, Group
from servekit.runner.inputs import SampledTokens, SharedStep, StepInputs, ToldTokens, build_inputs
from servekit.runner.kv_tensors import KVTensors
from servekit.runner.queue import WorkQueue, to_device
from servekit.runner.sampler import Choices, Stand, answers, choose, score

_SCORED_AT_ONCE = 64
"""Prompt positions whose full log-probabilities are in memory at one time."""


@dataclass(frozen=True, slots=True)
class _Order:
    """All that the work on a step needs to know, read from its requests at the launch."""

    plan: Plan
    shared: SharedStep
    """What the other ranks are told of it."""
    stands: tuple[Stand, ...]
    """Of the requests that it samples for."""
    before: SampledTokens
    """Of the step before."""
    own: SampledTokens


@dataclass(frozen=True, slots=True)
class _Computed:
    """What became of a step."""

    choices: Choices | None = None
    """None where nothing is sampled."""
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way."""

    order: _Order
    wait: Callable[[], _Computed]

    def result(self) -> StepResult:
        """Wait for the step to end; what it has computed."""
        computed, order = self.wait(), self.order
        sampled: dict[RequestId, Sampled] = {}
        failed: dict[RequestId, str] = {}
        if computed.choices is not None:
            for request_id, answer in zip(order.own.request_ids, answers(computed.choices, order.stands), strict=True):
                if isinstance(answer, str):
                    failed[request_id] = answer
                else:
                    sampled[request_id] = answer
        return StepResult(sampled, failed, computed.prompt_logprobs, order.shared.graph_size)


class OtherRanks(Protocol):
    """Those that compute the other parts of a divided model."""

    def begin(self, step: SharedStep) -> None:
        """Let them do their part of a step. Raises RankLost if one has ended."""

    def watched(self, queue: WorkQueue) -> WorkQueue:
        """The queue, whose results count only if every rank has lived on; else they raise RankLost."""


class Runner:
    """Executes plans on one device. Requests, queues and block accounting are the scheduler's; tensors are its.

    `kv` is the cache on the device, `host_kv` the room in the host's memory for requests that are swapped out. All
    that a step needs to know of its requests is read when it is launched, and all tensors are touched by work in
    `queue` only, so that steps may be launched ahead.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, host_kv: KVTensors, kernels: Kernels, block_size_tokens: int,
                 device: torch.device, queue: WorkQueue, graphs: DecodeGraphs | None = None, group: Group = ONE_RANK,
                 others: OtherRanks | None = None) -> None:
        """Take over the tensors of one engine.

        Args:
            decoder: The model, or one rank's part of it.
            kv: The cache on the device.
            host_kv: Blocks in the host's memory.
            kernels: Copy blocks and sample.
            block_size_tokens: Tokens in a block.
            device: Where decoder and cache are.
            queue: Does the work.
            graphs: Of decode steps of this decoder over this cache; None: every step is computed eagerly.
            group: The ranks that the model is divided among.
            others: On the first rank of several: all but this one, which `follow` what is launched here.
        """
        self._decoder = decoder
        self._kernels = kernels
        self._kv = kv
        self._host_kv = host_kv
        self._block_size_tokens = block_size_tokens
        self._device = device
        self._queue = queue
        self._graphs = graphs
        self._group = group
        self._others = others
        self._sampled = SampledTokens(())
        """What the last step samples."""

    def execute(self, plan: Plan) -> StepResult:
        """Make the plan's copies, compute its tokens, write their keys and values, and sample where it says so."""
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin with a plan. Tokens that are not known yet are those that the last one samples."""
        sampling = [item.request for item in plan.items if item.samples]
        before, self._sampled = self._sampled, SampledTokens([request.request_id for request in sampling],
                                                                  self._group)
        inputs = build_inputs(plan, self._block_size_tokens, before) if plan.items else None
        shared = SharedStep(plan.swap_out, plan.swap_in, inputs,
                            self._graphs.pick(plan) if self._graphs is not None else None)
        order = _Order(plan, shared, tuple(map(Stand.of, sampling)), before, self._sampled)
        if self._others is not None:
            self._others.begin(shared)
        return LaunchedStep(order, self._queue.submit(partial(self._work, order)))

    @torch.inference_mode()
    def follow(self, step: SharedStep) -> None:
        """Do another rank's part of a step that the first one has launched: all of it but the sampling."""
        told = ToldTokens(self._group)
        self._swap(step)
        if step.inputs is None:
            return
        if self._graphs is not None and step.graph_size is not None:
            self._graphs.logits(step.graph_size, step.inputs, told)
        else:
            self._hidden(step.inputs.on(self._device), told)

    @torch.inference_mode()
    def _work(self, order: _Order) -> _Computed:
        step = order.shared
        self._swap(step)
        if step.inputs is None:
            return _Computed()
        if self._graphs is not None and step.graph_size is not None:
            return _Computed(self._choose(self._graphs.logits(step.graph_size, step.inputs, order.before), order))
        return self._compute(order, step.inputs.on(self._device))

    def _compute(self, order: _Order, inputs: StepInputs) -> _Computed:
        hidden = self._hidden(inputs, order.before)
        choices = self._choose(self._logits(order.plan, inputs, hidden), order) if order.stands else None
        return _Computed(choices, self._score_prompts(order.plan, inputs, hidden))

    def _choose(self, logits: Tensor, order: _Order) -> Choices:
        order.before.complete(order.stands, order.own.request_ids)
        choices = choose(logits, order.stands, self._kernels)
        order.own.tokens = choices.tokens
        return choices.on_host()

    def _hidden(self, inputs: StepInputs, before: SampledTokens | ToldTokens) -> Tensor:
        """[T, hidden]"""
        inputs.take_tokens(before)
        return self._decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, self._kv)

    def _swap(self, step: SharedStep) -> None:
        self._copy_blocks(step.swap_out, self._kv, self._host_kv)
        self._copy_blocks(step.swap_in, self._host_kv, self._kv)

    def _copy_blocks(self, copies: Sequence[BlockCopy], source: KVTensors, target: KVTensors) -> None:
        if not copies:
            return
        source_blocks, target_blocks = torch.tensor(copies, dtype=torch.int64).unbind(1)
        for from_layer, to_layer in zip(source, target, strict=True):
            for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
                self._kernels.copy_blocks(from_cache, to_cache, source_blocks, target_blocks)

    def _logits(self, plan: Plan, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """[S, vocab]: a row for each item that samples."""
        rows = [end - 1 for end, item in zip(inputs.row_of[1:], plan.items, strict=True) if item.samples]
        if len(rows) < len(hidden):
            hidden = hidden[to_device(torch.tensor(rows), self._device)]
        return self._decoder.logits(hidden)

    def _score_prompts(self, plan: Plan, inputs: StepInputs,
                       hidden: Tensor) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        return {item.request.request_id: self._score_chunk(item, hidden[first:])
                for first, item in zip(inputs.row_of, plan.items, strict=False)
                if item.request.sampling.prompt_logprobs is not None and item.start < item.request.num_prompt - 1}

    def _score_chunk(self, item: PlanItem, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that the chunk's positions predict."""
        request: Request = item.request
        targets = request.token_ids[item.start + 1:min(item.start + item.num_tokens + 1, request.num_prompt)]
        num_top = request.sampling.prompt_logprobs or 0
        scored: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _SCORED_AT_ONCE):
            wanted = targets[begin:begin + _SCORED_AT_ONCE]
            scored += score(self._decoder.logits(hidden[begin:begin + len(wanted)]), wanted, num_top)
        return tuple(scored)
