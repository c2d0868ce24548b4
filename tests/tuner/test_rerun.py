"""`servekit verify --rerun`, over an engine that answers at once and says when it would have answered.

The limits are minutes, so that nothing depends on how fast or how busy this machine is.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from servekit.config.errors import ConfigError
from servekit.config.schema import Config
from servekit.load.target import Observation
from servekit.load.workload import WorkloadRequest
from servekit.sim.fitted import TimedStep
from servekit.tuner import executor, rerun
from servekit.tuner.certificate import NAME, RERUN, Circumstances, ExitCode, certify, main, verify
from servekit.tuner.confirmation import Confirmation, Confirmed, Finalist, Rules
from servekit.tuner.executor import Description, EngineFailed, RunLength, Warm
from servekit.tuner.judgement import Role
from servekit.tuner.launch import Configuration
from servekit.tuner.rerun import RERUNS
from servekit.tuner.run_log import read_run
from servekit.tuner.slo import parse_slo
from servekit.tuner.trial import Ending
from tuner_runs import PLAN, VOCAB_SIZE, FakeEngine, config_with

LIMIT_S = 200.0
SLO = parse_slo({"ttft": {"p90": "200s"}, "tpot": {"p90": "100s"}})
TUNED, DEFAULT = config_with(16), config_with(8)
NUM_REQUESTS, RATE_PER_S = 12, 400.0
RULES = Rules(RunLength(NUM_REQUESTS, 0.0), max_rounds=2)


@dataclass
class InstantHost:
    """A `Host` and its target. `ttft_s` is what a configuration's answers say of themselves."""

    ttft_s: Callable[[Config], float]
    fails: Callable[[Config], bool] = lambda config: False
    is_live: bool = True
    steps: list[TimedStep] = field(default_factory=list)
    bounds: Mapping[str, int] = field(default_factory=dict)
    description: Description = field(default_factory=lambda: Description("tiny", "nowhere", 256, VOCAB_SIZE, {}))
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    started: list[Config] = field(default_factory=list)

    @property
    def target(self) -> InstantHost:
        return self

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        self.prompts.append(tuple(request.prompt_token_ids))
        first_s = time.monotonic() + self.ttft_s(self.started[-1])
        for i in range(request.output_tokens):
            is_last = i + 1 == request.output_tokens
            yield Observation(first_s, True, output_tokens=i + 1, cached_tokens=0,
                              finish_reason="length" if is_last else None)

    def processes(self) -> Sequence[int]:
        return ()

    async def prepare(self, config: Configuration, *, cold: bool) -> Warm:
        assert isinstance(config, Config) and cold, "each run has a fresh process"
        if self.fails(config):
            raise EngineFailed(Ending.hung, "it was not ready in time")
        self.started.append(config)
        return Warm.cold

    def begin_run(self) -> None:
        pass

    async def end_run(self, is_disturbed: bool) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture
def certificate(made: Path, tmp_path: Path) -> Path:
    """A copy that may be altered."""
    shutil.copytree(made.parent, tmp_path / "certified")
    return tmp_path / "certified" / NAME


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tuned configuration held at a rate at which the default's queue grew without end."""
    folder = tmp_path_factory.mktemp("certified")
    finalists = (Finalist("trial 3", Role.tuned, TUNED, RATE_PER_S), Finalist("default", Role.default, DEFAULT, 50.0))
    engine = FakeEngine(folder, lambda config: 1e4 if config == TUNED else 0.01, slo=SLO)
    return certified(folder, Confirmation(SLO, finalists, engine, RULES).run())


def certified(folder: Path, confirmed: Confirmed) -> Path:
    certify(folder, SLO, PLAN, confirmed, {}, [], Circumstances((), {}, {}, "2024-05-01T10:00:00+00:00"))
    return folder / NAME


class UnknownUse:
    """Of a machine that cannot tell what else it does: tests run beside others."""

    def __init__(self, processes: Callable[[], Sequence[int]]) -> None:
        pass

    def start(self) -> None:
        pass

    def share_of_others(self) -> None:
        return None


@pytest.fixture
def run_again(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`servekit verify certificate.json --rerun` over a host: exit status and what it says."""
    monkeypatch.setattr(executor, "MachineUse", UnknownUse)

    def call(host: InstantHost) -> tuple[int, str]:
        said: list[str] = []
        monkeypatch.setattr(rerun, "engine_for", lambda base: host)
        return main([str(certificate), RERUN], lambda line: said.append(str(line))), "\n".join(said)

    return call


def slow_where(config: Config) -> Callable[[Config], float]:
    return lambda found: 10 * LIMIT_S if found == config else 0.0


def test_who_wins_is_measured_again_beside_the_default(certificate: Path, run_again: Callable[..., tuple[int, str]]
                                                       ) -> None:
    host = InstantHost(slow_where(DEFAULT))
    status, said = run_again(host)
    assert status == ExitCode.ok, said
    assert said.endswith("the winner holds the objective again")
    assert (f"on new arrivals: trial 3, {NUM_REQUESTS} requests at 400.00 req/s, "
            f"default, {NUM_REQUESTS} requests at 50.00 req/s") in said
    assert "trial 3 at 400.00 req/s: holds" in said and "default at 50.00 req/s: fails" in said
    assert host.started == [TUNED, DEFAULT, DEFAULT, TUNED, DEFAULT]
    assert verify(certificate).problems == [], "the new logs lie beside it, and nothing of it has changed"


def test_it_fails_when_the_winner_does_not_hold_again(run_again: Callable[..., tuple[int, str]]) -> None:
    status, said = run_again(InstantHost(slow_where(TUNED)))
    assert status == ExitCode.failed
    assert "trial 3 at 400.00 req/s: fails" in said and said.endswith("the winner does NOT hold the objective again")


def test_it_fails_when_the_winner_does_not_even_start(run_again: Callable[..., tuple[int, str]]) -> None:
    status, said = run_again(InstantHost(slow_where(DEFAULT), lambda config: config == TUNED))
    assert status == ExitCode.failed
    assert "trial 3: hung: it was not ready in time" in said and said.endswith("does NOT hold the objective again")


def test_what_becomes_of_the_default_does_not_matter(run_again: Callable[..., tuple[int, str]]) -> None:
    assert run_again(InstantHost(lambda config: 0.0, lambda config: config == DEFAULT))[0] == ExitCode.ok


def test_no_rerun_sends_what_another_has_sent(certificate: Path, run_again: Callable[..., tuple[int, str]]) -> None:
    hosts = [InstantHost(slow_where(DEFAULT)) for _ in range(2)]
    for host in hosts:
        assert run_again(host)[0] == ExitCode.ok
    first, second = (set(host.prompts) for host in hosts)
    assert first and second and not first & second
    logs = [*(certificate.parent / RERUNS).glob("*.json"), *(certificate.parent / "runs").glob("*.json")]
    arrivals = {(run.stream, run.rate_per_s, round(run.measured[0].intended_s, 6)) for run in map(read_run, logs)}
    told_apart = {(stream, rate_per_s) for stream, rate_per_s, _ in arrivals}
    assert len(arrivals) == 3 * len(told_apart), "each stream and rate once in the certificate and once in each rerun"


def test_nothing_is_measured_for_a_certificate_that_was_altered(certificate: Path, capsys: pytest.CaptureFixture[str],
                                                                run_again: Callable[..., tuple[int, str]]) -> None:
    certificate.write_bytes(certificate.read_bytes().replace(b'"trial 3"', b'"trial 4"'))
    host = InstantHost(lambda config: 0.0)
    status, said = run_again(host)
    assert status == ExitCode.failed and "proves nothing" in said and not host.started
    assert "was altered" in capsys.readouterr().err


def test_where_nothing_won_there_is_nothing_to_measure(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    folder.mkdir()
    engine = FakeEngine(folder, lambda config: 0.01, slo=SLO)
    finalists = [Finalist("default", Role.default, DEFAULT, RATE_PER_S)]
    lost = Confirmation(SLO, finalists, engine, RULES).run()
    with pytest.raises(ConfigError, match="names no winner to measure again; tune again"):
        main([str(certified(folder, lost)), RERUN], lambda line: None)
