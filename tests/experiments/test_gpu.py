"""The GPU experiment's own reckoning and housekeeping; its parts run on a CPU by `device=cpu`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent.parent / "experiments" / "gpu"
MODULES = ("bench", "checks", "steps", "limits", "operations", "peers", "run")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton exists for Linux alone")


@pytest.fixture(scope="module")
def gpu() -> Iterator[dict[str, ModuleType]]:
    """The experiment's modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: __import__(name) for name in MODULES}
        for name in MODULES:
            sys.modules.pop(name)


def part(name: str, budget_s: float, gpu: dict[str, ModuleType]) -> Any:
    return gpu["run"].PlannedPart(name, name, budget_s)


@pytest.fixture
def run(gpu: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A run of three parts that take as long as they may; what became of them is in the result."""
    now = [0.0]
    parts = tuple(part(name, budget, gpu) for name, budget in (("limits", 10.0), ("one", 40.0), ("two", 40.0)))
    monkeypatch.setattr(gpu["run"], "PARTS", parts)
    monkeypatch.setattr(gpu["run"].time, "monotonic", lambda: now[0])
    rows = {"limits": [{"name": "copy", "bytes_per_s": 1.0}]}

    def pretend(command: list[str], seconds: float) -> str:
        order = json.loads(command[-1])
        now[0] += min(seconds, pretend.takes_s)  # type: ignore[attr-defined]
        assert order["seconds"] < seconds
        Path(order["rows"]).write_text("".join(json.dumps(row) + "\n" for row in rows.get(order["part"], ())))
        return "done"

    monkeypatch.setattr(gpu["run"], "ended", pretend)

    def whole(seconds: float, takes_s: float) -> tuple[bool, dict[str, Any]]:
        pretend.takes_s = takes_s  # type: ignore[attr-defined]
        out = tmp_path / "result.json"
        is_right = gpu["run"].Run(gpu["run"].Options(out, "cpu", seconds, ("one", "two"))).all_parts()
        return is_right, json.loads(out.read_text())["parts"]

    whole.rows = rows  # type: ignore[attr-defined]
    whole.now = now  # type: ignore[attr-defined]
    return whole


def test_without_a_gpu_it_ends_with_one_line(gpu: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu["run"].main([]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("words", "said"), [(["fast"], "fast"), (["device=tpu"], "device=tpu"), (["x=1"], "x"),
                                             (["only=bf17"], "only=bf17")])
def test_a_wrong_word_is_named(gpu: dict[str, ModuleType], words: list[str], said: str,
                               capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu["run"].main(words) == 2
    assert capsys.readouterr().err.startswith(f"{said}:")


def test_the_budgets_fit_in_less_than_eight_minutes(gpu: dict[str, ModuleType]) -> None:
    assert gpu["run"].Options().seconds <= 475
    for one in gpu["run"].PARTS:
        assert callable(getattr(gpu[one.module], one.name))


def test_a_part_without_time_is_skipped_and_said(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    is_right, parts = run(60.0, 1000.0)
    assert is_right and run.now[0] <= 60.0
    assert parts["one"]["seconds"] == 40.0 and parts["two"]["skipped"] == "10 s are left of 60"
    assert "two: skipped" in capsys.readouterr().out


def test_time_that_is_left_over_goes_to_who_comes_next(run: Any) -> None:
    _, parts = run(200.0, 100.0)
    assert [round(found["seconds"]) for found in parts.values()] == [100, 60, 40]
    assert run.now[0] <= 200.0


@pytest.mark.parametrize(("passed", "expected"), [(True, True), (False, False)])
def test_a_kernel_that_differs_is_a_failure(run: Any, passed: bool, expected: bool) -> None:
    run.rows["two"] = [{"name": "norms", "passed": passed}]
    assert run(200.0, 1.0)[0] is expected


def test_a_process_that_hangs_is_ended(gpu: dict[str, ModuleType]) -> None:
    assert gpu["run"].ended([sys.executable, "-c", "import time; time.sleep(60)"], 0.2).startswith("ended after")
    assert gpu["run"].ended([sys.executable, "-c", "raise SystemExit(3)"], 60) == "failed with status 3"


def test_without_limits_nothing_is_measured_against_them(run: Any) -> None:
    run.rows["limits"] = []
    assert run(200.0, 1.0)[1]["one"] == {"skipped": "the limits are not known"}


def test_formats_are_compared_by_batch(gpu: dict[str, ModuleType]) -> None:
    parts = {"bf16": {"rows": [{"batch": 1, "step_ms": 4.0}, {"batch": 8, "step_ms": 5.0}, {"tokens": 512, "ms": 9.0}]},
             "fp8": {"rows": [{"batch": 1, "step_ms": 2.0}]}, "int4": {"skipped": "0 s are left"}}
    assert list(gpu["run"].compared(parts)) == [
        "decode, fp8 against bf16 (times as fast, by batch): 2.00 at 1"]


def test_the_limit_is_the_larger_of_bytes_and_products(gpu: dict[str, ModuleType]) -> None:
    limits = gpu["bench"].Limits(4.3e12, {"bfloat16": 800e12})
    assert limits.seconds(4.3e9, 8e9) == pytest.approx(1e-3)
    assert limits.seconds(4.3e9, 8e12) == pytest.approx(1e-2)
    assert limits.seconds(4.3e9, 8e12, "fp8") == pytest.approx(1e-3), "a rate that is not known limits nothing"


@pytest.mark.parametrize(("batch", "step_ms"), [(1, 3.52), (32, 4.49), (256, 11.9)])
def test_the_limit_of_an_8b_decode_in_bfloat16(gpu: dict[str, ModuleType], batch: int, step_ms: float) -> None:
    """At 4.3 TB/s and 989 TFLOP/s: 15.01 GB of weights, 131,072 bytes a token of context."""
    engine, bench = gpu["steps"], gpu["bench"]
    spec = engine.SHAPES[bench.FULL.shape]
    work = engine.Work(spec, engine.WeightBits(16, 16, 16), spec.kv_bytes_per_token(2))
    assert work.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    limits = bench.Limits(4.3e12, {"bfloat16": 989e12})
    seconds = work.decode_limit_s(bench.Bench(torch.device("cpu"), bench.FULL, limits, 0.0), batch, 1024 * batch)
    assert 1e3 * seconds == pytest.approx(step_ms, rel=0.01)
    assert work.prefill_flops(1024) == pytest.approx(14.5e12, rel=0.03)


def test_a_difference_counts_in_steps_of_the_format(gpu: dict[str, ModuleType]) -> None:
    apart, truth = gpu["checks"].apart, torch.tensor([1.0, 100.0])
    assert apart(truth, truth, torch.bfloat16, 1) == 0
    assert apart(truth + torch.tensor([0.0, 0.5]), truth, torch.bfloat16, 1) < 1
    assert apart(truth + torch.tensor([0.05, 0.0]), truth, torch.bfloat16, 1) > 1
    assert apart(truth * float("nan"), truth, torch.bfloat16, 1) == float("inf")
    assert apart(truth[:1], truth, torch.bfloat16, 1) == float("inf")


def test_a_check_that_fails_is_a_row(gpu: dict[str, ModuleType]) -> None:
    def fault(case: object) -> float:
        raise RuntimeError("an illegal\naddress")

    row = gpu["checks"].outcome(fault, None)
    assert row["passed"] is False and row["error"] == "RuntimeError: an illegal address"
    assert gpu["checks"].outcome(lambda case: case, 1.5) == {"apart": 1.5, "passed": False}


def test_configurations_are_put_back(gpu: dict[str, ModuleType]) -> None:
    tuned = gpu["checks"].TUNED
    before = {name: one.configs for name, one in tuned.items()}
    with gpu["checks"].only_first():
        assert all(len(one.configs) == 1 for one in tuned.values())
    assert {name: one.configs for name, one in tuned.items()} == before


def test_four_bits_are_counted_as_four(gpu: dict[str, ModuleType]) -> None:
    operations, weight = gpu["operations"], torch.randn(64, 256)
    bits = {name: 8 * operations.stored_bytes(quantized) / weight.numel() for name, quantized in (
        ("int4", operations.SCHEMES[operations.Quantization.int4].quantize(weight)),
        ("mxfp4", operations.SCHEMES[operations.Quantization.mxfp4].quantize(weight)),
        ("nvfp4", operations.SCHEMES[operations.Quantization.nvfp4].quantize(weight)),
        ("int4 by groups", operations.grouped_int4_linear.quantize(weight, 128)))}
    assert bits == {"int4": 5.0, "mxfp4": 4.25, "nvfp4": 4.5, "int4 by groups": 4 + 24 / 128}
    assert operations.stored_bytes(operations.cloned(weight)) == 4 * weight.numel()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float8_e4m3fn, 1)])
def test_the_limit_of_attention_counts_every_key_and_value(gpu: dict[str, ModuleType], dtype: torch.dtype,
                                                           size: int) -> None:
    operations, bench = gpu["operations"], gpu["bench"]
    spec, where = operations.SHAPES["tiny"], bench.Bench(torch.device("cpu"), bench.TINY, None, 0.0)
    decode = operations.decode(where, where.kernels(), spec, 3, dtype)
    assert decode.num_bytes == 3 * 40 * 2 * spec.num_kv_heads * spec.head_dim * size
    assert decode.flops == 3 * 40 * 4 * spec.num_heads * spec.head_dim
    prefill = operations.prefill(where.kernels(), spec, 33, torch.device("cpu"))
    assert prefill.num_bytes == 2 * 33 * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
