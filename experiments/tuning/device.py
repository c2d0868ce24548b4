"""What takes a real engine, and a machine with nothing else to do. To be run by hand.

    nohup python experiments/tuning/device.py folder=/tmp/tuning > device.log 2>&1 &

    folder=FOLDER        where the studies and their raw logs go; a study that is there goes on, and one that has
                         its certificate is read
    out=FILE             what is found; device.json beside this script if not given
    only=PART,PART       of trials and compare; what the file says of the others stays
    objectives=NAME,…    of smooth, chat and code, for the part compare; what the file says of the others stays
    configurations=12    of the part trials: drawn at random, each measured hot and cold
    minutes=20           budget of each `servekit tune`; its random search takes as long as its search again
    tune="KEY=VALUE …"   more words for every tuning file, such as a model that is already on the disk
    smooth="…" chat="…" code="…"   more words for one of them, such as an objective that suits the machine

Part trials: hot against cold trials per hour, and how well the simulator predicts each configuration from the steps of
the others. Part compare: tuned against default, rule of thumb and random search in equal time, as the certificates of
three objectives have it. The first takes about half an hour, the second three times half an hour.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import optuna

matplotlib.use("Agg")
from common import COLOURS, HERE, arguments, best_of, draw_rates, print_table, progress, rate_text, tuning, write
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console

from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.config.schema import Config
from servekit.engine.messages import EngineFacts
from servekit.sim.fitted import TimedStep
from servekit.tuner.adviser import Adviser, Comparison, TrackRecord
from servekit.tuner.baseline import START_SHARE, Baseline, look_at_base
from servekit.tuner.executor import RunLength, TrialExecutor, Warm
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Tolerance
from servekit.tuner.own_engine import engine_for
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.settings import Settings, find_file, read_settings
from servekit.tuner.study import Origin, SamplerKind, StudyOptions, TuningStudy
from servekit.tuner.subject import OwnEngine
from servekit.tuner.trial import Candidate, Ending, Outcome

OBJECTIVES = ("smooth", "chat", "code")
TRIALS, COMPARE = "trials", "compare"
ROLES = ("default", "rule_of_thumb", "random", "tuned")


def words_for(objective: str) -> list[str]:
    given = arguments()
    return shlex.split(given.get("tune", "")) + shlex.split(given.get(objective, ""))


# --- the same configurations hot, cold and simulated ------------------------------------------------------------------

@dataclass(frozen=True)
class SeenRun:
    """A run that nothing disturbed."""

    config: Config
    facts: EngineFacts
    steps: tuple[TimedStep, ...]


@dataclass(frozen=True)
class MeasuredTrial:
    """A configuration as it was measured."""

    candidate: Candidate
    search: RateSearch
    """As it was before the trial."""
    outcome: Outcome


@dataclass
class Bench:
    """One live engine, and what was seen of it. To be closed."""

    settings: Settings
    seen: list[SeenRun]
    engine: OwnEngine
    executor: TrialExecutor
    baseline: Baseline
    start_per_s: float
    """Where the search for a rate begins as long as nothing has held."""

    @classmethod
    def of(cls, settings: Settings) -> Bench:
        assert isinstance(settings.base, Config)
        budget, seen = settings.budget, list[SeenRun]()
        host = engine_for(settings.base)
        plan = LoadPlan(settings.bench, settings.study.seed, budget.warmup_requests, budget.timeout_s)
        executor = TrialExecutor(host, settings.slo, plan, RunLength(budget.requests, budget.min_run_s, plan.available),
                                 settings.folder / "runs", Tolerance(budget.max_busy_share, budget.max_slowdown))
        host.on_run = lambda config, facts, steps: seen.append(SeenRun(config, facts, tuple(steps)))
        try:
            baseline = look_at_base(settings, executor, Console(stderr=True))
        except BaseException:
            executor.close()
            raise
        return cls(settings, seen, OwnEngine(settings, settings.base, host), executor, baseline,
                   settings.start_rate_per_s or START_SHARE * baseline.capacity_per_s)

    def candidates(self, count: int) -> list[Candidate]:
        """The base configuration and random others, all different."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = TuningStudy(optuna.create_study(direction="maximize"), StudyOptions(sampler=SamplerKind.random),
                            self.engine.space(self.baseline.description), self.settings.slo.names,
                            self.settings.assemble)
        study.enqueue(self.settings.base, Origin.base)
        return [candidate for _ in range(count) if (candidate := study.ask()) is not None]

    def trial(self, candidate: Candidate, warm: Warm, incumbent_per_s: float) -> MeasuredTrial:
        """One trial, repeated once if it is disturbed. In equal trials equal requests are sent."""
        self.engine.host.is_live = warm is Warm.hot
        self.executor.start_per_s, self.executor.incumbent_per_s = self.start_per_s, incumbent_per_s
        search = self.executor.rate_search()
        outcome = self.executor.run(candidate)
        if outcome.ending is Ending.invalid:
            outcome = self.executor.run(candidate)
        progress(f"configuration {candidate.number}, {warm.value}: {outcome.ending.value}, {outcome.rate_per_s:.2f} "
                 f"req/s, {outcome.facts['duration_s']:.1f} s")
        return MeasuredTrial(candidate, search, outcome)

    def both_ways(self, count: int) -> dict[Warm, list[MeasuredTrial]]:
        """Every candidate hot and cold, in alternating order; each way has an incumbent of its own.

        A candidate that was disturbed twice in either way is left out of both.
        """
        pairs: list[dict[Warm, MeasuredTrial]] = []
        for number, candidate in enumerate(self.candidates(count)):
            ways = (Warm.hot, Warm.cold) if number % 2 == 0 else (Warm.cold, Warm.hot)
            best_per_s = {warm: max((pair[warm].outcome.rate_per_s for pair in pairs), default=0.0) for warm in ways}
            pair = {warm: self.trial(candidate, warm, best_per_s[warm]) for warm in ways}
            if Ending.invalid not in (trial.outcome.ending for trial in pair.values()):
                pairs.append(pair)
        if not pairs:
            raise SystemExit("every measurement was disturbed: use a quiet machine")
        return {warm: [pair[warm] for pair in pairs] for warm in Warm}

    def predicted(self, trial: MeasuredTrial) -> float | None:
        """What the simulator makes of a configuration from the steps of all others; None: nothing is like it."""
        adviser = Adviser(self.settings.slo, self.executor.plan, self.executor.length)
        for run in self.seen:
            if config_hash(run.config) != trial.candidate.config_hash:
                adviser.learn(run.config, run.facts, run.steps)
        prediction = adviser.predict(trial.candidate.config, trial.search)
        return None if prediction is None else prediction.rate_per_s


def trials(folder: Path, count: int) -> dict[str, Any]:
    settings = read_settings(find_file("chat"), [*words_for("chat"), f"folder={folder / TRIALS}"])
    bench = Bench.of(settings)
    try:
        measured = bench.both_ways(count)
    finally:
        bench.executor.close()
    about = bench.baseline.description
    return {"objective": settings.values["slo"], "words": words_for("chat"), "model": about.model,
            "device": about.device, "longest_start_s": bench.executor.longest_start_s,
            "warmth": {warm.value: times(found) for warm, found in measured.items()},
            "simulator": predictions(bench, measured[Warm.hot])}


def times(found: Sequence[MeasuredTrial]) -> dict[str, Any]:
    """How long the trials of one way took. A trial counts whatever came of it: a crash takes time as well."""
    took_s = [float(trial.outcome.facts["duration_s"]) for trial in found]
    return {"trials_per_hour": 3600 * len(took_s) / sum(took_s), "took_s": took_s,
            "rates_per_s": [trial.outcome.rate_per_s for trial in found],
            "endings": [trial.outcome.ending.value for trial in found],
            "num_without_start": sum(trial.outcome.facts.get("warm") == Warm.hot.value for trial in found)}


def predictions(bench: Bench, found: Sequence[MeasuredTrial]) -> dict[str, Any]:
    """Predicted against measured, leaving one configuration out at a time."""
    measured = [trial for trial in found if trial.outcome.ending is Ending.measured]
    pairs = [(bench.predicted(trial), trial.outcome.rate_per_s) for trial in measured]
    record = TrackRecord([Comparison(predicted, rate) for predicted, rate in pairs if predicted is not None])
    return {"num_measured": len(measured), "num_predicted": len(record.comparisons),
            "median_error": record.median_error, "rank_correlation": record.rank_correlation,
            "predicted_per_s": [pair.predicted_per_s for pair in record.comparisons],
            "measured_per_s": [pair.measured_per_s for pair in record.comparisons]}


# --- tuned against the others -----------------------------------------------------------------------------------------

def compare(folder: Path, minutes: float, objectives: Sequence[str]) -> dict[str, Any]:
    return {objective: compared(objective, folder, minutes) for objective in objectives}


def compared(objective: str, folder: Path, minutes: float) -> dict[str, Any]:
    words = [f"budget.minutes={minutes:g}", "compare=[rule_of_thumb,random]", *words_for(objective)]
    return tuning(objective, words, folder / objective)


# --- what is shown ----------------------------------------------------------------------------------------------------

def comparison_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for objective, row in found.items():
        if not row["finalists"]:
            yield [objective, *["nothing held"] * len(ROLES), "", ""]
            continue
        ratio = row.get("ratio") or {}
        bounds = "–".join("?" if ratio.get(end) is None else f"{ratio[end]:.2f}" for end in ("low", "high"))
        value = "" if ratio.get("value") is None else f"{ratio['value']:.2f} ({bounds})"
        if not value and ratio.get("low") is not None:
            value = f"more than {ratio['low']:.2f}"
        yield [objective, *(rate_text(best_of(row["finalists"], role)) for role in ROLES), str(row["winner"]), value]


def show(found: dict[str, Any]) -> None:
    if part := found.get(TRIALS):
        print_table(["trials", "per hour", "without a start", "of"],
                    [[warm, f"{row['trials_per_hour']:.0f}", row["num_without_start"], len(row["took_s"])]
                     for warm, row in part["warmth"].items()])
        simulator = part["simulator"]
        error = "" if simulator["median_error"] is None else f"{simulator['median_error']:.0%}"
        print_table(["predicted from the others", "median error of the rate", "rank correlation"],
                    [[f"{simulator['num_predicted']} of {simulator['num_measured']}", error,
                      f"{simulator['rank_correlation']:.2f}"]])
    if part := found.get(COMPARE):
        print_table(["objective", *(f"{role.replace('_', ' ')}, req/s" for role in ROLES), "winner",
                     "winner / default (bounds)"], list(comparison_rows(part)))


def draw(found: dict[str, Any], path: Path) -> None:
    num_panels = 2 * (TRIALS in found) + (COMPARE in found)
    figure, panels = plt.subplots(1, num_panels, figsize=(5.3 * num_panels, 4.6), squeeze=False)
    if part := found.get(TRIALS):
        draw_trials(*panels[0][:2], part)
    if part := found.get(COMPARE):
        draw_rates(panels[0][-1], part, ROLES)
        panels[0][-1].set(xlabel="objective", title="equal time for search and random search")
    for axes in panels[0]:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_trials(warmth: Axes, simulator: Axes, part: dict[str, Any]) -> None:
    for place, (warm, row) in enumerate(part["warmth"].items()):
        warmth.bar(place, row["trials_per_hour"], color=COLOURS["tuned" if warm == Warm.hot.value else "default"],
                   label=f"{warm}: {row['trials_per_hour']:.0f}")
    warmth.set_xticks(range(len(part["warmth"])), list(part["warmth"]))
    warmth.set(ylabel="trials per hour", title="the same configurations")
    warmth.legend(fontsize=8)
    pairs = part["simulator"]
    top = 1.05 * max(*pairs["predicted_per_s"], *pairs["measured_per_s"], 1e-9)
    simulator.plot([0, top], [0, top], color="black", linewidth=0.8, label="equal")
    simulator.plot(pairs["measured_per_s"], pairs["predicted_per_s"], "o", color=COLOURS["tuned"],
                   label="one configuration, from the steps of the others")
    simulator.set(xlabel="highest rate measured, requests/s", ylabel="predicted, requests/s",
                  title=f"simulator, rank correlation {pairs['rank_correlation']:.2f}")
    simulator.legend(fontsize=8)


def main() -> None:
    given = arguments()
    if "folder" not in given:
        sys.exit(__doc__)
    folder, parts = Path(given["folder"]), given.get("only", f"{TRIALS},{COMPARE}").split(",")
    objectives = given.get("objectives", ",".join(OBJECTIVES)).split(",")
    for key, words, known in (("only", parts, (TRIALS, COMPARE)), ("objectives", objectives, OBJECTIVES)):
        if unknown := set(words) - set(known):
            sys.exit(f"{key}={','.join(sorted(unknown))}: must be of {', '.join(known)}")
    out = Path(given.get("out", HERE / "device.json"))
    before = json.loads(out.read_text()) if out.exists() else {}
    found = {part: before[part] for part in (TRIALS, COMPARE) if part in before}
    if TRIALS in parts:
        found[TRIALS] = trials(folder, int(given.get("configurations", "12")))
        write("device", found)
    if COMPARE in parts:
        found[COMPARE] = found.get(COMPARE, {}) | compare(folder, float(given.get("minutes", "20")), objectives)
    plot = write("device", found)
    show(found)
    draw(found, plot)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
