"""From logits to tokens.

The order of operations: bias and allowed tokens, penalties, the ban on stop tokens before `min_tokens`; then, unless
greedy, temperature, top-k, top-p (of what top-k left), min-p, and one draw. Reported log-probabilities are the
model's own, before any of that.

Every row is treated by itself and a draw depends on the request's seed and the position only, so what else is in the
batch cannot change it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from servekit.core.plan import Sampled
from servekit.core.request import Request, SamplingParams, TokenLogprobs
from servekit.kernels import Kernels
from servekit.runner.queue import to_device, to_host


class Stand(NamedTuple):
    """Where a request stands when its token is sampled. A copy: the request may go on before the step is computed."""

    sampling: SamplingParams
    num_prompt: int
    num_tokens: int
    """Prompt plus output so far: the position of the token to come."""
    token_ids: list[int]
    """All of them if anything looks at them, else none."""

    @classmethod
    def of(cls, request: Request) -> Stand:
        """The request as it is now."""
        params, token_ids = request.sampling, request.token_ids
        return cls(params, request.num_prompt, len(token_ids), token_ids[:] if _has_penalties(params) else [])

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt


@dataclass(frozen=True, slots=True)
class Choices:
    """The tokens of S rows, on the device that computes them: reading them waits for it."""

    tokens: Tensor
    """[S] int64. Of a row without a choice it is any token."""
    best: Tensor
    """[S]: the largest logit, which is not finite where the logits are unsound."""
    best_left: Tensor
    """[S]: the largest after all adjustments; -inf where these exclude every token."""
    scores: dict[int, TokenLogprobs]
    """By row, where they are asked for."""

    def on_host(self) -> Choices:
        """The same, on its way to the host's memory."""
        best = to_host(self.best)
        best_left = best if self.best_left is self.best else to_host(self.best_left)
        return Choices(to_host(self.tokens), best, best_left, self.scores)


def choose(logits: Tensor, stands: Sequence[Stand], kernels: Kernels) -> Choices:
    """Choose the next token of each request.

    Without penalties and log-probabilities it does not wait for the device, where the kernels truncate there.

    Args:
        logits: [S, vocab] in float32 or float64; row i belongs to `stands[i]`. Not modified.
        stands: What to sample for.
        kernels: Choose the largest, truncate and draw.
    """
    best, tokens = kernels.argmax(logits)
    best_left = best
    others = [row for row, stand in enumerate(stands) if not _is_plain_greedy(stand)]
    if others:
        best_left, tokens = best.clone(), tokens.clone()
        places = _indices(others, logits.device)
        best_left[places], tokens[places] = _choose(logits, others, stands, kernels)
    return Choices(tokens, best, best_left, _scores(logits, tokens, stands))


def answers(choices: Choices, stands: Sequence[Stand]) -> list[Sampled | str]:
    """For each row the token, or a line that says why there is none. Waits for the device."""
    rows = zip(stands, choices.tokens.tolist(), choices.best.tolist(), choices.best_left.tolist(), strict=True)
    return [_answer(stand, token, choices.scores.get(row), math.isfinite(best), math.isfinite(best_left))
            for row, (stand, token, best, best_left) in enumerate(rows)]


def score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens.

    Args:
        logits: [S, vocab]; row i predicts `token_ids[i]`.
        token_ids: The tokens that came.
        num_top: How many of the most likely tokens to report beside each.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.as_tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    top_values, top_tokens = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return [TokenLogprobs(token, logprob, rank, tuple(zip(best, values, strict=True)))
            for token, logprob, rank, best, values in zip(token_ids, own.squeeze(1).tolist(), ranks.tolist(),
                                                          top_tokens.tolist(), top_values.tolist(), strict=True)]


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers that depend on nothing but the arguments: the key of one draw."""
    digest = blake2b(struct.pack("<qq", (seed + 2**63) % 2**64 - 2**63, position), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    return first, second


def _is_plain_greedy(stand: Stand) -> bool:
    return stand.sampling.temperature == 0 and not _adjusts(stand)


def _adjusts(stand: Stand) -> bool:
    params = stand.sampling
    return bool(params.logit_bias or _has_penalties(params) or params.allowed_token_ids is not None
                or (params.stop_token_ids and stand.num_output < params.min_tokens))


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _scores(logits: Tensor, tokens: Tensor, stands: Sequence[Stand]) -> dict[int, TokenLogprobs]:
    return {row: score(logits[row:row + 1], tokens[row:row + 1].tolist(), stand.sampling.logprobs)[0]
            for row, stand in enumerate(stands) if stand.sampling.logprobs is not None}


def _answer(stand: Stand, token: int, scored: TokenLogprobs | None, is_sound: bool, is_left: bool) -> Sampled | str:
    if not is_sound:
        return (f"the model's logits at position {stand.num_tokens} are not finite (NaN or infinity); "
                "the weights or the number format (model.dtype) do not fit this input")
    if not is_left:
        return (f"no token may come at position {stand.num_tokens}: allowed_token_ids, logit_bias and the stop "
                "tokens that min_tokens bans exclude all of them")
    return Sampled(token, scored)


def _choose(logits: Tensor, rows: list[int], stands: Sequence[Stand], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The largest adjusted logit and the token of each row that does not simply take the largest logit."""
    chosen = [stands[row] for row in rows]
    adjusted = torch.stack([_adjust(logits[row], stand) for row, stand in zip(rows, chosen, strict=True)])
    best, tokens = kernels.argmax(adjusted)
    random = [i for i, stand in enumerate(chosen) if stand.sampling.temperature > 0]
    if random:
        places = _indices(random, logits.device)
        tokens[places] = _draw(adjusted[places], [chosen[i] for i in random], kernels)
    return best, tokens


def _indices(rows: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(rows), device)


def _adjust(logits: Tensor, stand: Stand) -> Tensor:
    """[vocab]: one row after bias, allowed tokens, penalties and the ban on early stops."""
    params = stand.sampling
    if not _adjusts(stand):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(stand.token_ids)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(stand.token_ids[stand.num_prompt:], dtype=torch.long, device=logits.device)
        counts = torch.bincount(output, minlength=len(logits)).to(logits.dtype)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype,
                                                        device=logits.device)
    if params.allowed_token_ids is not None:
        only_allowed = torch.full_like(logits, float("-inf"))
        allowed = list(params.allowed_token_ids)
        only_allowed[allowed] = logits[allowed]
        logits = only_allowed
    if stand.num_output < params.min_tokens:
        logits[list(params.stop_token_ids)] = float("-inf")
    return logits


def _draw(logits: Tensor, stands: Sequence[Stand], kernels: Kernels) -> Tensor:
    """[S] int64: one random token a row."""
    temperatures = _numbers([stand.sampling.temperature for stand in stands], logits.device)
    if any(_truncates(stand.sampling) for stand in stands):
        logits = kernels.truncate(logits, temperatures, *_limits(stands, logits))
    keys = torch.tensor([draw_key(stand.sampling.seed, stand.num_tokens) for stand in stands])
    return kernels.draw(logits, temperatures, to_device(keys, logits.device))


def _truncates(params: SamplingParams) -> bool:
    return params.top_k is not None or params.top_p < 1 or params.min_p > 0


def _limits(stands: Sequence[Stand], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """top-k, top-p and min-p of each row, [S] each; those of a row without any leave all its tokens."""
    vocab, params = logits.shape[1], [stand.sampling for stand in stands]
    top_k = torch.tensor([vocab if one.top_k is None else min(one.top_k, vocab) for one in params])
    return (to_device(top_k, logits.device), _numbers([one.top_p for one in params], logits.device),
            _numbers([one.min_p for one in params], logits.device))


def _numbers(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.float64), device)
