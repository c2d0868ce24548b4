"""From logits to tokens.

The order of operations: bias and allowed tokens, penalties, the ban on stop tokens before `min_tokens`; then, unless
greedy, temperature, top-k, top-p (of what top-k left), min-p, and one draw. Reported log-probabilities are the
model's own, before any of that.

Every row is treated by itself and a draw depends on the request's seed and the position only, so what else is in the
batch cannot change it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from servekit.core.plan import Sampled
from servekit.core.request import Request, SamplingParams, TokenLogprobs

_CANDIDATES = 1024
"""Most likely tokens that top-k, top-p and min-p look at before they resort to sorting the vocabulary."""


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled | str]:
    """Choose the next token of each request.

    Args:
        logits: [S, vocab] in float32 or float64; row i belongs to `requests[i]`. Not modified.
        requests: What to sample for. Their `token_ids` end where the new token goes.

    Returns:
        For each row the token, or a line that says why there is none.
    """
    best, greedy = logits.max(dim=-1)
    is_sound = torch.isfinite(best).tolist()
    tokens: list[int] = greedy.tolist()
    drawn = [row for row, request in enumerate(requests) if is_sound[row] and not _is_plain_greedy(request)]
    for row, token in zip(drawn, _choose(logits, drawn, requests), strict=True):
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


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = blake2b(struct.pack("<qq", _wrapped(seed), position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0 ** -53


def _wrapped(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (seed + 2**63) % 2**64 - 2**63


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


def _answer(logits: Tensor, request: Request, token: int) -> Sampled:
    if request.sampling.logprobs is None:
        return Sampled(token)
    return Sampled(token, score(logits.unsqueeze(0), [token], request.sampling.logprobs)[0])


def _choose(logits: Tensor, rows: list[int], requests: Sequence[Request]) -> list[int]:
    """Tokens of the rows that are not simply the largest logit."""
    if not rows:
        return []
    chosen = [requests[row] for row in rows]
    adjusted = torch.stack([_adjust(logits[row], request) for row, request in zip(rows, chosen, strict=True)])
    tokens: list[int] = adjusted.argmax(dim=-1).tolist()
    random = [i for i, request in enumerate(chosen) if request.sampling.temperature > 0]
    if random:
        drawn = _draw(adjusted[random], [chosen[i] for i in random])
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


def _draw(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One random token a row, by inversion of the cumulative distribution."""
    temperature = _column([request.sampling.temperature for request in requests], logits.device).unsqueeze(1)
    # Shifted first: a tiny temperature must not overflow.
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True).double()) / temperature
    points = _column([uniform(request.sampling.seed, request.num_tokens) for request in requests], logits.device)
    tokens = [0] * len(requests)
    filtered = [i for i, request in enumerate(requests) if _filters(request.sampling)]
    unfiltered = [i for i, request in enumerate(requests) if not _filters(request.sampling)]
    if unfiltered:
        picks = _invert(scaled[unfiltered].softmax(dim=-1), points[unfiltered])
        for i, token in zip(unfiltered, picks.tolist(), strict=True):
            tokens[i] = token
    for i in filtered:
        candidates, weights = _survivors(scaled[i], requests[i].sampling)
        tokens[i] = int(candidates[_invert(weights.unsqueeze(0), points[i:i + 1])].item())
    return tokens


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _filters(params: SamplingParams) -> bool:
    return params.top_k is not None or params.top_p < 1 or params.min_p > 0


def _survivors(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token ids, most likely first, that top-k, top-p and min-p leave, and their weights; at least one."""
    limit = len(scaled) if params.top_k is None else min(params.top_k, len(scaled))
    looked_at = min(limit, _CANDIDATES) if params.top_k is None else limit
    candidates, weights, keep = _filter(scaled, looked_at, params)
    if looked_at < limit and keep[-1]:
        candidates, weights, keep = _filter(scaled, limit, params)
    return candidates[keep], weights[keep]


def _filter(scaled: Tensor, looked_at: int, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """The `looked_at` most likely tokens, their shares, and which of them top-p and min-p keep."""
    values, candidates = scaled.topk(looked_at)
    population = scaled if params.top_k is None else values
    weights = (values - population.logsumexp(dim=-1)).exp()
    keep = (weights.cumsum(dim=-1) - weights < params.top_p) & (weights >= params.min_p * weights[0])
    keep[0] = True
    return candidates, weights, keep


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """[n, m] weights and [n] points in [0, 1): the column of each row in whose share of the total the point falls."""
    cumulative = weights.cumsum(dim=-1)
    targets = (points * cumulative[:, -1]).unsqueeze(1)
    picked = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Rounding may put the target at the very end; the last column with any weight is meant.
    last = (weights > 0).long().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(picked, last)
