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
from hashlib import blake2b

import torch
from torch import Tensor

from servekit.core.plan import Sampled
from servekit.core.request import Request, SamplingParams, TokenLogprobs
from servekit.kernels import Kernels

_CANDIDATES = 1024
"""Most likely tokens that top-k, top-p and min-p look at before they resort to sorting the vocabulary."""


def sample(logits: Tensor, requests: Sequence[Request], kernels: Kernels) -> list[Sampled | str]:
    """Choose the next token of each request.

    Args:
        logits: [S, vocab] in float32 or float64; row i belongs to `requests[i]`. Not modified.
        requests: What to sample for. Their `token_ids` end where the new token goes.
        kernels: Choose the largest and draw.

    Returns:
        For each row the token, or a line that says why there is none.
    """
    best, greedy = kernels.argmax(logits)
    is_sound = [math.isfinite(value) for value in best.tolist()]
    tokens: list[int | None] = greedy.tolist()
    others = [row for row, request in enumerate(requests) if is_sound[row] and not _is_plain_greedy(request)]
    for row, token in zip(others, _choose(logits, others, requests, kernels), strict=True):
        tokens[row] = token
    return [_answer(logits[row], request, tokens[row]) if is_sound[row] else _unsound(request)
            for row, request in enumerate(requests)]


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


def _is_plain_greedy(request: Request) -> bool:
    params = request.sampling
    return params.temperature == 0 and not _adjusts(request, params)


def _adjusts(request: Request, params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.presence_penalty or params.frequency_penalty
                or params.repetition_penalty != 1 or params.allowed_token_ids is not None
                or (params.stop_token_ids and request.num_output < params.min_tokens))


def _unsound(request: Request) -> str:
    return (f"the model's logits at position {request.num_tokens} are not finite (NaN or infinity); "
            "the weights or the number format (model.dtype) do not fit this input")


def _answer(logits: Tensor, request: Request, token: int | None) -> Sampled | str:
    if token is None:
        return (f"no token may come at position {request.num_tokens}: allowed_token_ids, logit_bias and the stop "
                "tokens that min_tokens bans exclude all of them")
    if request.sampling.logprobs is None:
        return Sampled(token)
    return Sampled(token, score(logits.unsqueeze(0), [token], request.sampling.logprobs)[0])


def _choose(logits: Tensor, rows: list[int], requests: Sequence[Request], kernels: Kernels) -> list[int | None]:
    """Tokens of the rows that are not simply the largest logit; None where nothing is left to choose."""
    if not rows:
        return []
    chosen = [requests[row] for row in rows]
    adjusted = torch.stack([_adjust(logits[row], request) for row, request in zip(rows, chosen, strict=True)])
    best, greedy = kernels.argmax(adjusted)
    tokens: list[int | None] = [token if is_left else None for token, is_left in
                                zip(greedy.tolist(), map(math.isfinite, best.tolist()), strict=True)]
    random = [i for i, request in enumerate(chosen) if request.sampling.temperature > 0 and tokens[i] is not None]
    if random:
        drawn = _draw(adjusted[random], [chosen[i] for i in random], kernels)
        for i, token in zip(random, drawn, strict=True):
            tokens[i] = token
    return tokens


def _adjust(logits: Tensor, request: Request) -> Tensor:
    """[vocab]: one row after bias, allowed tokens, penalties and the ban on early stops."""
    params = request.sampling
    if not _adjusts(request, params):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(request.token_ids[request.num_prompt:], dtype=torch.long, device=logits.device)
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
    if request.num_output < params.min_tokens:
        logits[list(params.stop_token_ids)] = float("-inf")
    return logits


def _draw(logits: Tensor, requests: Sequence[Request], kernels: Kernels) -> list[int]:
    """One random token a row."""
    for row, request in zip(logits, requests, strict=True):
        if _filters(request.sampling):
            _keep_survivors(row, request.sampling)
    temperatures = torch.tensor([request.sampling.temperature for request in requests], dtype=torch.float64)
    keys = torch.tensor([draw_key(request.sampling.seed, request.num_tokens) for request in requests])
    tokens: list[int] = kernels.draw(logits, temperatures.to(logits.device), keys.to(logits.device)).tolist()
    return tokens


def _filters(params: SamplingParams) -> bool:
    return params.top_k is not None or params.top_p < 1 or params.min_p > 0


def _keep_survivors(logits: Tensor, params: SamplingParams) -> None:
    """Set all of a row [vocab] to -inf but what top-k, top-p and min-p leave, which is one token at least."""
    limit = len(logits) if params.top_k is None else min(params.top_k, len(logits))
    looked_at = min(limit, _CANDIDATES) if params.top_k is None else limit
    candidates, keep = _filter(logits, looked_at, params)
    if looked_at < limit and keep[-1]:
        candidates, keep = _filter(logits, limit, params)
    kept = candidates[keep]
    values = logits[kept]
    logits.fill_(float("-inf"))
    logits[kept] = values


def _filter(logits: Tensor, looked_at: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The `looked_at` most likely tokens, best first, and which of them top-p and min-p keep."""
    values, candidates = logits.topk(looked_at)
    best = values[0].double()
    # Shifted before the division: a tiny temperature must not overflow.
    scaled = (values.double() - best) / params.temperature
    population = (logits.double() - best) / params.temperature if params.top_k is None else scaled
    weights = (scaled - population.logsumexp(dim=-1)).exp()
    keep = (weights.cumsum(dim=-1) - weights < params.top_p) & (weights >= params.min_p * weights[0])
    keep[0] = True
    return candidates, keep
