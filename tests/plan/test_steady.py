"""One replica in equilibrium: Little's law in all its places, and what it does at the ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.plan.steady import MOST_DECODES, Lengths, SteadyReplica
from servekit.sim.step_time import PromptChunk, StepShape

DECODES = st.floats(0.001, 1e5)
LENGTHS = st.builds(Lengths, st.floats(1, 20_000), st.floats(2, 5000))


class StraightLine:
    """A step takes 10 ms and 10 us for each token, whatever it reads."""

    def step_s(self, shape: StepShape) -> float:
        return 0.010 + 0.00001 * shape.num_tokens


def replica(lengths: Lengths, prefill_batch_tokens: float = 8192) -> SteadyReplica:
    return SteadyReplica(StraightLine(), lengths, prefill_batch_tokens, block_size_tokens=16)


def test_an_equilibrium_by_hand() -> None:
    point = replica(Lengths(1000, 101), prefill_batch_tokens=1000).at(100)
    prefill_s = 0.010 + 0.01
    step_s = 0.010 + 0.001
    assert point.tpot_s == pytest.approx(step_s + prefill_s)  # 100 decodes of 100 steps each: one ends at every step
    assert point.requests_per_s == pytest.approx(1 / (step_s + prefill_s))
    assert point.prefill_share == pytest.approx(prefill_s / (step_s + prefill_s))
    waiting_s = point.prefill_share * prefill_s / (2 * (1 - point.prefill_share))
    assert point.ttft_s == pytest.approx(step_s / 2 + waiting_s + prefill_s)
    assert point.e2e_s == pytest.approx(point.ttft_s + 100 * point.tpot_s)
    assert point.kv_tokens == pytest.approx(100 * 1104 + point.requests_per_s * prefill_s * 1008)


def test_prompts_share_the_fixed_cost_of_a_step_as_far_as_they_fit() -> None:
    assert replica(Lengths(1000, 2), 8192).prefill_s == pytest.approx(0.010 / 8 + 0.01)
    assert replica(Lengths(1000, 2), 8192).lone_prefill_s == pytest.approx(0.010 + 0.01)


class Recording(StraightLine):
    """Keeps the shapes that it was asked about."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def step_s(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return super().step_s(shape)


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    """Each reads what the ones before it computed, and only the last samples."""
    step_time = Recording()
    steady = SteadyReplica(step_time, Lengths(1000, 2), prefill_batch_tokens=400, block_size_tokens=16)
    assert steady.prefill_s == pytest.approx(3 * 0.010 + 0.01)
    assert [(*shape.chunks, shape.num_sampled) for shape in step_time.shapes] == [
        (PromptChunk(400, 0), 0), (PromptChunk(400, 400), 0), (PromptChunk(200, 800), 1)]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, decodes=DECODES)
def test_littles_law(lengths: Lengths, decodes: float) -> None:
    """Of the requests that decode, and of all in flight; and the replica's time adds up to all of it."""
    steady = replica(lengths)
    point = steady.at(decodes)
    decode_s = lengths.decode_steps * point.tpot_s
    assert point.num_decodes == pytest.approx(point.requests_per_s * decode_s)
    assert point.num_in_flight == pytest.approx(point.num_decodes + point.requests_per_s * point.ttft_s)
    step_share = point.requests_per_s * lengths.decode_steps / decodes * steady.decode_step_s(max(1, decodes))
    assert step_share + point.prefill_share == pytest.approx(1)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, decodes=DECODES, factor=st.floats(1.001, 10))
def test_more_decodes_at_once_carry_more_and_wait_longer(lengths: Lengths, decodes: float, factor: float) -> None:
    less, more = replica(lengths).at(decodes), replica(lengths).at(decodes * factor)
    for name in ("requests_per_s", "tpot_s", "ttft_s", "kv_tokens", "prefill_share", "num_in_flight"):
        assert getattr(more, name) >= getattr(less, name) * (1 - 1e-9), name


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, decodes=DECODES)
def test_the_rate_leads_back_to_the_equilibrium(lengths: Lengths, decodes: float) -> None:
    steady = replica(lengths)
    assert steady.at_rate(steady.at(decodes).requests_per_s).num_decodes == pytest.approx(decodes, rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_the_highest_rate_has_no_time_left(lengths: Lengths) -> None:
    steady = replica(lengths)
    assert steady.highest_rate == pytest.approx(1 / (lengths.decode_steps * 0.00001 + steady.prefill_s), rel=1e-3)
    assert steady.highest(lambda point: True).num_decodes == MOST_DECODES
