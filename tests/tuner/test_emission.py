"""tuned.yaml composes to the configuration that won, wherever it is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError
from servekit.config.resolve import config_hash
from servekit.tuner.confirmation import Confirmation, Finalist, Rules
from servekit.tuner.emission import TunedFor, hash_of_layer, layer_of, results_of, tuned_yaml
from servekit.tuner.executor import RunLength
from servekit.tuner.judgement import Role
from tuner_runs import SLO, FakeEngine, config_with

FOR = TunedFor("ttft.p99 <= 2s", "chat", "SmolLM2-135M", "cpu", "2024-05-01", ("confirmed: 3 requests per second",))
BASE = ("+preset=interactive", "model=smollm2-135m")


def layer(base: Sequence[str], *found: str) -> dict[str, object]:
    return layer_of(compose_serve([*base, *found]).config, base)


def test_only_what_differs_is_written() -> None:
    assert layer(BASE) == {"preset": "interactive", "model": "smollm2-135m"}
    assert layer(BASE, "scheduler.max_num_seqs=64", "scheduler.max_step_tokens=256") == {
        "preset": "interactive", "model": "smollm2-135m", "scheduler": {"max_num_seqs": 64}}
    assert layer((), "scheduler/policy=sjf", "scheduler.policy.ageing_tokens_per_s=5") == {
        "scheduler/policy": "sjf", "scheduler": {"policy": {"ageing_tokens_per_s": 5.0}}}
    assert layer(("scheduler/policy=sjf",), "scheduler/policy=fifo") == {"scheduler/policy": "fifo"}
    assert layer(("model=smollm2-135m",), "model.max_model_len=512", "scheduler.prefill.chunk_tokens=null")[
        "model.max_model_len"] == 512


def test_a_model_of_ones_own_and_what_the_default_model_would_add() -> None:
    found = layer(("model.source=dummy:tiny", "model.max_model_len=256"))
    assert found["model"] == {"source": "dummy:tiny", "max_model_len": 256}


def test_groups_that_contradict_each_other_without_the_rest() -> None:
    base = ("+preset=sarathi", "scheduler/policy=mlfq", "scheduler.preemption.victim=policy")
    config = compose_serve([*base, "scheduler.max_num_seqs=4"]).config
    with pytest.raises(ConfigError, match="victim"):
        compose_serve(base[:2])
    assert hash_of_layer(tuned_yaml(config, base, FOR)) == config_hash(config)


CHOICES = st.fixed_dictionaries({}, optional={
    "+preset": st.sampled_from(["interactive", "batch", "sarathi", "[interactive,economy]"]),
    "model": st.just("smollm2-135m"), "model.max_model_len": st.integers(16, 4096),
    "scheduler/policy": st.sampled_from(["fifo", "sjf", "vtc", "mlfq"]),
    "scheduler/prefix_cache": st.sampled_from(["none", "hash", "radix"]),
    "scheduler/preemption": st.sampled_from(["recompute", "swap"]),
    "scheduler/prefill": st.sampled_from(["chunked", "whole"]),
    "scheduler.max_num_seqs": st.sampled_from([1, 8, 32]), "scheduler.admission.watermark": st.floats(0.0, 0.2),
    "memory.num_kv_blocks": st.none() | st.integers(64, 4096), "engine.threads": st.none() | st.integers(1, 4),
    "server.port": st.integers(1024, 9000), "scheduler.tenants.weights": st.just("{a: 2.0, b: 1.0}")})


def words(choices: dict[str, object]) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in choices.items()]


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(base=CHOICES, found=CHOICES)
def test_it_composes_to_the_same_hash(base: dict[str, object], found: dict[str, object]) -> None:
    found = {key: value for key, value in found.items() if key not in ("+preset", "model")}
    try:
        config = compose_serve([*words(base), *words(found)]).config
    except ConfigError:
        return
    text = tuned_yaml(config, words(base), FOR)
    assert hash_of_layer(text) == config_hash(config)
    assert f"# configuration: {config_hash(config)}" in text


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    config = compose_serve([*BASE, "scheduler/policy=sjf", "scheduler.max_num_seqs=64"]).config
    text = tuned_yaml(config, BASE, FOR)
    (tmp_path / "tuned.yaml").write_text(text)
    out = subprocess.run([sys.executable, "-m", "servekit", "config", "tuned.yaml"], cwd=tmp_path, text=True,
                         capture_output=True, check=True).stdout
    assert f"# configuration {config_hash(config)}" in out
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for said in (FOR.slo, FOR.workload, FOR.model, FOR.device, FOR.date, *FOR.results):
        assert any(said in line for line in comments), said
    assert str(Path.home()) not in text
    assert yaml.safe_load(text) == layer_of(config, BASE)


def test_a_model_that_is_a_file_is_pointed_out(tmp_path: Path) -> None:
    config = compose_serve([f"model.source={tmp_path}/model.gguf"]).config
    assert "a file of the machine that was tuned" in tuned_yaml(config, (), FOR)


def test_results_name_the_rate_the_bounds_and_the_default(tmp_path: Path) -> None:
    finalists = (Finalist("trial 1", Role.tuned, config_with(16), 6.0),
                 Finalist("default", Role.default, config_with(8), 2.5))
    engine = FakeEngine(tmp_path, lambda config: 10.0 if config.scheduler.max_num_seqs == 16 else 5.0)
    judgement = Confirmation(SLO, finalists, engine, Rules(RunLength(100, 0.0), max_rounds=2)).run().judgement
    lines = results_of(judgement)
    assert lines[0] == "confirmed: 6 requests per second"
    assert lines[1].startswith("ttft.p95: ") and "95 % confidence" in lines[1]
    assert lines[-1] == ("the default was confirmed at 2.5 requests per second: 2.40 times as many, at least 1.00, at "
                         "most no known factor")


def test_a_default_that_holds_nothing_gives_the_factor_a_lower_bound(tmp_path: Path) -> None:
    finalists = (Finalist("trial 1", Role.tuned, config_with(16), 6.0),
                 Finalist("default", Role.default, config_with(8), 2.5))
    engine = FakeEngine(tmp_path, lambda config: 10.0 if config.scheduler.max_num_seqs == 16 else 1.0)
    lines = results_of(Confirmation(SLO, finalists, engine, Rules(RunLength(100, 0.0), max_rounds=2)).run().judgement)
    assert lines[-1] == ("the default held at no rate that was tried; the lowest is 2.5 requests per second, so the "
                         "confirmed rate is more than 2.40 times its own")
