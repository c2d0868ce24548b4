"""How the pieces of an answer become tokens with times."""

from __future__ import annotations

import pytest

from servekit.load.metrics import itl_s, tpot_s, ttft_s
from servekit.load.records import ObservationLog, RequestRecord
from servekit.load.target import Failure, FailureKind, Observation
from servekit.load.workload import WorkloadRequest


def record(*observations: Observation) -> RequestRecord:
    """The record of a request due at 100 s, 1 s into the run, and answered by these."""
    log = ObservationLog()
    for seen in observations:
        log.note(seen)
    return log.record(WorkloadRequest(7, [1, 2, 3], 5), start_s=99.0, intended_s=100.0, sent_s=100.5, ended_s=104.0,
                      is_warmup=False, failure=log.missing)


def test_times_are_since_the_start_of_the_run() -> None:
    measured = record(Observation(102.0, True, 1), Observation(103.0, True, 2, 3, 0, "stop"))
    assert (measured.intended_s, measured.sent_s, measured.ended_s) == (1.0, 1.5, 5.0)
    assert list(measured.chunk_times_s) == [3.0, 4.0]
    assert measured.lag_s == 0.5


def test_opening_piece_with_the_role_is_no_token() -> None:
    measured = record(Observation(100.0, False), Observation(101.0, True),
                      Observation(101.0, False, 1, 3, None, "stop"))
    assert ttft_s(measured.timeline) == 1.0


def test_opening_piece_that_counts_zero_tokens_is_none() -> None:
    measured = record(Observation(100.0, False, 0), Observation(101.0, True, 1, finish_reason="stop"))
    assert ttft_s(measured.timeline) == 1.0


def test_counts_in_every_chunk_give_the_tokens_of_each() -> None:
    measured = record(Observation(101.0, True, 4), Observation(101.04, True, 8), Observation(101.08, True, 12, 3, 1),
                      Observation(101.08, False, 12, finish_reason="length"))
    assert list(measured.chunk_tokens) == [4, 4, 4]
    assert tpot_s(measured.timeline) == pytest.approx(0.08 / 11)
    assert itl_s(measured.timeline)[3:] == pytest.approx([0.01] * 8)


def test_a_token_without_text_is_a_token_if_it_is_counted() -> None:
    measured = record(Observation(101.0, False, 1), Observation(102.0, True, 2, finish_reason="stop"))
    assert list(measured.chunk_tokens) == [1, 1]
    assert ttft_s(measured.timeline) == 1.0


def test_text_that_was_held_back_is_not_another_token() -> None:
    measured = record(Observation(101.0, True, 2), Observation(102.0, True, 2, finish_reason="stop"))
    assert list(measured.chunk_tokens) == [2]


def test_without_counts_the_total_is_shared_by_the_chunks() -> None:
    chunks = [Observation(101.0 + i, True) for i in range(3)]
    measured = record(*chunks, Observation(105.0, False, None, finish_reason="stop"),
                      Observation(105.0, False, 12, 3, 0))
    assert list(measured.chunk_tokens) == [4, 4, 4]
    assert list(measured.chunk_times_s) == [2.0, 3.0, 4.0], "the last total is no chunk"


@pytest.mark.parametrize(("total", "tokens"), [(4, [1, 1, 2]), (3, [1, 1, 1]), (2, [1, 0, 1]), (None, [1, 1, 1])])
def test_a_total_that_does_not_divide(total: int | None, tokens: list[int]) -> None:
    chunks = [Observation(101.0 + i, True) for i in range(3)]
    assert list(record(*chunks, Observation(105.0, False, total, finish_reason="stop")).chunk_tokens) == tokens


def test_usage_is_kept_as_the_server_says_it() -> None:
    measured = record(Observation(101.0, True, 1, 17, 16, "stop"))
    assert (measured.prompt_tokens, measured.output_tokens, measured.cached_tokens) == (17, 1, 16)
    assert measured.num_prompt_tokens == 17
    assert record(Observation(101.0, True, finish_reason="stop")).num_prompt_tokens == 3, "as many as were sent"


@pytest.mark.parametrize("observations", [
    [], [Observation(101.0, True, 1)], [Observation(101.0, False, 0, finish_reason="stop")],
    [Observation(101.0, True, 1, finish_reason="abort")]])
def test_an_answer_that_looks_clean_but_is_not_has_failed(observations: list[Observation]) -> None:
    failed = record(*observations)
    assert isinstance(failed.failure, Failure)
    assert failed.failure.kind is FailureKind.incomplete
    with pytest.raises(ValueError, match="no timeline"):
        _ = failed.timeline
