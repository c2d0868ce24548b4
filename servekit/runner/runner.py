"""The runner: a plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from servekit.core.plan import BlockCopy, Plan, PlanItem, Sampled, StepResult
from servekit.core.request import Request, RequestId, TokenLogprobs
from servekit.kernels import Kernels
from servekit.model.decoder import Decoder
from servekit.runner.graphs import DecodeGraphs
from servekit.runner.inputs import SampledTokens, StepInputs, build_inputs
from servekit.runner.kv_tensors import KVTensors
from servekit.runner.queue import WorkQueue, to_device
from servekit.runner.sampler import Choices, Stand, answers, choose, score

_SCORED_AT_ONCE = 64
"""Prompt positions whose full log-probabilities are in memory at one time."""


@dataclass(frozen=True, slots=True)
class _Order:
    """All that the work on a step needs to know, read from its requests at the launch."""

    plan: Plan
    inputs: StepInputs | None
    """None where there are blocks to copy only."""
    stands: tuple[Stand, ...]
    """Of the requests that it samples for."""
    graph_size: int | None
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
        return StepResult(sampled, failed, computed.prompt_logprobs, order.graph_size)


class Runner:
    """Executes plans on one device. Requests, queues and block accounting are the scheduler's; tensors are its.

    `kv` is the cache on the device, `host_kv` the room in the host's memory for requests that are swapped out. All
    that a step needs to know of its requests is read when it is launched, and all tensors are touched by work in
    `queue` only, so that steps may be launched ahead.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, host_kv: KVTensors, kernels: Kernels, block_size_tokens: int,
                 device: torch.device, queue: WorkQueue, graphs: DecodeGraphs | None = None) -> None:
        """`graphs`: of decode steps of this decoder over this cache; None: every step is computed eagerly."""
        self._decoder = decoder
        self._kernels = kernels
        self._kv = kv
        self._host_kv = host_kv
        self._block_size_tokens = block_size_tokens
        self._device = device
        self._queue = queue
        self._graphs = graphs
        self._sampled = SampledTokens(())
        """What the last step samples."""

    def execute(self, plan: Plan) -> StepResult:
        """Make the plan's copies, compute its tokens, write their keys and values, and sample where it says so."""
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin with a plan. Tokens that are not known yet are those that the last one samples."""
        sampling = [item.request for item in plan.items if item.samples]
        before, self._sampled = self._sampled, SampledTokens([request.request_id for request in sampling])
        order = _Order(plan, build_inputs(plan, self._block_size_tokens, before) if plan.items else None,
                       tuple(map(Stand.of, sampling)), self._graphs.pick(plan) if self._graphs is not None else None,
                       before, self._sampled)
        return LaunchedStep(order, self._queue.submit(partial(self._work, order)))

    @torch.inference_mode()
    def _work(self, order: _Order) -> _Computed:
        self._copy_blocks(order.plan.swap_out, self._kv, self._host_kv)
        self._copy_blocks(order.plan.swap_in, self._host_kv, self._kv)
        if order.inputs is None:
            return _Computed()
        if self._graphs is not None and order.graph_size is not None:
            return _Computed(self._choose(self._graphs.logits(order.graph_size, order.inputs, order.before), order))
        return self._compute(order, order.inputs.on(self._device))

    def _compute(self, order: _Order, inputs: StepInputs) -> _Computed:
        inputs.take_tokens(order.before)
        hidden = self._decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, self._kv)
        choices = self._choose(self._logits(order.plan, inputs, hidden), order) if order.stands else None
        return _Computed(choices, self._score_prompts(order.plan, inputs, hidden))

    def _choose(self, logits: Tensor, order: _Order) -> Choices:
        order.before.complete(order.stands, order.own.request_ids)
        choices = choose(logits, order.stands, self._kernels)
        order.own.tokens = choices.tokens
        return choices.on_host()

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
