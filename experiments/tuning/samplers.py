"""TPE, GP, random and quasi-random search on surfaces that the simulator makes.

    python experiments/tuning/samplers.py [out=samplers.json]

A surface says which rate each configuration of a space holds. It is found as in a measurement, by `RateSearch` over
simulated runs, on one set of arrivals for all, so that a configuration has one value whoever asks for it. The study is
that of `servekit tune`: the base configuration first, then what the sampler proposes; nothing is measured twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import optuna
import torch

matplotlib.use("Agg")
from common import SimulatedEngine, latencies_of, print_table, progress, write
from matplotlib import pyplot as plt

from servekit.config.errors import ConfigError
from servekit.config.schema import Config
from servekit.tuner.default_space import Facts
from servekit.tuner.grammar import parse_space
from servekit.tuner.launch import Configuration
from servekit.tuner.rate_search import RateSearch
from servekit.tuner.slo import Slo
from servekit.tuner.space import Space
from servekit.tuner.study import Origin, SamplerKind, StudyOptions, TuningStudy, startup_trials
from servekit.tuner.trial import Candidate, Ending, Outcome, violations
from servekit.tuner.verdict import Tally, Verdict

NUM_REQUESTS = {"chat": 100, "code": 60}
"""Of one run, for each surface, which has the name of its tuning file."""
START_PER_S = {"chat": 4.0, "code": 1.0}
"""Where the search for a rate begins, whatever the configuration."""
NUM_TRIALS, SEEDS = 24, range(8)
SHOWN_TRIALS = (4, 8, 16, 24)
CLOSE = 0.97
"""Share of the best rate known from which a configuration counts as good."""
SPACE = {
    "scheduler.max_num_seqs": "choice(4, 8, 16, 32, 64, 128, 256)",
    "scheduler.max_step_tokens": "choice(64, 128, 256, 512, 1024, 2048)",
    "scheduler/prefill": "choice(chunked, whole, interleaved, separate, splitfuse)",
    "scheduler.prefill.chunk_tokens": "choice(32, 64, 128, 256, 512)",
    "scheduler/policy": "choice(fifo, sjf, srtf, lpm)",
    "scheduler/preemption": "choice(recompute, swap)",
    "scheduler/admission": "choice(on_demand, worst_case)",
}
COLOURS = {"tpe": "#1d3557", "gp": "#e08b3e", "random": "#8a93a3", "qmc": "#3f9f7f"}


@dataclass
class Surface:
    """What each configuration holds; an `Executor`."""

    engine: SimulatedEngine
    space: Space
    start_per_s: float
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _configs: dict[tuple[str, ...], Configuration] = field(default_factory=dict)

    @classmethod
    def of(cls, tuning_file: str) -> Surface:
        engine = SimulatedEngine.of(tuning_file, NUM_REQUESTS[tuning_file])
        assert isinstance(engine.settings.base, Config)
        facts = Facts(cores=2, is_gpu=False, max_model_len=engine.model.max_model_len)
        return cls(engine, parse_space(SPACE, engine.settings.base, facts), START_PER_S[tuning_file])

    @property
    def slo(self) -> Slo:
        return self.engine.settings.slo

    @property
    def rates_per_s(self) -> list[float]:
        """Of all configurations that were asked for."""
        return [outcome.rate_per_s for outcome in self._outcomes.values()]

    def assemble(self, overrides: Sequence[str]) -> Configuration:
        key = tuple(overrides)
        if key not in self._configs:
            self._configs[key] = self.engine.settings.assemble(overrides)
        return self._configs[key]

    def run(self, candidate: Candidate) -> Outcome:
        if candidate.config_hash not in self._outcomes:
            assert isinstance(candidate.config, Config)
            self._outcomes[candidate.config_hash] = self._search_rate(candidate.config)
        return self._outcomes[candidate.config_hash]

    def _search_rate(self, config: Config) -> Outcome:
        search = RateSearch(self.start_per_s, factor=1.4, tolerance=0.03, max_runs=8, max_losing_runs=8)
        closest: tuple[Tally, ...] = ()
        try:
            while (rate_per_s := search.next_rate()) is not None:
                is_lowest = rate_per_s <= search.lowest_tried_per_s
                tallies = self._tallies(config, rate_per_s)
                holds = all(tally.verdict is Verdict.holds for tally in tallies)
                search.tell(rate_per_s, holds)
                closest = tallies if holds or is_lowest else closest
        except ConfigError as error:
            return Outcome(Ending.illegal, facts={"error": str(error)})
        return Outcome(Ending.measured, search.held_per_s, violations(closest))

    def _tallies(self, config: Config, rate_per_s: float) -> tuple[Tally, ...]:
        """How a run went; it ends with the first promise that is broken."""
        misses, ended = [0] * len(self.slo.promises), 0
        for ended, record in enumerate(self.engine.run(config, rate_per_s, "surface"), start=1):
            latencies = latencies_of(record)
            misses = [missed + promise.is_missed_by(latencies)
                      for missed, promise in zip(misses, self.slo.promises, strict=True)]
            if Verdict.fails in (tally.verdict for tally in self._counted(misses, ended)):
                break
        return tuple(self._counted(misses, ended))

    def _counted(self, misses: Sequence[int], ended: int) -> Iterator[Tally]:
        for promise, missed in zip(self.slo.promises, misses, strict=True):
            yield Tally(promise, self.engine.num_requests, ended, missed, num_late=0)


def best_so_far(surface: Surface, sampler: SamplerKind, seed: int) -> list[float]:
    """The best rate after each trial of one study."""
    options = StudyOptions(sampler=sampler, num_startup_trials=startup_trials(NUM_TRIALS), seed=seed)
    study = TuningStudy(optuna.create_study(direction="maximize"), options, surface.space, surface.slo.names,
                        surface.assemble)
    study.enqueue(surface.engine.settings.base, Origin.base)
    rates_per_s: list[float] = []
    while len(rates_per_s) < NUM_TRIALS and (candidate := study.ask()) is not None:
        outcome = surface.run(candidate)
        study.tell(candidate, outcome)
        rates_per_s.append(outcome.rate_per_s)
    return list(accumulate(rates_per_s, max))


def studies(surface: Surface, name: str) -> dict[str, Any]:
    """All samplers and seeds on one surface."""
    curves = {}
    for sampler in SamplerKind:
        curves[sampler.value] = [best_so_far(surface, sampler, seed) for seed in SEEDS]
        progress(f"{name}, {sampler.value}: {np.median(curves[sampler.value], axis=0)[-1]:.2f} req/s")
    rates_per_s = surface.rates_per_s
    return {"objective": surface.engine.settings.values["slo"], "num_configurations": len(rates_per_s),
            "share_holding_nothing": sum(rate == 0 for rate in rates_per_s) / len(rates_per_s),
            "best_known_per_s": max(rates_per_s), "base_per_s": curves["tpe"][0][0], "curves": curves}


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for sampler, curves in found["curves"].items():
        shares = np.array(curves) / found["best_known_per_s"]
        cells = [_quartiles(shares[:, trial - 1]) for trial in SHOWN_TRIALS]
        firsts = [next((i for i, share in enumerate(curve, start=1) if share >= CLOSE), None) for curve in shares]
        reached = [first for first in firsts if first is not None]
        yield [sampler, *cells, f"{len(reached)} of {len(curves)}", f"{np.median(reached):g}" if reached else ""]


def _quartiles(shares: np.ndarray) -> str:
    low, middle, high = 100 * np.quantile(shares, (0.25, 0.5, 0.75))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def draw(results: dict[str, Any], path: Path) -> None:
    figure, panels = plt.subplots(1, len(results), figsize=(6.5 * len(results), 4.5))
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        for sampler, curves in found["curves"].items():
            trials = range(1, NUM_TRIALS + 1)
            low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=0)
            axes.plot(trials, middle, color=COLOURS[sampler], label=sampler)
            axes.fill_between(trials, low, high, color=COLOURS[sampler], alpha=0.15)
        axes.axhline(found["best_known_per_s"], color="black", linestyle=":", linewidth=1, label="best known")
        axes.axvline(startup_trials(NUM_TRIALS), color="black", linewidth=0.6, alpha=0.5)
        axes.set(xlabel="trials", ylabel="highest rate held so far, requests/s", title=f"{name}, simulated")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"median and quartiles of {len(SEEDS)} seeds; tpe and gp learn from the line on", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)  # A GP of a few dozen points is slower with more.
    results = {}
    for name in NUM_REQUESTS:
        results[name] = studies(Surface.of(name), name)
        plot = write("samplers", {"space": SPACE, "num_trials": NUM_TRIALS, "num_seeds": len(SEEDS),
                                  "surfaces": results})
    for name, found in results.items():
        print(f"{name}: best known {found['best_known_per_s']:.2f} req/s, base {found['base_per_s']:.2f}; of "
              f"{found['num_configurations']} configurations {found['share_holding_nothing']:.0%} hold nothing")
        print_table(["sampler", *(f"best after {trial}, % of best known" for trial in SHOWN_TRIALS),
                     f"reached {CLOSE:.0%}", "median trial then"], list(rows(found)))
    draw(results, plot)


if __name__ == "__main__":
    main()
