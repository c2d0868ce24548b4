"""The runner: a plan in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from servekit.core.plan import BlockCopy, Plan, PlanItem, Sampled, StepResult
from servekit.core.request import Request, RequestId, TokenLogprobs
from servekit.kernels import Kernels
from servekit.model.decoder import Decoder
from servekit.runner.inputs import StepInputs, build_inputs
from servekit.runner.kv_tensors import KVTensors
from servekit.runner.sampler import sample, score

_SCORED_AT_ONCE = 64
"""Prompt positions whose full log-probabilities are in memory at one time."""


class Runner:
    """Executes plans on one device. Requests, queues and block accounting are the scheduler's; tensors are its.

    `kv` is the cache on the device, `host_kv` the room in the host's memory for requests that are swapped out.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, host_kv: KVTensors, kernels: Kernels, block_size_tokens: int,
                 device: torch.device) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._kv = kv
        self._host_kv = host_kv
        self._block_size_tokens = block_size_tokens
        self._device = device

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Make the plan's copies, compute its tokens, write their keys and values, and sample where it says so."""
        self._copy_blocks(plan.swap_out, self._kv, self._host_kv)
        self._copy_blocks(plan.swap_in, self._host_kv, self._kv)
        return self._compute(plan) if plan.items else StepResult({})

    def _copy_blocks(self, copies: Sequence[BlockCopy], source: KVTensors, target: KVTensors) -> None:
        if not copies:
            return
        source_blocks, target_blocks = torch.tensor(copies, dtype=torch.int64).unbind(1)
        for from_layer, to_layer in zip(source, target, strict=True):
            for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
                self._kernels.copy_blocks(from_cache, to_cache, source_blocks, target_blocks)

    def _compute(self, plan: Plan) -> StepResult:
        inputs = build_inputs(plan, self._block_size_tokens, self._device)
        hidden = self._decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, self._kv)
        sampled, failed = self._sample(plan, inputs, hidden)
        return StepResult(sampled, failed, self._score_prompts(plan, inputs, hidden))

    def _sample(self, plan: Plan, inputs: StepInputs,
                hidden: Tensor) -> tuple[dict[RequestId, Sampled], dict[RequestId, str]]:
        rows = [end - 1 for end, item in zip(inputs.row_of[1:], plan.items, strict=True) if item.samples]
        requests = [item.request for item in plan.items if item.samples]
        sampled: dict[RequestId, Sampled] = {}
        failed: dict[RequestId, str] = {}
        if not rows:
            return sampled, failed
        logits = self._decoder.logits(hidden if len(rows) == len(hidden) else hidden[rows])
        for request, answer in zip(requests, sample(logits, requests, self._kernels), strict=True):
            if isinstance(answer, str):
                failed[request.request_id] = answer
            else:
                sampled[request.request_id] = answer
        return sampled, failed

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
