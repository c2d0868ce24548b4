"""`servekit plan` as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from servekit.config.compose import compose_plan

LOAD = ["model=llama-3-8b", "gpu=h200", "rate_per_s=40", "prompt_tokens=1000", "output_tokens=200"]
PAIRS = ["model=llama-2-70b", "gpu=h100", "tensor_parallel=2", "weight_precision=fp8", "rate_per_s=1000",
         "prompt_tokens=200", "output_tokens=200"]


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = "import sys; from servekit.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", program, "plan", *argv], capture_output=True, text=True, timeout=60,
                          cwd=cwd)


def ask_json(*argv: str) -> dict[str, Any]:
    result = run(*argv, "format=json")
    assert (result.returncode, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_plan() -> None:
    result = run(*LOAD, "tpot_s=0.05", "ttft_s=1")
    assert (result.returncode, result.stderr) == (0, "")
    out = result.stdout
    for fragment in ("llama-3-8b", "H200", "TPOT *", "* TPOT binds", "at utilisation 0.54", "3 replicas = 3 GPUs",
                     "4 replicas = 4 GPUs with 1 to spare", "assume", "55% of the dense arithmetic", "percentiles"):
        assert fragment in out, fragment
    assert "wrong" not in out and "warning" not in out and "…" not in out


def test_what_replicas_hold() -> None:
    out = run(*LOAD, "rate_per_s=null", "replicas=1", "spare_replicas=0").stdout
    assert "1 replica = 1 GPU for 17.59 req/s at utilisation 0.70; 25.13 req/s is the most they carry" in out
    assert "to spare" not in out


def test_a_tight_plan_is_warned_of() -> None:
    out = run(*LOAD, "replicas=2").stdout
    assert "warning: utilisation 0.80 exceeds max_utilization=0.7" in out


def test_claims_are_judged() -> None:
    result = run(*PAIRS, "claim.tokens_per_s=3000", "claim.concurrency=20", "claim.kv_bytes=100e9", "claim.gpus=50")
    assert result.returncode == 0
    wrong = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("wrong")]
    assert wrong == ["claim.tokens_per_s=3,000,", "claim.concurrency=20,", "claim.kv_bytes=100,000,000,000,",
                     "claim.gpus=50,"]


def test_json_says_the_same() -> None:
    found = ask_json(*LOAD, "tpot_s=0.05", "claim.gpus=2")
    assert (found["replicas"], found["gpus"], found["gpus_with_spares"], found["binding"]) == (3, 3, 4, "tpot")
    assert [bound["limit"] for bound in found["bounds"]] == ["throughput", "prefill", "kv", "tpot"]
    assert found["bounds"][0]["point"] is None and found["bounds"][3]["point"]["tpot_s"] == pytest.approx(0.05)
    assert found["utilization"] == pytest.approx(40 / found["highest_rate_per_s"])
    assert found["config"]["gpu"] == "h200" and found["claims"][0]["holds"] is False
    assert found["replica_at_rate"]["num_in_flight"] == pytest.approx(
        40 / 3 * found["replica_at_rate"]["e2e_s"], rel=1e-4)


def test_a_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text("model: llama-3-8b\ngpu: h200\nprompt_tokens: 1000\noutput_tokens: 200\n")
    result = run("load.yaml", "rate_per_s=1", "memory.headroom=0.2", cwd=tmp_path)
    assert result.returncode == 0 and "90% of the memory less 20%" in result.stdout


def test_an_environment_for_serve_is_no_obstacle() -> None:
    environ = {"SERVEKIT__MEMORY__NUM_KV_BLOCKS": "7", "SERVEKIT__SCHEDULER__MAX_NUM_SEQS": "7",
               "SERVEKIT__MEMORY__HEADROOM": "0.2"}
    assert compose_plan(LOAD, environ=environ).config.memory.headroom == 0.2


@pytest.mark.parametrize(("argv", "fragments"), [
    ([*LOAD, "tpot_s=0.002"], ["tpot_s=0.002", "reading the weights once"]),
    ([*LOAD, "replicas=1"], ["replicas=1", "the queue grows", "set replicas=3"]),
    ([*LOAD, "gpu=h300"], ["gpu=h300", "a100, h100, h200, b200"]),
    ([*LOAD, "model=gpt-5"], ["model=gpt-5", "llama-3-8b"]),
    ([*LOAD, "model=llama-2-70b"], ["the weights take 138.0 GB", "114.2 GB"]),
    ([*LOAD, "rate_per_s=null"], ["rate_per_s", "replicas"]),
    ([*LOAD, "prompt_tokens=many"], ["prompt_tokens=many", "a number"]),
    ([*LOAD, "prompt_token=5"], ["did you mean prompt_tokens?"]),
    ([word for word in LOAD if not word.startswith("prompt")], ["prompt_tokens", "must be given"]),
    ([], ["must be given"]),
])
def test_the_impossible_and_the_wrong(argv: Sequence[str], fragments: list[str]) -> None:
    result = run(*argv)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert [fragment for fragment in fragments if fragment not in result.stderr] == [], result.stderr
