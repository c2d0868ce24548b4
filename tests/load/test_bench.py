"""`servekit bench` from configuration to exit status, table and result file."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from load.mock_openai import Answer, Exchange, MockOpenAI, one_token_a_chunk, text
from servekit.config.bench import BenchConfig
from servekit.config.compose import compose_bench
from servekit.config.errors import ConfigError
from servekit.load.bench import bench, run
from servekit.load.report import Run

FAST = ("workload=fixed", "workload.prompt_tokens=8", "workload.output_tokens=4", "arrival.rate_per_s=500",
        "num_requests=20")


def bench_with(answer: Answer, *overrides: str) -> tuple[int, MockOpenAI]:
    """Exit status of a run against a server that answers so, and the server."""
    with MockOpenAI(answer) as server:
        return run(compose_bench([f"url={server.url}", *FAST, *overrides])), server


def result_of(tmp_path: Path, answer: Answer, *overrides: str) -> dict[str, Any]:
    bench_with(answer, f"out={tmp_path / 'result.json'}", *overrides)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


async def _refuse(exchange: Exchange) -> web.StreamResponse:
    return web.json_response({"error": {"message": "queue is full"}}, status=503)


async def _every_third_fails(exchange: Exchange) -> web.StreamResponse:
    return await (_refuse if exchange.index % 3 == 2 else one_token_a_chunk)(exchange)


def test_result_file_holds_everything(tmp_path: Path) -> None:
    result = result_of(tmp_path, one_token_a_chunk, "seed=7", "slo.e2e_s=60")
    assert set(result) == {"format_version", "started_at", "is_interrupted", "seed", "config", "config_hash", "client",
                           "server", "summary", "requests"}
    assert result["seed"] == 7
    assert result["config"]["arrival.rate_per_s"] == 500
    assert result["config"]["workload.kind"] == "fixed"
    assert result["server"] == {"model": "mock", "version": {"version": "1.2.3"}, "server_info": None}
    assert result["client"]["servekit"]
    summary = result["summary"]
    assert summary["counts"] == {"warmup": 2, "succeeded": 20, "failed": 0, "interrupted": 0, "short": 0,
                                 "failures": {}}
    assert set(summary["latencies"]) == {"ttft_s", "tpot_s", "itl_s", "max_itl_s", "e2e_s"}
    assert set(summary["latencies"]["ttft_s"]["percentiles"]) == {"p50", "p90", "p99", "p99.9"}
    assert summary["latencies"]["ttft_s"]["too_few_samples_for"] == ["p90", "p99", "p99.9"]
    assert summary["goodput"]["share"] == 1.0
    assert summary["lag_s"]["count"] == 20


def test_result_file_has_one_row_a_request(tmp_path: Path) -> None:
    rows = result_of(tmp_path, _every_third_fails, "slo.e2e_s=60")["requests"]
    assert [row["index"] for row in rows] == list(range(22))
    assert [row["is_warmup"] for row in rows] == [True] * 2 + [False] * 20
    good = [row for row in rows if row["failure"] is None]
    bad = [row for row in rows if row["failure"] is not None]
    assert len(bad) == 7
    for row in good:
        assert row["intended_s"] <= row["sent_s"] <= row["first_token_s"] == row["chunk_times_s"][0] <= row["ended_s"]
        assert row["ttft_s"] == pytest.approx(row["first_token_s"] - row["intended_s"])
        assert (row["chunk_tokens"], row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (
            [1, 1, 1, 1], 8, 4, 3)
        assert row["meets_slo"] is True
    for row in bad:
        assert row["failure"] == {"kind": "status", "text": "queue is full", "status": 503}
        assert (row["ttft_s"], row["e2e_s"], row["meets_slo"]) == (None, None, False)


def test_tenants_classes_and_predictions_are_sent_and_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    overrides = ["workload.num_tenants=2", "workload.priorities={0:1,3:1}", "workload.prediction_sigma=0", "seed=1",
                 "warmup_requests=0"]
    _, server = bench_with(one_token_a_chunk, *overrides, f"out={path}")
    assert {body["user"] for body in server.bodies} == {"tenant-0", "tenant-1"}
    assert {body["priority"] for body in server.bodies} == {0, 3}
    assert {body["predicted_output_tokens"] for body in server.bodies} == {4}
    result = json.loads(path.read_text())
    summary, rows = result["summary"], result["requests"]
    assert set(summary["tenants"]) == {"tenant-0", "tenant-1"}
    assert set(summary["classes"]) == {"0", "3"}
    for name, group in summary["tenants"].items():
        assert group["succeeded"] == sum(row["tenant"] == name for row in rows)
        assert group["output_tokens"] == 4 * group["succeeded"]
    assert {row["priority"] for row in rows} == {0, 3}
    _, server = bench_with(one_token_a_chunk, *overrides, "tenant_header=X-Tenant")
    assert {headers["X-Tenant"] for headers in server.headers} == {"tenant-0", "tenant-1"}
    assert not any("user" in body for body in server.bodies)


def test_a_step_log_is_the_servers_setting() -> None:
    with pytest.raises(ConfigError, match=r"step_log=x: there is no such key; servekit serve has engine\.step_log"):
        compose_bench(["step_log=x"])


def test_prompts_are_fresh_unless_a_seed_is_given() -> None:
    def prompts(*overrides: str) -> list[list[int]]:
        return [body["prompt"] for body in bench_with(one_token_a_chunk, *overrides)[1].bodies]

    assert sorted(prompts("seed=3")) == sorted(prompts("seed=3"))
    assert not {tuple(p) for p in prompts()} & {tuple(p) for p in prompts()}


def test_closed_loop_and_chat(tmp_path: Path) -> None:
    async def answer(exchange: Exchange) -> web.StreamResponse:
        await exchange.send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await exchange.send({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
        return await exchange.done()

    with MockOpenAI(answer) as server:
        status = run(compose_bench([f"url={server.url}", "endpoint=chat", "arrival=closed", "arrival.concurrency=3",
                                    "num_requests=9", f"out={tmp_path / 'result.json'}"]))
    summary = json.loads((tmp_path / "result.json").read_text())["summary"]
    assert status == 0
    assert summary["counts"]["succeeded"] == 9
    assert summary["counts"]["short"] == 9, "one token where more were asked for"
    assert summary["lag_s"] is None


@pytest.mark.parametrize(("answer", "status"), [(one_token_a_chunk, 0), (_every_third_fails, 0), (_refuse, 1)])
def test_exit_status_is_1_when_every_request_failed(answer: Answer, status: int) -> None:
    assert bench_with(answer)[0] == status


def test_table_says_what_was_measured_and_what_to_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    bench_with(_every_third_fails, "slo.ttft_s=60", "seed=5")
    out, err = capsys.readouterr()
    for part in ("mock at http", "seed 5", "20 requests measured: 13 succeeded, 7 failed", "2 for warm-up", "TTFT",
                 "TPOT", "ITL", "E2E", "generator lag", "p99.9", "p99 needs 1,000 samples", "output tok/s",
                 "goodput: 65.0%", "failed 7 x status 503: queue is full"):
        assert part in out
    assert "seed 5" in err


def test_existing_file_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    out.write_text("precious")
    with MockOpenAI() as server:
        with pytest.raises(ConfigError, match=r"exists already.*overwrite=true"):
            run(compose_bench([f"url={server.url}", *FAST, f"out={out}"]))
        assert out.read_text() == "precious"
        assert server.bodies == [], "refused before any load was sent"
        assert run(compose_bench([f"url={server.url}", *FAST, f"out={out}", "overwrite=true"])) == 0
    assert json.loads(out.read_text())["format_version"] == 1
    assert list(tmp_path.iterdir()) == [out], "nothing else is left behind"


def test_out_in_a_missing_folder_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        run(compose_bench([f"out={tmp_path / 'no' / 'result.json'}"]))


def test_missing_api_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key_env=SOME_KEY: is not set"):
        run(compose_bench(["api_key_env=SOME_KEY"]))


def _azure(tmp_path: Path, *rows: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return f"workload.path={path}"


def test_trace_is_replayed_at_its_own_times(tmp_path: Path) -> None:
    path = _azure(tmp_path, *(f"2023-11-16 18:17:0{i}.0,{10 + i},{i + 1}" for i in range(5)))
    with MockOpenAI() as server:
        run(compose_bench([f"url={server.url}", "workload=azure", path, "arrival=trace", "arrival.rate_scale=50",
                           "warmup_requests=0", f"out={tmp_path / 'result.json'}"]))
    rows = json.loads((tmp_path / "result.json").read_text())["requests"]
    assert [row["intended_s"] for row in rows] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])
    assert [(row["wanted_prompt_tokens"], row["wanted_output_tokens"]) for row in rows] == [
        (10, 1), (11, 2), (12, 3), (13, 4), (14, 5)]


def test_bad_trace_line_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    path = _azure(tmp_path, "2023-11-16 18:17:00,4,1", "2023-11-16 18:17:01,4,1", "2023-11-16 18:17:02,4,x")
    with MockOpenAI() as server:
        with pytest.raises(ConfigError, match=r"trace\.csv:4: "):
            run(compose_bench([f"url={server.url}", "workload=azure", path, "arrival.rate_per_s=500"]))
        assert server.bodies == []
        assert run(compose_bench([f"url={server.url}", "workload=azure", path, "arrival.rate_per_s=500",
                                  "num_requests=1", "warmup_requests=1"])) == 0, "the window ends before it"


def test_trace_without_a_request_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 requests, and warmup_requests=2"):
        run(compose_bench(["workload=azure", _azure(tmp_path, "2023-11-16 18:17:00,4,1")]))


async def _slow(exchange: Exchange) -> web.StreamResponse:
    if exchange.index >= 5:
        await exchange.send(text("a"))
        await asyncio.sleep(60)
    return await one_token_a_chunk(exchange)


def test_ctrl_c_stops_sending_and_again_ends_at_once() -> None:
    def interrupt_twice(server: MockOpenAI, ended: threading.Event) -> None:
        while len(server.bodies) < 10 and not ended.is_set():
            ended.wait(0.01)
        while not ended.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    with MockOpenAI(_slow) as server:
        presser = threading.Thread(target=interrupt_twice, args=(server, ended))
        presser.start()
        try:
            config = compose_bench([f"url={server.url}", *FAST, "arrival.rate_per_s=50", "num_requests=null",
                                    "duration_s=60", "warmup_requests=0"]).config
            finished = asyncio.run(_bench_until_ended(config, ended))
        finally:
            ended.set()
            presser.join()
    assert finished.is_interrupted
    assert finished.summary.counts.succeeded == 5
    assert finished.summary.counts.failed == 0
    assert finished.summary.counts.interrupted >= 5


async def _bench_until_ended(config: BenchConfig, ended: threading.Event) -> Run:
    try:
        return (await bench(config, Console(file=io.StringIO())))[0]
    finally:
        ended.set()
