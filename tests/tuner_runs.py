"""Runs of an engine that is a queue: one server of a known capacity, so that a test knows who must hold what."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from servekit.config.bench import BenchConfig, FixedWorkloadConfig, PoissonArrivalConfig
from servekit.config.compose import compose_serve
from servekit.config.schema import Config
from servekit.load.metrics import RequestLatencies
from servekit.load.records import RequestRecord
from servekit.load.target import Failure, FailureKind
from servekit.load.workload import WorkloadRequest
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.measure import Measurement, Problem
from servekit.tuner.run_log import LoggedRequest, RunLog
from servekit.tuner.slo import Slo, parse_slo
from servekit.tuner.verdict import Tally, Verdict

BENCH = BenchConfig(workload=FixedWorkloadConfig(prompt_tokens=16, output_tokens=4), arrival=PoissonArrivalConfig(),
                    warmup_requests=2)
PLAN = LoadPlan(BENCH, seed=7, warmup_requests=2, timeout_s=60.0)
SLO = parse_slo({"ttft": {"p95": "1s"}, "tpot": {"p95": "300ms"}})
TOKEN_S, VOCAB_SIZE = 0.02, 2000


def config_with(num_seqs: int) -> Config:
    """A configuration that is told apart by one setting."""
    return compose_serve(["model.source=dummy:tiny", f"scheduler.max_num_seqs={num_seqs}"]).config


@dataclass
class FakeEngine:
    """A Measurer. `capacity_per_s` is the rate at which a configuration's queue grows without end."""

    folder: Path
    capacity_per_s: Callable[[Config], float]
    slo: Slo = SLO
    plan: LoadPlan = PLAN
    problems: Callable[[Config, str], Iterable[Problem]] = lambda config, stream: ()
    fails: Callable[[WorkloadRequest, str], bool] = lambda request, stream: False
    calls: list[tuple[int, float, str]] = field(default_factory=list)
    """max_num_seqs, rate and stream of every run."""

    def measure_at(self, config: Config, rate_per_s: float, num_requests: int, stream: str, *, cold: bool,
                   stops_early: bool) -> tuple[Measurement, Path]:
        assert not stops_early
        self.calls.append((config.scheduler.max_num_seqs, rate_per_s, stream))
        load = self.plan.load(rate_per_s, num_requests, stream, VOCAB_SIZE)
        records, free_s = list[RequestRecord](), 0.0
        for request in load.requests:
            assert request.arrival_s is not None
            free_s = max(free_s, request.arrival_s) + 1 / self.capacity_per_s(config)
            records.append(self._record(request, free_s, stream))
        measured = Measurement(Verdict.undecided, (), records, records[-1].ended_s,
                               tuple(self.problems(config, stream)), is_stopped_early=False)
        measured = self._judged(measured, num_requests)
        path = self.folder / "runs" / f"{len(self.calls):04}.json"
        RunLog(rate_per_s, stream, "cold", num_requests, load.warmup_requests, config, measured).write(path)
        return measured, path

    def _record(self, request: WorkloadRequest, first_s: float, stream: str) -> RequestRecord:
        assert request.arrival_s is not None
        failure = Failure(FailureKind.stream, "lost") if self.fails(request, stream) else None
        count = 0 if failure else request.output_tokens
        times_s = array("d", (first_s + TOKEN_S * i for i in range(count)))
        return RequestRecord(
            request.index, "", request.index < self.plan.warmup_requests, len(request.prompt_token_ids),
            request.output_tokens, request.arrival_s, request.arrival_s, times_s[-1] if count else first_s, times_s,
            array("q", [1] * count), len(request.prompt_token_ids), count, 0, "length", failure)

    def _judged(self, measured: Measurement, num_requests: int) -> Measurement:
        latencies = [LoggedRequest.of(record).latencies for record in measured.records if not record.is_warmup]
        return replace(measured, verdict=Verdict.holds if self.slo.holds(latencies) else Verdict.fails,
                       tallies=tuple(self._tallies(latencies, num_requests)))

    def _tallies(self, latencies: list[RequestLatencies | None], num_requests: int) -> Iterable[Tally]:
        for promise, missed in zip(self.slo.promises, self.slo.misses(latencies), strict=True):
            yield Tally(promise, num_requests, num_requests, missed, 0)
