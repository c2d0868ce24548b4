"""`servekit simulate` as a command: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.config.bench import BenchConfig
from servekit.core.plan import BlockCopy, Bound
from servekit.core.request import RequestId
from servekit.engine.step_log import ItemRecord, Opened, Planned, StepLogFile, Updated
from servekit.load.records import RequestRecord
from servekit.load.report import Run, document_head

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = ("num_requests=40", "arrival.rate_per_s=20", "seed=5")


def simulate(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run([sys.executable, "-m", "servekit", "simulate", *words], capture_output=True, text=True,
                              timeout=300)
    assert finished.returncode == status, finished.stderr
    return finished


def refusal(*words: str) -> str:
    """The one line that a refused command prints."""
    finished = simulate(*words, status=2)
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run with everything it can write printed, and the folder of its files."""
    folder = tmp_path_factory.mktemp("run")
    files = (f"out={folder}/result.json", f"perfetto={folder}/trace.json", f"timeline={folder}/page.html")
    return simulate(*SMALL, "slo.ttft_s=0.5", *files).stdout, folder


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_it_prints_the_table_of_bench(good_run: tuple[str, Path]) -> None:
    printed, _ = good_run
    assert re.search(r"^simulated: llama-3-8b on 1 x h100, [\d,]+ steps over .* s in .* s, seed 5$", printed, re.M)
    assert "40 requests measured: 40 succeeded, 0 failed" in printed
    for words in ("latency in ms", "TTFT", "TPOT", "longest ITL", "throughput:", "goodput:", "Little's law:"):
        assert words in printed
    assert "generator lag" not in printed


def test_the_result_has_the_fields_of_bench(good_run: tuple[str, Path]) -> None:
    result = document(good_run[1])
    assert list(result) == [*_head_fields(), "requests"]
    assert set(result["requests"][0]) == {*RequestRecord.__slots__, "first_token_s", "ttft_s", "tpot_s", "max_itl_s",
                                          "e2e_s", "meets_slo"}
    assert result["seed"] == result["config"]["seed"] == 5
    assert sorted(request["index"] for request in result["requests"]) == list(range(40))


def _head_fields() -> list[str]:
    """Those of a document about a benchmark, whatever is in it."""
    empty = Run("", BenchConfig(), 0, "", False, None, None, None)  # type: ignore[arg-type]
    return list(document_head(empty))


def test_the_figures_are_those_of_the_rows(good_run: tuple[str, Path]) -> None:
    result = document(good_run[1])
    first = [request["ttft_s"] for request in result["requests"]]
    latencies = result["summary"]["latencies"]
    assert latencies["ttft_s"]["mean"] == pytest.approx(sum(first) / len(first))
    assert latencies["ttft_s"]["percentiles"]["p50"] == sorted(first)[19]
    tokens = sum(request["output_tokens"] for request in result["requests"])
    throughput = result["summary"]["throughput"]
    assert throughput["output_tokens_per_s"] * throughput["window_s"] == pytest.approx(tokens)
    assert all(request["meets_slo"] == (request["ttft_s"] <= 0.5) for request in result["requests"])


def test_equal_seeds_give_equal_requests(good_run: tuple[str, Path], tmp_path: Path) -> None:
    simulate(*SMALL, f"out={tmp_path}/result.json")
    again, other = document(tmp_path), document(good_run[1])
    for request in (*again["requests"], *other["requests"]):
        del request["meets_slo"]
    assert again["requests"] == other["requests"]


def test_the_perfetto_trace_is_one(good_run: tuple[str, Path]) -> None:
    trace = json.loads((good_run[1] / "trace.json").read_text())
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "engine", "requests"}
    assert sum(event["name"] == "thread_name" for event in trace["traceEvents"]) == 40
    for event in trace["traceEvents"]:
        assert event["ph"] == "M" or event["ts"] >= 0


def test_the_page_is_drawn(good_run: tuple[str, Path]) -> None:
    """A browser fills the canvas with the colours of what the requests did, and reports no error."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="install it with pip install playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program,
                                             args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        errors: list[object] = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto((good_run[1] / "page.html").as_uri())
        drawn = set(page.evaluate("""() => {
            const view = document.getElementById("view"), seen = new Set();
            const pixels = view.getContext("2d").getImageData(0, 0, view.width, view.height).data;
            for (let i = 0; i < pixels.length; i += 4)
                if (pixels[i + 3] === 255)
                    seen.add("#" + [0, 1, 2].map(j => pixels[i + j].toString(16).padStart(2, "0")).join(""));
            return [...seen];
        }"""))
        browser.close()
    assert not errors
    assert drawn >= {"#e08b3e", "#3f7fbf"}, "prompts and decodes"


def test_an_engine_can_be_learnt_from_its_log(tmp_path: Path) -> None:
    """Steps of 20 ms, whatever they compute: so one token after the first takes 20 ms."""
    with (tmp_path / "steps.jsonl").open("wb") as file:
        log = StepLogFile(file, Opened({}, 64, 0, 16, 1024))
        for number in range(50):
            at_s, name = 1.0 + 0.02 * number, RequestId("a")
            items = (ItemRecord(name, 0, 2 ** (1 + number % 10)), ItemRecord(RequestId("b"), number, 1))
            log._write(Planned(at_s, items[number % 2:], Bound.nothing_waiting, swap_in=(BlockCopy(0, 0),)))
            log._write(Updated(at_s + 0.0199, at_s, {name: 1}))
    finished = simulate("step_time=fitted", f"step_time.log={tmp_path}/steps.jsonl", "workload=fixed",
                        "workload.prompt_tokens=100", "workload.output_tokens=5", "arrival=closed",
                        "arrival.concurrency=1", "num_requests=5", f"out={tmp_path}/result.json")
    assert "50 steps" in finished.stdout
    result = document(tmp_path)
    assert result["server"]["num_kv_blocks"] == 64
    assert result["server"]["max_model_len"] == 1024
    assert result["summary"]["latencies"]["tpot_s"]["mean"] == pytest.approx(0.02, rel=0.02)


def test_a_run_without_success_has_another_status() -> None:
    """Every request's time is over before its first token."""
    finished = simulate("num_requests=3", "arrival=closed", "timeout_s=0.001", status=1)
    assert "0 succeeded, 3 failed" in finished.stdout
    assert "request_timeout" in finished.stdout


# --- refusals ---------------------------------------------------------------------------------------------------------

def test_a_trace_line_that_cannot_be_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                     "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,many,109\n")
    line = refusal("workload=azure", f"workload.path={trace}", "arrival=trace")
    assert f"{trace}:3" in line or "line 3" in line
    assert "many" in line


@pytest.mark.parametrize(("word", "fragments"), [
    ("step_time.gpu=h900", ["h900", "a100", "h100", "h200", "b200"]),
    ("step_time.model=llama-9", ["llama-9", "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b"]),
    ("step_time.model=llama-2-70b", ["llama-2-70b", "138.0 GB", "tensor_parallel"]),
    ("memory.max_model_len=100000000", ["memory.max_model_len=100000000", "the KV cache holds"]),
    ("scheduler/prefill=whole", ["scheduler.max_step_tokens=512", "8192"])])
def test_engines_that_cannot_be(word: str, fragments: list[str]) -> None:
    line = refusal(word)
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("words", [
    ("workload=fixed", "workload.prompt_tokens=9000"),
    ("workload=fixed", "workload.prompt_tokens=8000", "workload.output_tokens=193"),
    ("memory.num_kv_blocks=8",)])
def test_a_workload_that_the_engine_can_never_serve(words: tuple[str, ...]) -> None:
    line = refusal(*words, "num_requests=100")
    assert re.search(r"request \d+ of the workload has \d+ prompt and \d+ output tokens", line)
    assert "memory.max_model_len=" in line


def test_the_last_request_that_fits_is_served() -> None:
    simulate("workload=fixed", "workload.prompt_tokens=8000", "workload.output_tokens=192", "num_requests=2")


@pytest.mark.parametrize("key", ["out", "perfetto", "timeline"])
def test_a_file_that_exists(key: str, tmp_path: Path) -> None:
    path = tmp_path / "here"
    path.write_text("mine")
    line = refusal(*SMALL, f"{key}={path}")
    assert f"{key}={path}" in line and "exists already" in line and "overwrite=true" in line
    assert path.read_text() == "mine"
    simulate(*SMALL, f"{key}={path}", "overwrite=true")
    assert path.read_text() != "mine"


def test_two_files_that_are_one(tmp_path: Path) -> None:
    line = refusal(*SMALL, f"out={tmp_path}/a", f"timeline={tmp_path}/./a")
    assert "timeline=" in line and "is the file of out too" in line


@pytest.mark.parametrize("content", [None, "not a log\n"])
def test_a_log_that_is_none(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    if content is not None:
        path.write_text(content)
    line = refusal("step_time=fitted", f"step_time.log={path}")
    assert f"step_time.log={path}" in line and "engine.step_log=FILE" in line
