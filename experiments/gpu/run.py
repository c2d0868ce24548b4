"""The GPU path, checked and measured in one command of under eight minutes on one GPU.

    python experiments/gpu/run.py [out=result.json] [device=cuda] [seconds=470] [only=NAME,NAME]

Every part runs in a process of its own, which is ended when its time is over: a kernel that hangs or faults costs its
part. What is measured is in the file after every part. device=cpu: tiny sizes, interpreted kernels, figures without
meaning, to see that the script works. Exit status: 0; 1 if a kernel differs from its reference or a part failed;
3 without a GPU.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARGIN_S = 8.0
"""Between the time that a part is told and that at which it is ended; a start takes some of it."""


@dataclass(frozen=True)
class PlannedPart:
    """One part, in the order in which they run."""

    name: str
    module: str
    budget_s: float


PARTS = (
    PlannedPart("limits", "limits", 30),
    PlannedPart("checks", "checks", 65),
    PlannedPart("bf16", "steps", 45),
    PlannedPart("int4", "steps", 70),
    PlannedPart("fp8", "steps", 70),
    PlannedPart("attention", "operations", 35),
    PlannedPart("modes", "steps", 40),
    PlannedPart("mixed", "steps", 35),
    PlannedPart("transformers", "peers", 30),
    PlannedPart("products", "operations", 40),
    PlannedPart("small", "operations", 15),
)
LEAST_SHARE = 0.5
"""Of a part's budget: with less left it is not begun."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path = Path("result.json")
    device: str = "cuda"
    seconds: float = 470.0
    only: tuple[str, ...] = tuple(part.name for part in PARTS)

    @classmethod
    def of(cls, words: Sequence[str]) -> Options:
        """Read `key=value` words. Raises ValueError, in one line, for what is none of them."""
        given = dict(word.split("=", 1) for word in words if "=" in word)
        names = [part.name for part in PARTS]
        known = {"out", "device", "seconds", "only"}
        if wrong := [word for word in words if "=" not in word] or sorted(given.keys() - known):
            raise ValueError(f"{wrong[0]}: is none of out=FILE, device=cuda|cpu, seconds=N, only=NAME,NAME")
        if given.get("device", "cuda") not in ("cuda", "cpu"):
            raise ValueError(f"device={given['device']}: must be cuda or cpu")
        only = tuple(given["only"].split(",")) if "only" in given else tuple(names)
        if unknown := [name for name in only if name not in names]:
            raise ValueError(f"only={unknown[0]}: there is no such part; there are {', '.join(names)}")
        return cls(Path(given.get("out", "result.json")), given.get("device", "cuda"),
                   float(given.get("seconds", "470")), only)


def main(words: Sequence[str]) -> int:
    try:
        options = Options.of(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.device == "cuda" and not has_gpu():
        print("torch finds no GPU here, and every figure would be one of it; servekit doctor says what is missing, "
              "device=cpu tries the script out", file=sys.stderr)
        return 3
    return 0 if Run(options).all_parts() else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class Run:
    """All parts, one after the other, within one time."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._end_s = time.monotonic() + options.seconds
        self._result: dict[str, Any] = {"facts": facts(options.device), "parts": {}}

    def all_parts(self) -> bool:
        """Run what there is time for; returns whether nothing was wrong."""
        parts = [part for part in PARTS if part.name in self._options.only or part.name == "limits"]
        for part in parts:
            left_s = self._end_s - time.monotonic()
            later_s = sum(other.budget_s for other in parts[parts.index(part) + 1:])
            if left_s < LEAST_SHARE * part.budget_s:
                self._note(part, {"skipped": f"{left_s:.0f} s are left of {self._options.seconds:.0f}"})
            elif part.name not in ("limits", "checks") and not self._limit_rows():
                self._note(part, {"skipped": "the limits are not known"})
            else:
                # What earlier parts have left unused is added.
                self._note(part, self._run(part, min(left_s, max(part.budget_s, left_s - later_s))))
        print("", *compared(self._result["parts"]), sep="\n")
        print(f"{self._options.seconds - (self._end_s - time.monotonic()):.0f} s; {self._options.out}")
        return all(is_right(found) for found in self._result["parts"].values())

    def _run(self, part: PlannedPart, seconds: float) -> dict[str, Any]:
        print(f"\n{part.name} (at most {seconds:.0f} s)", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            rows.touch()
            order = {"part": part.name, "module": part.module, "device": self._options.device,
                     "seconds": seconds - MARGIN_S, "rows": str(rows), "limits": self._limit_rows()}
            ending = ended([sys.executable, str(HERE / "run.py"), json.dumps(order)], seconds)
            found = [json.loads(line) for line in rows.read_text().splitlines()]
        return {"seconds": time.monotonic() - started, "ending": ending, "rows": found}

    def _limit_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._result["parts"].get("limits", {}).get("rows", [])
        return rows

    def _note(self, part: PlannedPart, found: dict[str, Any]) -> None:
        self._result["parts"][part.name] = found
        if "skipped" in found:
            print(f"\n{part.name}: skipped, {found['skipped']}", flush=True)
        elif found["ending"] != "done":
            print(f"{part.name}: {found['ending']}", flush=True)
        self._options.out.write_text(json.dumps(self._result, indent=1) + "\n")


def compared(parts: dict[str, Any]) -> Iterator[str]:
    """Decodes of the other number formats and of transformers beside those in bfloat16, by batch."""
    ours = decode_ms(parts, "bf16")
    for name in ("fp8", "int4", "transformers"):
        theirs = decode_ms(parts, name)
        if both := [f"{ours[batch] / theirs[batch]:.2f} at {batch}" for batch in sorted(ours.keys() & theirs.keys())]:
            yield f"decode, {name} against bf16 (times as fast, by batch): {', '.join(both)}"


def decode_ms(parts: dict[str, Any], name: str) -> dict[int, float]:
    rows = parts.get(name, {}).get("rows", ())
    return {row["batch"]: row["step_ms"] for row in rows if "step_ms" in row}


def ended(command: Sequence[str], seconds: float) -> str:
    """Run a process to its end, or to the end of its time; returns how it ended."""
    try:
        status = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s, with what it had"
    return "done" if status == 0 else f"failed with status {status}"


def is_right(found: dict[str, Any]) -> bool:
    """Whether a part that ran has neither failed nor found a kernel that differs."""
    return not found.get("ending", "").startswith("failed") and all(
        row.get("passed", True) for row in found.get("rows", ()))


def facts(device: str) -> dict[str, Any]:
    import torch

    found = {"date": time.strftime("%Y-%m-%d"), "device": device, "python": platform.python_version(),
             "torch": torch.__version__}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
                  "compute_capability": torch.cuda.get_device_capability()}
    return found


# --- In a part's own process ------------------------------------------------------------------------------------------


def run_part(order: dict[str, Any]) -> int:
    """Run one part, writing each row as soon as it is known."""
    deadline_s = time.monotonic() + order["seconds"]
    if order["device"] == "cpu":
        interpret_kernels()
    import torch
    from bench import FULL, TINY, Bench

    bench = Bench(torch.device(order["device"]), FULL if order["device"] == "cuda" else TINY,
                  known_limits(order["limits"]), deadline_s)
    with Path(order["rows"]).open("a") as file:
        for row in getattr(import_module(order["module"]), order["part"])(bench):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(shown(row), flush=True)
    if not bench.has_time:
        print("  its time is over: what is not above was left out", flush=True)
    return 0


def interpret_kernels() -> None:
    """Triton's interpreter as the tests set it up: that must come before anything imports Triton."""
    sys.path.insert(0, str(HERE.parent.parent / "tests"))
    from triton_interpreter import import_interpreted

    import_interpreted()


def known_limits(rows: Sequence[dict[str, Any]]) -> Any:
    from bench import Limits

    speeds = {row["name"]: row["bytes_per_s"] for row in rows if "bytes_per_s" in row}
    rates = {row["numbers"]: row["flops_per_s"] for row in rows if "flops_per_s" in row}
    return Limits(speeds["copy"], rates) if speeds else None


def shown(row: dict[str, Any]) -> str:
    """A row for people."""
    return "  " + "  ".join(_words(row))


def _words(row: dict[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        if key in ("name", "numbers", "size", "mode", "config") and value != "":
            yield str(value)
        elif key == "share":
            yield f"{value:.0%} of the limit"
        elif key.endswith("_per_s") and value > 1e9:
            yield f"{key} {value / 1e12:.3f}e12"
        elif isinstance(value, float):
            yield f"{key} {value:.4g}"
        elif value != "":
            yield f"{key} {value}"


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        sys.exit(run_part(json.loads(sys.argv[1])))
    sys.exit(main(sys.argv[1:]))
