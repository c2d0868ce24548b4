"""The sampler against independent formulas, against the distribution it claims, and row by row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.core.plan import Sampled
from servekit.core.request import Request, RequestId, RequestSpec, SamplingParams
from servekit.kernels import reference_kernels
from servekit.runner.sampler import Stand, answers, choose, draw_key, score


def sample(logits: torch.Tensor, requests: list[Request]) -> list[Sampled | str]:
    stands = [Stand.of(request) for request in requests]
    return answers(choose(logits, stands, reference_kernels()), stands)


def make_request(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    request = Request(RequestSpec(RequestId("r"), tuple(prompt or [0]), params, 0.0), 10_000)
    request.token_ids += output or []
    return request


def token_of(logits: list[float], request: Request) -> int:
    (answer,) = sample(torch.tensor([logits]), [request])
    assert isinstance(answer, Sampled)
    return answer.token_id


def drawn(logits: list[float], count: int = 4000, **sampling: Any) -> dict[int, float]:
    """Shares of the tokens over many seeds."""
    rows = torch.tensor([logits]).repeat(count, 1)
    answers = sample(rows, [make_request(seed=seed, **sampling) for seed in range(count)])
    tokens = Counter(answer.token_id for answer in answers if isinstance(answer, Sampled))
    return {token: times / count for token, times in tokens.items()}


def softmax(logits: list[float], temperature: float = 1.0) -> np.ndarray:
    values = np.exp((np.array(logits) - max(logits)) / temperature)
    return values / values.sum()


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def test_greedy_takes_the_largest() -> None:
    assert token_of([0.1, 3.0, 2.0], make_request(temperature=0.0)) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_any_temperature(temperature: float) -> None:
    shares = drawn(LOGITS, temperature=temperature)
    for token, expected in enumerate(softmax(LOGITS, temperature)):
        assert shares.get(token, 0.0) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert drawn(LOGITS, 50, temperature=temperature) == {0: 1.0}


def test_a_huge_temperature_is_uniform() -> None:
    assert set(drawn(LOGITS, 500, temperature=1e300)) == set(range(6))


def test_top_k_keeps_k_and_their_proportions() -> None:
    shares = drawn(LOGITS, top_k=2)
    expected = softmax(LOGITS[:2])
    assert set(shares) == {0, 1} and shares[0] == pytest.approx(expected[0], abs=0.03)


@pytest.mark.parametrize("top_p, survivors", [(0.0, {0}), (0.56, {0}), (0.57, {0, 1}), (0.85, {0, 1, 2})])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, survivors: set[int]) -> None:
    # The cumulative shares are 0.561, 0.767, 0.892, ...
    assert set(drawn(LOGITS, 1500, top_p=top_p)) == survivors


def test_top_p_counts_shares_of_what_top_k_left() -> None:
    # Alone, 0.7 needs the first two of six (0.56, 0.21); of the first two alone, the first has 0.73.
    assert set(drawn(LOGITS, 500, top_p=0.7)) == {0, 1}
    assert set(drawn(LOGITS, 500, top_p=0.7, top_k=2)) == {0}


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert set(drawn(LOGITS, 3000, min_p=0.2)) == {0, 1, 2}


def test_a_flat_distribution_needs_more_candidates_than_are_looked_at_first() -> None:
    """top-p over 5,000 nearly equal tokens: the first 1,024 do not reach 0.9."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(0, 0.01, 5000))
    order = logits.argsort(descending=True)
    allowed = set(order[:int((logits.softmax(0)[order].cumsum(0) < 0.9).sum()) + 1].tolist())
    assert 4000 < len(allowed) < 5000
    answers = sample(logits.repeat(600, 1), [make_request(seed=seed, top_p=0.9) for seed in range(600)])
    tokens = {answer.token_id for answer in answers if isinstance(answer, Sampled)}
    assert tokens <= allowed and len(tokens - set(order[:1024].tolist())) > 100


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=40), st.integers(0, 2**40), st.integers(1, 50),
       st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 5))
@settings(max_examples=200, deadline=None)
def test_a_filtered_draw_is_one_that_plain_sorting_would_allow(logits: list[float], seed: int, top_k: int,
                                                               top_p: float, min_p: float,
                                                               temperature: float) -> None:
    token = token_of(logits, make_request(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature))
    scaled = torch.tensor(logits).double().numpy() / temperature
    kept = np.sort(scaled)[::-1][:top_k]
    shares = np.exp(kept - kept[0]) / np.exp(kept - kept[0]).sum()
    before = np.concatenate([[0], shares.cumsum()[:-1]])
    allowed = (before < top_p + 1e-9) & (shares >= min_p * shares[0] - 1e-9)
    allowed[0] = True
    assert scaled[token] >= kept[allowed].min() - 1e-9


def test_a_steps_rows_are_truncated_at_once_and_only_where_one_of_them_asks_for_it() -> None:
    calls = []

    def truncate(logits: torch.Tensor, *limits: torch.Tensor) -> torch.Tensor:
        calls.append([limit.tolist() for limit in limits])
        return reference_kernels().truncate(logits, *limits)

    kernels = replace(reference_kernels(), truncate=truncate)
    rows = torch.tensor([LOGITS]).repeat(4, 1)
    filtered = [make_request(temperature=2.0), make_request(top_k=1), make_request(top_k=99, top_p=0.0),
                make_request(min_p=1.0)]
    assert choose(rows, list(map(Stand.of, filtered)), kernels).tokens[1:].tolist() == [0, 0, 0]
    assert calls == [[[2.0, 1.0, 1.0, 1.0], [6, 1, 6, 6], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]]
    plain = [make_request(temperature=temperature) for temperature in (0.0, 1.0, 2.0, 0.5)]
    choose(rows, list(map(Stand.of, plain)), kernels)
    assert len(calls) == 1


def test_repetition_penalty_touches_prompt_and_output() -> None:
    request = make_request([0], [1], temperature=0.0, repetition_penalty=2.0)
    assert token_of([3.0, 2.8, 1.6, 0.0], request) == 2
    negative = make_request([0], [], temperature=0.0, repetition_penalty=2.0)
    assert token_of([-1.0, -1.5], negative) == 1


def test_presence_and_frequency_penalties_touch_output_only() -> None:
    assert token_of([1.0, 0.9], make_request([0], [], temperature=0.0, presence_penalty=1.0)) == 0
    assert token_of([1.0, 0.9], make_request([0], [0], temperature=0.0, presence_penalty=0.2)) == 1
    twice = make_request([9], [0, 0], temperature=0.0, frequency_penalty=0.2)
    once = make_request([9], [0], temperature=0.0, frequency_penalty=0.2)
    logits = [1.0, 0.7] + [0.0] * 8
    assert token_of(logits, twice) == 1 and token_of(logits, once) == 0


def test_bias_and_allowed_tokens() -> None:
    assert token_of([1.0, 0.0, 0.5], make_request(temperature=0.0, logit_bias={1: 5.0})) == 1
    assert token_of([1.0, 0.0, 0.5], make_request(temperature=0.0, allowed_token_ids=(1, 2))) == 2
    assert set(drawn([5.0, 0.0, 0.5], 300, allowed_token_ids=(1, 2))) == {1, 2}
    assert set(drawn([0.0, 0.0, 0.0], 300, logit_bias={0: -100.0})) == {1, 2}


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    options: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (0,), "min_tokens": 2}
    assert token_of([1.0, 0.5], make_request([3], [1], **options)) == 1
    assert token_of([1.0, 0.5], make_request([3], [1, 1], **options)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_fail_their_row_only(bad: float) -> None:
    logits = torch.tensor([[1.0, bad], [1.0, 2.0], [float("-inf")] * 2])
    first, second, third = sample(logits, [make_request(temperature=t) for t in (1.0, 0.0, 1.0)])
    assert isinstance(first, str) and "not finite" in first
    assert second == Sampled(1)
    assert isinstance(third, str)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{"allowed_token_ids": (1,), "stop_token_ids": (1,)},
                                     {"stop_token_ids": tuple(range(6))}], ids=str)
def test_a_row_with_no_token_left_fails_and_says_so(temperature: float, options: dict[str, Any]) -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    first, second = sample(logits, [make_request(temperature=temperature, min_tokens=2, **options), make_request()])
    assert isinstance(first, str) and "min_tokens" in first
    assert isinstance(second, Sampled)


def test_logprobs_are_those_of_the_model_whatever_is_sampled() -> None:
    request = make_request(temperature=0.5, top_k=1, logit_bias={2: 100.0}, logprobs=2)
    (answer,) = sample(torch.tensor([LOGITS]).double(), [request])
    assert isinstance(answer, Sampled) and answer.logprobs is not None
    expected = np.log(softmax(LOGITS))
    assert answer.token_id == 2 and answer.logprobs.rank == 3
    assert answer.logprobs.logprob == pytest.approx(expected[2])
    assert answer.logprobs.top == ((0, pytest.approx(expected[0])), (1, pytest.approx(expected[1])))


def test_score_with_no_alternatives() -> None:
    (scored,) = score(torch.tensor([LOGITS]), [4], 0)
    assert scored.top == () and scored.rank == 5


@given(st.integers(-2**70, 2**70), st.integers(0, 10**6))
def test_the_key_of_a_draw_depends_on_seed_and_position_only(seed: int, position: int) -> None:
    key = draw_key(seed, position)
    assert key == draw_key(seed, position) and all(0 <= half < 2**32 for half in key)
    assert key != draw_key(seed + 1, position) and key != draw_key(seed, position + 1)


def test_rounding_of_the_logits_hardly_ever_changes_a_draw() -> None:
    """Batches round differently; what a request draws must not hang on that."""
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(0, 2, (400, 2000)))
    requests = [make_request(seed=seed) for seed in range(400)]
    rounded = sample(logits + torch.tensor(rng.normal(0, 1e-6, logits.shape)), requests)
    assert rounded == sample(logits, requests)


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_row_gets_the_same_token_alone_and_in_a_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 3, (8, 300)))
    options: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1, "temperature": 2.0},
        {"repetition_penalty": 1.5}, {"logprobs": 3, "temperature": 0.0}, {"presence_penalty": 1.0, "temperature": 0.0}]
    requests = [make_request(rng.integers(0, 300, 5).tolist(), rng.integers(0, 300, 5).tolist(), seed=i, **option)
                for i, option in enumerate(options)]
    together = sample(logits, requests)
    assert together == [sample(logits[i:i + 1], [requests[i]])[0] for i in range(8)]


def test_the_logits_are_not_modified() -> None:
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    sample(logits, [make_request([0], [1], repetition_penalty=2.0, logit_bias={0: 1.0}, top_p=0.5)])
    assert torch.equal(logits, before)


def test_log_probabilities_sum_to_one() -> None:
    (scored,) = score(torch.tensor([LOGITS]).double(), [0], 6)
    assert sum(math.exp(value) for _, value in scored.top) == pytest.approx(1)
