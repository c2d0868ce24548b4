"""The largest logit, draws and truncation, interpreted, against the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servekit.core.plan import Sampled
from servekit.core.request import SamplingParams
from servekit.kernels.triton.argmax import MOST_COLUMNS
from servekit.kernels.triton.draw import _gumbel
from servekit.runner.sampler import Stand, answers, choose
from triton_cases import KERNELS, REFERENCE, SEEDS, integers, numbers, quick

INFINITY, NAN = float("inf"), float("nan")
VOCABS = st.integers(1, 60) | st.sampled_from([MOST_COLUMNS - 1, MOST_COLUMNS, MOST_COLUMNS + 1, 2 * MOST_COLUMNS + 5])


@given(rows=st.integers(1, 4), vocab=VOCABS, levels=st.integers(1, 9), seed=SEEDS)
@quick(20)
def test_argmax_is_the_first_of_the_largest(rows: int, vocab: int, levels: int, seed: int) -> None:
    logits = integers(-levels, 0, rows, vocab, seed=seed).float()
    values, indices = KERNELS.argmax(logits)
    assert values.tolist() == [max(row) for row in logits.tolist()]
    assert indices.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("vocab", [1, 43, MOST_COLUMNS + 1])
def test_argmax_of_rows_with_infinities_and_nan(vocab: int) -> None:
    last = vocab - 1
    logits = torch.full((5, vocab), -INFINITY)
    logits[1, last], logits[2, last], logits[3, last] = -5.0, INFINITY, NAN
    logits[4, last // 2] = NAN
    logits[4, last] += INFINITY
    values, indices = KERNELS.argmax(logits)
    assert values[:3].tolist() == [-INFINITY, -5.0, INFINITY] and values[3:].isnan().all()
    assert indices.tolist() == [0, last, last, last, last // 2]


@given(rows=st.integers(1, 4), vocab=VOCABS, spread=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
       temperature=st.floats(0.05, 20), seed=SEEDS)
@quick(25)
def test_draws_are_those_of_the_reference(rows: int, vocab: int, spread: float, temperature: float, seed: int) -> None:
    logits = spread * numbers(rows, vocab, seed=seed)
    temperatures = torch.full((rows,), temperature, dtype=torch.float64) * torch.arange(1, rows + 1)
    keys = integers(0, 2**32 - 1, rows, 2, seed=seed)
    expected = REFERENCE.draw(logits, temperatures, keys)
    # Once in a million draws the two best sums are closer than float32 tells apart: then the second best may come.
    nudge = -1e-5 * temperatures.unsqueeze(1)
    other = REFERENCE.draw(logits.double().scatter_add(1, expected.unsqueeze(1), nudge), temperatures, keys)
    actual = KERNELS.draw(logits, temperatures, keys)
    assert ((actual == expected) | (actual == other)).all()


@triton.jit
def _noise(bits, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(out + index, _gumbel(tl.load(bits + index).to(tl.uint32)))


def test_noise_has_the_precision_of_float32() -> None:
    """Also at the ends of its range, and where the logarithm is computed by a series."""
    size = 2**13
    uppers = torch.cat([torch.arange(size // 4), 2**23 - 1 - torch.arange(size // 4),
                        torch.arange(size // 4) + int(2**23 * 15 / 16) - size // 8,
                        integers(0, 2**23 - 1, size // 4, seed=1)])
    out = torch.empty(size)
    _noise[(1,)](uppers << 9, out, SIZE=size)
    expected = -(-((uppers.double() + 0.5) * 2.0**-23).log()).log()
    torch.testing.assert_close(out.double(), expected, rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("key", [0, 1, 2**31 - 1, 2**31, 2**32 - 60, 2**32 - 1])
def test_draws_with_keys_at_the_ends_of_their_range(key: int) -> None:
    keys = torch.tensor([[key, other] for other in (0, 2**32 - 1, 12345)])
    keys = torch.cat([keys, keys.flip(1)])
    logits, temperatures = numbers(6, 500, seed=key), torch.ones(6, dtype=torch.float64)
    assert torch.equal(KERNELS.draw(logits, temperatures, keys), REFERENCE.draw(logits, temperatures, keys))


def test_draws_follow_the_softmax_and_never_take_a_masked_token() -> None:
    count, vocab = 400, 11
    logits = numbers(vocab, seed=1)
    logits[[1, vocab - 1]] = -INFINITY
    tokens = KERNELS.draw(logits.repeat(count, 1), torch.full((count,), 2.0, dtype=torch.float64),
                          integers(0, 2**32 - 1, count, 2, seed=1))
    shares = (logits.double() / 2.0).softmax(dim=0)
    drawn = torch.bincount(tokens, minlength=vocab).double()
    assert drawn[1] == 0 and drawn[vocab - 1] == 0
    deviations = (drawn - count * shares) / (count * shares * (1 - shares)).sqrt().clamp(min=1e-9)
    assert deviations.abs().max() < 4.5


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_takes_the_largest(temperature: float) -> None:
    logits = numbers(20, 77, seed=1)
    logits[:, 5] = -INFINITY
    tokens = KERNELS.draw(logits, torch.full((20,), temperature, dtype=torch.float64),
                          integers(0, 2**32 - 1, 20, 2, seed=2))
    assert torch.equal(tokens, logits.argmax(dim=1))


def test_a_huge_temperature_takes_every_token_that_is_not_masked() -> None:
    logits = 100 * numbers(1, 5, seed=1)
    logits[0, 4] = -INFINITY
    tokens = KERNELS.draw(logits.repeat(100, 1), torch.full((100,), 1e300, dtype=torch.float64),
                          integers(0, 2**32 - 1, 100, 2, seed=2))
    counts = torch.bincount(tokens, minlength=5)
    assert counts[4] == 0 and counts[:4].min() > 8


# --- Top-k, top-p, min-p ----------------------------------------------------------------------------------------------

SHARES = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)


def truncated(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """What kernel and reference leave."""
    rows = len(logits)
    arguments = (logits, torch.full((rows,), temperature, dtype=torch.float64), torch.full((rows,), top_k),
                 *(torch.full((rows,), share, dtype=torch.float64) for share in (top_p, min_p)))
    return KERNELS.truncate(*arguments), REFERENCE.truncate(*arguments)


def assert_left(actual: Tensor, expected: Tensor, logits: Tensor, temperature: float) -> None:
    """The same tokens but for one at the border of a share: float32 may see it on the other side."""
    is_kept = actual != -INFINITY
    assert torch.equal(actual[is_kept], logits[is_kept]) and is_kept.any(dim=1).all()
    weights = ((logits.double() - logits.amax(dim=1, keepdim=True)) / temperature).softmax(dim=1)
    for row in range(len(logits)):
        differing = (is_kept[row] != (expected[row] != -INFINITY)).nonzero().flatten()
        assert len(differing) <= 1 or weights[row][differing].sum() < 1e-5


@given(rows=st.integers(1, 2), vocab=st.integers(1, 60) | st.just(300), spread=st.sampled_from([0.3, 3.0, 30.0]),
       are_whole=st.booleans(), temperature=st.floats(0.05, 5), top_k=st.integers(1, 70) | st.just(10**6),
       top_p=SHARES, min_p=SHARES, seed=SEEDS)
@quick(40)
def test_truncation_leaves_what_the_reference_does(rows: int, vocab: int, spread: float, are_whole: bool,
                                                   temperature: float, top_k: int, top_p: float, min_p: float,
                                                   seed: int) -> None:
    """Whole logits are often equal: then the first ids count."""
    logits = spread * numbers(rows, vocab, seed=seed)
    logits = logits.round() if are_whole else logits
    actual, expected = truncated(logits, temperature, top_k, top_p, min_p)
    assert_left(actual, expected, logits, temperature)


@pytest.mark.parametrize("top_k", [1, 2, 7, MOST_COLUMNS, MOST_COLUMNS + 3, MOST_COLUMNS + 4])
def test_top_k_of_a_vocabulary_of_several_tiles(top_k: int) -> None:
    logits = numbers(1, MOST_COLUMNS + 4, seed=1)
    actual, expected = truncated(logits, 1.0, top_k, 1.0, 0.0)
    assert (actual != -INFINITY).sum() == top_k and torch.equal(actual, expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (10**6, 0.4), (7, 0.5)])
def test_of_equal_logits_the_first_stay(top_k: int, top_p: float) -> None:
    logits = torch.zeros(1, MOST_COLUMNS + 10)
    actual, expected = truncated(logits, 1.0, top_k, top_p, 0.0)
    kept = int((expected != -INFINITY).sum())
    assert abs(int((actual != -INFINITY).sum()) - kept) <= (top_k > 10)
    assert torch.equal(actual[0, :kept - 1], logits[0, :kept - 1]) and actual[0, kept + 1:].max() == -INFINITY


def test_masked_tokens_stay_masked_and_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-INFINITY, -0.0, 0.0, -INFINITY, -1.0]])
    for top_k, kept in ((1, 1), (2, 2), (3, 3), (4, 3)):
        actual, expected = truncated(logits, 1.0, top_k, 1.0, 0.0)
        assert torch.equal(actual, expected) and int(actual.isfinite().sum()) == kept


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e300])
def test_truncation_at_any_temperature(temperature: float) -> None:
    logits = numbers(3, 50, seed=1)
    actual, expected = truncated(logits, temperature, 20, 0.9, 0.1)
    assert abs((actual != -INFINITY).sum() - (expected != -INFINITY).sum()) <= 3
    assert (actual.argmax(dim=1) == logits.argmax(dim=1)).all()


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_truncation_of_an_unsound_row_ends_and_spares_the_others(bad: float) -> None:
    logits = numbers(3, 70, seed=1)
    logits[1] = bad
    actual, expected = truncated(logits, 1.0, 9, 0.9, 0.0)
    assert_left(actual[::2], expected[::2], logits[::2], 1.0)


# --- The sampler over these kernels -----------------------------------------------------------------------------------

MIXED = [SamplingParams(max_tokens=1, **options) for options in (
    {}, {"top_k": 1}, {"top_k": 7, "temperature": 0.7}, {"top_p": 0.8}, {"top_p": 0.0}, {"top_k": 10**6, "top_p": 1.0},
    {"min_p": 0.1, "temperature": 2.0}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}, {"temperature": 0.0},
    {"top_k": 3, "allowed_token_ids": (2, 5, 8, 11)}, {"top_p": 0.5, "logit_bias": {3: 2.0}})]  # type: ignore[arg-type]
"""Requests as they come together in a step."""


@pytest.mark.parametrize(("vocab", "are_whole"), [(60, False), (60, True), (MOST_COLUMNS + 1, True)])
def test_mixed_requests_draw_the_same_tokens_as_with_the_reference(vocab: int, are_whole: bool) -> None:
    """Whole logits are often equal, as those of a head in bfloat16 are."""
    logits = 3 * numbers(len(MIXED), vocab, seed=vocab)
    logits = logits.round() if are_whole else logits
    stands = [Stand(replace(params, seed=seed), 4, 4, []) for seed, params in enumerate(MIXED)]
    actual, expected = (answers(choose(logits, stands, kernels), stands) for kernels in (KERNELS, REFERENCE))
    assert actual == expected and all(isinstance(answer, Sampled) for answer in actual)
    assert len(set(actual)) > len(MIXED) / 2, "the draws differ from each other"
