"""Workloads: lengths, shared prefixes, reproducibility; and the traces that they replay."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config.bench import (
    AzureWorkloadConfig,
    FixedWorkloadConfig,
    LognormalWorkloadConfig,
    MooncakeWorkloadConfig,
    SharedPrefixWorkloadConfig,
    WorkloadConfig,
)
from servekit.config.errors import ConfigError
from servekit.load.workload import ConfiguredWorkload, Vocabulary, WorkloadRequest, scaled

VOCABULARY = Vocabulary(100, 2000)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,400,10
2023-11-16 18:17:04.4799600,31,8
2023-11-16 18:17:06.9799600,110,27
"""


def make(config: WorkloadConfig, number: int | None = None, seed: int = 1) -> list[WorkloadRequest]:
    return list(islice(ConfiguredWorkload(config, VOCABULARY, seed), number))


def mooncake_line(timestamp: int, prompt: int, output: int, hash_ids: list[int]) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output,
                       "hash_ids": hash_ids}) + "\n"


def common_prefix(a: WorkloadRequest, b: WorkloadRequest) -> int:
    pairs = zip(a.prompt_token_ids, b.prompt_token_ids, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.prompt_token_ids), len(b.prompt_token_ids)))


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.mark.parametrize("config", [FixedWorkloadConfig(), LognormalWorkloadConfig(), SharedPrefixWorkloadConfig(),
                                    LognormalWorkloadConfig(num_tenants=3)])
def test_seed_decides_everything(config: WorkloadConfig) -> None:
    assert make(config, 20, seed=1) == make(config, 20, seed=1)
    assert make(config, 20, seed=1) != make(config, 20, seed=2)


def test_a_longer_window_starts_with_the_shorter_one() -> None:
    assert make(LognormalWorkloadConfig(), 30)[:10] == make(LognormalWorkloadConfig(), 10)


def test_prompts_are_unlike_each_other_and_within_the_vocabulary() -> None:
    requests = make(FixedWorkloadConfig(prompt_tokens=64), 50)
    assert len({tuple(r.prompt_token_ids) for r in requests}) == 50
    assert all(100 <= token < 2000 for r in requests for token in r.prompt_token_ids)
    assert {(len(r.prompt_token_ids), r.output_tokens, r.arrival_s, r.tenant) for r in requests} == {
        (64, 64, None, "")}


def test_lognormal_lengths_have_the_median_and_keep_the_limit() -> None:
    config = LognormalWorkloadConfig(prompt_median_tokens=100, prompt_sigma=0.5, max_prompt_tokens=1000,
                                     output_median_tokens=50, output_sigma=1.0, max_output_tokens=60)
    requests = make(config, 2000)
    prompts = np.array([len(r.prompt_token_ids) for r in requests])
    outputs = np.array([r.output_tokens for r in requests])
    assert np.median(prompts) == pytest.approx(100, rel=0.06)
    assert np.log(prompts).std() == pytest.approx(0.5, rel=0.06)
    assert outputs.max() <= 60
    assert (outputs == 60).mean() < 0.05, "draws above the limit must not pile up at it"


def test_shared_prefixes_are_equal_and_suffixes_are_not() -> None:
    requests = make(SharedPrefixWorkloadConfig(num_prefixes=3, prefix_tokens=40, suffix_tokens=8), 100)
    assert len({tuple(r.prompt_token_ids[:40]) for r in requests}) == 3
    assert len({tuple(r.prompt_token_ids[40:]) for r in requests}) == 100


def test_tenants_are_spread() -> None:
    tenants = [r.tenant for r in make(FixedWorkloadConfig(num_tenants=4), 200)]
    assert set(tenants) == {"tenant-0", "tenant-1", "tenant-2", "tenant-3"}


def test_classes_have_their_shares() -> None:
    requests = make(FixedWorkloadConfig(priorities={0: 1, 5: 3}), 4000)
    assert {r.priority for r in requests} == {0, 5}
    assert sum(r.priority == 5 for r in requests) == pytest.approx(3000, rel=0.05)
    assert {r.priority for r in make(FixedWorkloadConfig(), 5)} == {None}


def test_predictions_are_exact_or_err_as_they_are_told_to() -> None:
    requests = make(LognormalWorkloadConfig(prediction_sigma=0), 200)
    assert [r.predicted_output_tokens for r in requests] == [r.output_tokens for r in requests]
    long = make(FixedWorkloadConfig(output_tokens=1000, prediction_sigma=0.5), 2000)
    errors = np.log([(r.predicted_output_tokens or 0) / r.output_tokens for r in long])
    assert errors.max() == 0.0, "nothing is predicted beyond max_tokens"
    assert np.quantile(errors, 0.1) == pytest.approx(-1.2816 * 0.5, rel=0.1)
    assert {r.predicted_output_tokens for r in make(FixedWorkloadConfig(), 5)} == {None}


def test_classes_and_predictions_change_nothing_else() -> None:
    plain = make(LognormalWorkloadConfig(num_tenants=3), 50)
    rich = make(LognormalWorkloadConfig(num_tenants=3, priorities={1: 1}, prediction_sigma=1), 50)
    assert [(r.prompt_token_ids, r.output_tokens, r.tenant) for r in plain] == [
        (r.prompt_token_ids, r.output_tokens, r.tenant) for r in rich]


@given(st.integers(1, 10_000), st.floats(0.001, 10))
def test_scaled_lengths_are_rounded_and_never_zero(tokens: int, scale: float) -> None:
    assert scaled(tokens, scale) == max(1, round(tokens * scale))


def test_azure_lengths_and_times(azure: Path) -> None:
    requests = make(AzureWorkloadConfig(path=str(azure), length_scale=0.1))
    assert [(len(r.prompt_token_ids), r.output_tokens) for r in requests] == [(40, 1), (3, 1), (11, 3)]
    assert [r.arrival_s for r in requests] == [0.0, 0.5, 3.0]


def test_azure_times_with_a_zone(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,4,1\n"
                    "2024-05-10 00:00:02+00:00,4,1\n")
    assert [r.arrival_s for r in make(AzureWorkloadConfig(path=str(path)))] == [0.0, 1.5]


def test_further_columns_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Tenant,Priority,PredictedTokens\n"
                    "2024-05-10 00:00:00,4,10,alice,2,20\n2024-05-10 00:00:02,4,10,,,\n")
    config = AzureWorkloadConfig(path=str(path), length_scale=0.5)
    said = [(r.tenant, r.priority, r.predicted_output_tokens) for r in make(config)]
    assert said == [("alice", 2, 5), ("", None, None)]
    for asked in ({"num_tenants": 2}, {"priorities": {0: 1.0}}, {"prediction_sigma": 0.0}):
        with pytest.raises(ConfigError, match=rf"workload\.{next(iter(asked))}=.*the trace itself says so"):
            make(AzureWorkloadConfig(path=str(path), **asked))  # type: ignore[arg-type]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Priority\n2024-05-10 00:00:00,4,10,-1\n")
    assert [(r.tenant, r.priority) for r in make(AzureWorkloadConfig(path=str(path), num_tenants=1))] == [
        ("tenant-0", -1)]
    lines = [{"timestamp": 0, "input_length": 5, "output_length": 9, "hash_ids": [0], "tenant": "bob", "priority": 3,
              "predicted_length": 4}, {"timestamp": 1, "input_length": 5, "output_length": 9, "hash_ids": [0]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r.tenant, r.priority, r.predicted_output_tokens)
            for r in make(MooncakeWorkloadConfig(path=str(path)))] == [("bob", 3, 4), ("", None, None)]


@pytest.mark.parametrize("header", ["Tenant,Colour", "Priority,Tenant", "Tenant,Tenant"])
def test_unknown_columns_of_a_trace_are_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens,{header}\n")
    with pytest.raises(ConfigError, match=r":1: the columns are .* and any of Tenant,Priority,PredictedTokens"):
        make(AzureWorkloadConfig(path=str(path)))


@pytest.mark.parametrize(("line", "reason"), [
    ("2023-11-16 18:17:07,4", "it has 2 fields, not 3"),
    ("yesterday,4,1", "Invalid isoformat"),
    ("2023-11-16 18:17:07,four,1", "invalid literal"),
    ("2023-11-16 18:17:07,0,1", "must be at least 1"),
    ("2023-11-16 18:17:07,4,-1", "must be at least 1"),
    ("2023-11-16 18:17:05,4,1", "before that of the line above"),
])
def test_bad_azure_line_names_file_line_and_reason(azure: Path, line: str, reason: str) -> None:
    azure.write_text(AZURE + line + "\n")
    with pytest.raises(ConfigError) as caught:
        make(AzureWorkloadConfig(path=str(azure)))
    message = str(caught.value)
    assert message.startswith(f"workload.path={azure}:5: ")
    assert reason in message
    assert "\n" not in message
    assert len(make(AzureWorkloadConfig(path=str(azure)), 3)) == 3, "a window that ends before it is fine"


@pytest.mark.parametrize("content", ["", "TIMESTAMP,ContextTokens\n", "a,b,c\n"])
def test_azure_columns_are_checked(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r":1: the columns are"):
        make(AzureWorkloadConfig(path=str(path)))


@pytest.mark.parametrize("config", [AzureWorkloadConfig, MooncakeWorkloadConfig])
def test_missing_trace_is_one_line(tmp_path: Path, config: type[AzureWorkloadConfig]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make(config(path=str(tmp_path / "none")))


@pytest.mark.parametrize("scale", [1.0, 0.37, 0.1, 0.003, 2.5])
def test_equal_mooncake_ids_give_equal_prefixes(tmp_path: Path, scale: float) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(0, 512 * 3 + 100, 10, [0, 1, 2, 3]) + mooncake_line(500, 512 * 3, 10, [0, 1, 9])
                    + mooncake_line(2500, 600, 10, [7, 8]) + mooncake_line(2500, 512 * 3 + 100, 20, [0, 1, 2, 3]))
    first, second, third, again = make(MooncakeWorkloadConfig(path=str(path), length_scale=scale))
    assert [r.arrival_s for r in (first, second, third, again)] == [0.0, 0.5, 2.5, 2.5]
    assert [len(r.prompt_token_ids) for r in (first, second, third)] == [
        scaled(n, scale) for n in (512 * 3 + 100, 512 * 3, 600)]
    assert first.prompt_token_ids == again.prompt_token_ids
    assert common_prefix(first, second) >= round(1024 * scale), "two blocks are shared"
    if scale >= 0.1:
        assert common_prefix(first, second) < round(1024 * scale) + 8, "and no more than two"
        assert common_prefix(first, third) < 8


def test_mooncake_prompts_change_with_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(0, 600, 10, [0, 1]))
    config = MooncakeWorkloadConfig(path=str(path))
    assert common_prefix(make(config, seed=1)[0], make(config, seed=2)[0]) < 8


@pytest.mark.parametrize(("line", "reason"), [
    ("{", "truncated"),
    ('{"timestamp": 9, "input_length": 5, "output_length": 1}', "hash_ids"),
    ('{"timestamp": 9, "input_length": "5", "output_length": 1, "hash_ids": [0]}', "input_length"),
    (mooncake_line(9, 513, 1, [0]), "makes 2 blocks of 512 tokens, but it has 1 hash_ids"),
    (mooncake_line(9, 5, 0, [0]), "must be at least 1"),
    (mooncake_line(9, 5, 1, [-4]), "hash id -4 is negative"),
    (mooncake_line(1, 5, 1, [0]), "before that of the line above"),
])
def test_bad_mooncake_line_names_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(0, 5, 1, [0]) + mooncake_line(5, 5, 1, [0]) + line)
    with pytest.raises(ConfigError) as caught:
        make(MooncakeWorkloadConfig(path=str(path)))
    assert str(caught.value).startswith(f"workload.path={path}:3: ")
    assert reason in str(caught.value)


def test_a_trace_is_read_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(0, 5, 1, [0]) + "{broken")
    requests = iter(ConfiguredWorkload(MooncakeWorkloadConfig(path=str(path)), VOCABULARY, seed=1))
    assert next(requests).output_tokens == 1
    with pytest.raises(ConfigError):
        next(requests)


@pytest.fixture
def traces() -> Path:
    """The folder with the real traces, named by SERVEKIT_TEST_TRACES; skips the test where it is not at hand."""
    named = os.environ.get("SERVEKIT_TEST_TRACES")
    if not named:
        pytest.skip("needs real traces: set SERVEKIT_TEST_TRACES to a folder with azure_llm_2023_conv.csv and "
                    "mooncake_conversation.jsonl")
    return Path(named)


def test_real_traces_are_read(traces: Path) -> None:
    conversation = make(AzureWorkloadConfig(path=str(traces / "azure_llm_2023_conv.csv"), length_scale=0.05), 2000)
    assert [len(r.prompt_token_ids) for r in conversation[:3]] == [scaled(n, 0.05) for n in (374, 396, 879)]
    shared = make(MooncakeWorkloadConfig(path=str(traces / "mooncake_conversation.jsonl"), length_scale=0.05), 2000)
    assert len(shared) == 2000
    assert common_prefix(shared[0], shared[1]) >= 25
