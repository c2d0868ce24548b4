"""Parts that need no server: log formats, the statistics line, progress, seeds, buckets."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servekit.engine.messages import Breakdown, EngineStats, Loading
from servekit.server.intake import seed_of_choice
from servekit.server.launch import _show
from servekit.server.logs import JsonFormatter, TextFormatter
from servekit.server.metrics import Metrics, counted_from, one_two_five
from servekit.server.progress import LoadingProgress
from servekit.server.throughput import log_throughput, throughput_line


def record(message: str, **facts: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "servekit.x", "msg": message, "levelno": logging.INFO, "levelname": "INFO"})
    if facts:
        made.facts = facts
    return made


def test_text_logs() -> None:
    line = TextFormatter().format(record("hello", n_in=3, finish="stop", tpot_ms=None))
    assert line.endswith(" hello n_in=3 finish=stop")
    warning = logging.makeLogRecord({"msg": "careful", "levelno": logging.WARNING, "levelname": "WARNING"})
    assert TextFormatter().format(warning).endswith(" WARNING careful")


def test_json_logs_are_one_object_a_line() -> None:
    line = JsonFormatter().format(record("two\nlines", request_id="r", n_in=3))
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["message"], fields["level"], fields["request_id"], fields["n_in"]) == ("two\nlines", "INFO", "r", 3)
    try:
        raise ValueError("oops")
    except ValueError as error:
        failed = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    assert "oops" in json.loads(JsonFormatter().format(failed))["traceback"]


def test_the_statistics_line() -> None:
    last = EngineStats(prompt_tokens_total=100, generation_tokens_total=10, prefix_queries_total=50)
    now = EngineStats(num_running=3, num_waiting=1, kv_blocks_used=1, kv_blocks_total=4, prompt_tokens_total=300,
                      generation_tokens_total=60, prefix_queries_total=150, cached_tokens_total=25, preemptions_total=2)
    assert throughput_line(last, now, 10.0) == (
        "prompt 20.0 tok/s, output 5.0 tok/s, running 3, waiting 1, KV 25%, prefix hits 25%, preempted 2")
    swapped = dataclasses.replace(now, swapped_out_blocks_total=5, swapped_in_blocks_total=3)
    assert throughput_line(now, swapped, 10.0).endswith("KV 25%, swapped 5 blocks out and 3 in")
    assert throughput_line(now, now, 10.0) == "prompt 0.0 tok/s, output 0.0 tok/s, running 3, waiting 1, KV 25%"


def test_statistics_are_silent_when_idle_and_survive_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    busy = EngineStats(num_steps_total=9, generation_tokens_total=9)
    restarted = EngineStats(num_steps_total=20, generation_tokens_total=4)
    readings = itertools.chain([EngineStats(), EngineStats(), busy, busy], itertools.repeat(restarted))

    async def watch() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await log_throughput(lambda: next(readings), 0.01)

    asyncio.run(watch())
    assert [message.partition(" tok/s, running")[0] for message in caplog.messages] == [
        "prompt 0.0 tok/s, output 900.0", "prompt 0.0 tok/s, output 400.0"]


GROWING = ["num_steps_total", "prompt_tokens_total", "cached_tokens_total", "prefix_queries_total",
           "recomputed_tokens_total", "generation_tokens_total", "preemptions_total", "swapped_out_blocks_total",
           "swapped_in_blocks_total", "schedule_s_total", "execute_s_total", "update_s_total"]


@pytest.mark.parametrize("name", GROWING)
def test_a_total_that_fell_belongs_to_another_engine(name: str) -> None:
    last = EngineStats(**dict.fromkeys(GROWING, 5), breakdown=Breakdown(bounds={"tokens": 5}))
    grown = EngineStats(**dict.fromkeys(GROWING, 6), breakdown=Breakdown(bounds={"tokens": 6}))
    assert counted_from(last, grown) is last
    assert counted_from(last, last) is last
    assert counted_from(last, dataclasses.replace(grown, **{name: 4})) == EngineStats()
    assert counted_from(last, dataclasses.replace(grown, breakdown=Breakdown(bounds={"sequences": 9}))) == EngineStats()
    assert counted_from(EngineStats(), EngineStats()) == EngineStats()


class EveryReading(RuleBasedStateMachine):
    """Engines that work and die; the counters of the server know what all of them have done."""

    def __init__(self) -> None:
        super().__init__()
        self._metrics = Metrics("m", 100)
        self._now = EngineStats()
        self._computed = self._steps = 0

    @rule(num_steps=st.integers(0, 3), num_tokens=st.integers(0, 50))
    def work(self, num_steps: int, num_tokens: int) -> None:
        assert self._now.breakdown is not None
        bounds = {"tokens": self._now.breakdown.bounds.get("tokens", 0) + num_steps}
        self._now = dataclasses.replace(
            self._now, num_steps_total=self._now.num_steps_total + num_steps,
            prompt_tokens_total=self._now.prompt_tokens_total + num_tokens, breakdown=Breakdown(bounds))
        self._computed += num_tokens
        self._steps += num_steps
        self._metrics.observe_step(self._now, None)

    @rule()
    def die(self) -> None:
        self._now = EngineStats()
        self._metrics.observe_step(self._now, None)

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        assert self._value("prompt_tokens_by_source_total", source="local_compute") == self._computed
        assert self._value("steps_total", bound="tokens") == self._steps

    def _value(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(f"servekit:{name}", {"model_name": "m", **labels}) or 0.0


TestEveryReading = EveryReading.TestCase
TestEveryReading.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_steps_are_counted_by_how_they_were_computed() -> None:
    metrics = Metrics("m", 100)
    for executions in ({"eager": 1}, {"eager": 2, "graph_8": 5}):
        metrics.observe_step(EngineStats(breakdown=Breakdown(executions=executions)), None)
    body = metrics.exposition("text/plain")[0].decode()
    assert 'servekit:steps_by_execution_total{execution="graph_8",model_name="m"} 5.0' in body
    assert 'servekit:steps_by_execution_total{execution="eager",model_name="m"} 2.0' in body


def test_progress_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told: list[str] = []
    with LoadingProgress(told.append) as progress:
        progress.stage("imports")
        for done in range(0, 101, 10):
            progress.bytes_done("weights", done * 10**6, 100 * 10**6)
        assert told[-1] == "weights 100 %"
        for done in range(9):
            _show(Loading("CUDA graphs", done, 8, "graphs"), progress)
    assert told[-1] == "CUDA graphs 8 of 8"
    assert caplog.messages == ["loading imports", "loading weights: 0.0 of 100.0 MB", "loading CUDA graphs: 0 of 8"]


def test_seeds() -> None:
    assert seed_of_choice(7, 0) == seed_of_choice(7, 0)
    seeds = {seed_of_choice(seed, choice) for seed in (-1, 0, 1, 2**62) for choice in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("limit", "buckets"), [(1, (1,)), (3, (1, 2, 5)), (50, (1, 2, 5, 10, 20, 50))])
def test_buckets(limit: int, buckets: tuple[int, ...]) -> None:
    assert one_two_five(limit) == buckets
