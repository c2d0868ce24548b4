"""What the studies of the tuner share: a simulated engine, a tuning on a real one, results written and shown."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from servekit import __version__
from servekit.config.schema import Config
from servekit.load.driver import Limits
from servekit.load.metrics import RequestLatencies
from servekit.load.records import RequestRecord
from servekit.sim.engine_model import EngineModel
from servekit.sim.fitted import FittedStepTime
from servekit.sim.simulation import Simulation
from servekit.tuner.certificate import NAME as CERTIFICATE
from servekit.tuner.certificate import read_certificate
from servekit.tuner.command import ExitCode
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.settings import Settings, find_file, read_settings

HERE = Path(__file__).parent
COLOURS = {"default": "#8a93a3", "rule_of_thumb": "#c2c8d0", "random": "#e08b3e", "tuned": "#1d3557"}
"""Of the roles of a confirmation."""
_VOCAB_SIZE = 49152
_KV_BLOCKS, _BLOCK_TOKENS, _MAX_MODEL_LEN = 512, 16, 2048


def arguments() -> dict[str, str]:
    """The words of the command line, key=value."""
    return dict(word.split("=", 1) for word in sys.argv[1:])


def write(name: str, found: Mapping[str, Any]) -> Path:
    """Write NAME.json beside the script, or to the place that `out=` names; returns the path of the plot beside it."""
    path = Path(arguments().get("out", HERE / f"{name}.json"))
    facts = {"servekit": __version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
             "cpu_s": round(time.process_time(), 1)}
    path.write_text(json.dumps({"facts": facts, **found}, indent=1) + "\n")
    return path.with_suffix(".png")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows as the README has them."""
    for row in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(map(str, row))} |")
    print()


def progress(text: str) -> None:
    print(f"{time.process_time():5.0f} s  {text}", file=sys.stderr, flush=True)


def tuning(objective: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """What the certificate of `servekit tune OBJECTIVE WORDS` says; one that the folder has is read, not made again.

    Raises SystemExit if the tuning ends in any other way than with a verdict.
    """
    path = folder / CERTIFICATE
    if not path.exists():
        command = ["tune", objective, *words, f"folder={folder}"]
        progress(f"servekit {shlex.join(command)}")
        status = subprocess.run([sys.executable, "-m", "servekit", *command], check=False).returncode
        if status not in (ExitCode.ok, ExitCode.nothing_holds):
            raise SystemExit(f"servekit tune {objective} ended with status {status}")
    if not path.exists():
        return {"words": list(words), "finalists": [], "winner": None}
    judgement = read_certificate(path).judgement
    return {"words": list(words), "winner": judgement.winner,
            "ratio": None if judgement.ratio is None else asdict(judgement.ratio),
            "finalists": [{"name": found.name, "role": found.role.value, "confirmed_per_s": found.confirmed_per_s,
                           "failed_per_s": found.failed_per_s} for found in judgement.finalists]}


def best_of(finalists: Sequence[dict[str, Any]], role: str) -> dict[str, Any] | None:
    """Of a role's finalists, the one that was confirmed at the highest rate."""
    own = [finalist for finalist in finalists if finalist["role"] == role]
    return max(own, key=lambda finalist: finalist["confirmed_per_s"] or 0.0, default=None)


def rate_text(finalist: dict[str, Any] | None) -> str:
    if finalist is None:
        return "no finalist"
    held, failed = finalist["confirmed_per_s"], finalist["failed_per_s"]
    held_text = "none" if held is None else f"{held:.2f}"
    return held_text if failed is None else f"{held_text} (not {failed:.2f})"


def draw_rates(axes: Axes, found: Mapping[str, dict[str, Any]], roles: Sequence[str]) -> None:
    """What was confirmed for each role of several tunings, a group of bars for each tuning."""
    width = 0.8 / len(roles)
    for place, role in enumerate(roles):
        for number, verdict in enumerate(found.values()):
            best = best_of(verdict["finalists"], role) or {"confirmed_per_s": None, "failed_per_s": None}
            held = nan if best["confirmed_per_s"] is None else best["confirmed_per_s"]
            above = nan if best["failed_per_s"] is None else best["failed_per_s"] - held
            x = number + (place - (len(roles) - 1) / 2) * width
            axes.bar(x, held, width, color=COLOURS[role], yerr=[[0.0], [above]], capsize=3,
                     label=role.replace("_", " ") if number == 0 else None)
            if best["confirmed_per_s"] is None and best["failed_per_s"] is not None:
                axes.plot(x, best["failed_per_s"], "v", color=COLOURS[role])
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.margins(y=0.25)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="highest rate confirmed, requests/s\n(whisker: the lowest that failed;\n"
                    "triangle: the same, where none held)")
    axes.legend(fontsize=8)


@dataclass(frozen=True)
class SimulatedEngine:
    """The default model on two cores, by step times that were fitted to a real engine, with a small KV cache."""

    settings: Settings
    num_requests: int
    """Judged in each run."""

    @classmethod
    def of(cls, tuning_file: str, num_requests: int) -> SimulatedEngine:
        """For the workload and objective of a tuning file of conf/slo."""
        return cls(read_settings(find_file(tuning_file), ()), num_requests)

    @cached_property
    def model(self) -> EngineModel:
        return EngineModel("fitted", FittedStepTime.load(HERE / "step-times.json"), _KV_BLOCKS, _KV_BLOCKS,
                           _BLOCK_TOKENS, _MAX_MODEL_LEN)

    def run(self, config: Config, rate_per_s: float, stream: str) -> Iterator[RequestRecord]:
        """The judged requests of one run as they end. Equal streams: equal requests. Raises ConfigError."""
        plan = LoadPlan(self.settings.bench, 0, self.settings.budget.warmup_requests, self.settings.budget.timeout_s)
        load = plan.load(rate_per_s, self.num_requests, stream, _VOCAB_SIZE)
        limits = Limits(num_requests=load.num_requests, warmup_requests=load.warmup_requests, timeout_s=load.timeout_s)
        simulation = Simulation(load.requests, self.model.scheduler(config.scheduler), self.model.step_time, limits)
        return (record for record in simulation.run() if not record.is_warmup)


def latencies_of(record: RequestRecord) -> RequestLatencies | None:
    """None if it failed."""
    return None if record.failure else RequestLatencies.of(record.timeline)
