"""Settings: each one reaches what it is about, and one that cannot hold stops the start with a line that helps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.configurations import TINY, left_as_found
from faults.outputs import greedy, output, random_ids
from faults.serving import CHAT, COMPLETIONS, Served, refusal, served
from servekit import cli

LINE = re.compile(r"servekit: (?P<key>[\w.]+)=(?P<value>[^:]*): (?P<limit>.+); (?P<remedy>.+)")
"""How every refusal of a setting reads."""


@pytest.mark.parametrize(("settings", "key", "words"), [
    (("model.max_model_len=2048", "memory.num_kv_blocks=16"), "model.max_model_len",
     ["2048", "256", "memory.num_kv_blocks"]),
    (("memory.num_kv_blocks=1000000000",), "memory.num_kv_blocks", ["GB", "free"]),
    ((f"engine.threads={(os.cpu_count() or 1) + 1}",), "engine.threads", ["cores"]),
    (("scheduler.prefill.chunk_tokens=513",), "scheduler.prefill.chunk_tokens", ["512"]),
    (("scheduler.max_num_seqs=600",), "scheduler.max_step_tokens", ["600"]),
    (("server.api_key_env=NO_SUCH_VARIABLE",), "server.api_key_env", ["NO_SUCH_VARIABLE"]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_hold_stops_the_start_in_one_line(folder: Path, settings: tuple[str, ...], key: str,
                                                      words: list[str]) -> None:
    """A04, B18, H04, H06: key, value, limit with numbers, and the remedy; status 2; no traceback."""
    base = [setting for setting in TINY if setting.partition("=")[0] not in {one.partition("=")[0] for one in settings}]
    status, line = refusal(folder, *base, *settings)
    found = LINE.fullmatch(line)
    assert status == 2 and found and found["key"] == key, line
    assert all(word in line for word in words), line
    assert "Traceback" not in (folder / "server.log").read_text()


def test_a_length_that_only_the_model_declares_is_lowered_and_said(folder: Path) -> None:
    """A04, H06: old and new value in the log and in /server_info, and the new one is what /v1/models advertises."""
    with served(folder, *TINY, "memory.num_kv_blocks=16") as server:
        assert "model.max_model_len: 2048 -> 256" in server.log
        assert any("2048 -> 256" in note for note in server.info["engine"]["notes"])
        assert server.get("/v1/models").json["data"][0]["max_model_len"] == 256
        assert server.post(COMPLETIONS, greedy(random_ids(1, 255), 1)).status == 200
        assert server.post(COMPLETIONS, greedy(random_ids(1, 256), 1)).status == 400
        server.check_idle()


LIMITS = ["scheduler.max_num_seqs", "scheduler.max_step_tokens", "scheduler.prefill.chunk_tokens",
          "scheduler.admission.max_queue_requests", "scheduler.admission.max_queue_tokens",
          "scheduler.admission.queue_timeout_s", "scheduler.admission.request_timeout_s", "model.max_model_len",
          "memory.num_kv_blocks", "memory.block_size_tokens", "server.max_choices", "server.max_body_bytes",
          "engine.threads", "engine.heartbeat_timeout_s", "engine.startup_timeout_s"]


@pytest.mark.parametrize("key", LIMITS)
@pytest.mark.parametrize("value", ["0", "-1", "x", "[1]", "nan"])
def test_zero_and_less_are_never_a_limit(key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """H04: null may mean no limit, 0 and -1 never do, and nothing that is not a number passes; the line helps."""
    assert cli.main(["config", "model.source=dummy:tiny", f"{key}={value}"]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"servekit: {key}=") and "\n" not in line and LINE.fullmatch(line), line


@pytest.mark.parametrize("key", LIMITS)
def test_null_is_no_limit_or_derived_where_the_key_says_so_and_refused_elsewhere(
        key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """H04: one rule for every limit."""
    status = cli.main(["config", "model.source=dummy:tiny", f"{key}=null"])
    line = capsys.readouterr().err.strip()
    assert status == 0 or (status == 2 and line.startswith(f"servekit: {key}=null: ")), line


@pytest.mark.parametrize("setting", [
    "scheduler.max_num_seq=3", "+scheduler.max_num_seq=3", "scheduler.policy.ageing_s=3",
    "scheduler.preemption.swap_bytes=3", "engine.graph_buckets=[1,2]", "servr.port=1", "scheduler/policy=sjff",
    "scheduler.policy.kind=sjff"])
def test_a_misspelt_or_inactive_option_stops_the_start(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """H05, H06: unknown keys, options of components that are not chosen or not there, and unknown components."""
    assert cli.main(["config", "model.source=dummy:tiny", setting]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("servekit: ") and "\n" not in line


TEMPLATE = """{% for message in messages %}{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}
{{ raise_exception('roles must alternate') }}{% endif %}[{{ message.content }}]{% endfor %}"""


@pytest.fixture(scope="module")
def altered_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server in which every setting that can be seen from outside has another value than the default."""
    folder = tmp_path_factory.mktemp("altered")
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = (
        "model.source=dummy:tiny", "model.name=altered", "model.dtype=float64", "model.seed=5",
        "model.max_model_len=200",
        f"model.chat_template={folder / 'template.jinja'}", "engine.threads=1", "memory.block_size_tokens=8",
        "memory.num_kv_blocks=75", "scheduler.max_num_seqs=3", "scheduler.max_step_tokens=40",
        "scheduler.prefill.chunk_tokens=20", "scheduler/prefix_cache=none", "scheduler.admission.max_queue_requests=6",
        "scheduler.admission.max_queue_tokens=500", "server.port=0", "server.max_choices=5", "server.max_logprobs=3",
        "server.max_body_bytes=4096", "server.unknown_fields=refuse", "server.log_format=json",
        "server.api_key_env=SERVEKIT_TEST_KEY", "server.stats_interval_s=0.2")
    with served(folder, *settings, environment={"SERVEKIT_TEST_KEY": "secret"}) as server:
        server.headers["authorization"] = "Bearer secret"
        yield server


@pytest.fixture
def altered(altered_server: Served) -> Iterator[Served]:
    yield from left_as_found(altered_server)


def test_every_setting_has_its_effect(altered: Served, roomy: Served) -> None:
    """H05: one visible change of behaviour for each."""
    body = greedy([1, 2, 3], 5)
    answer, other = altered.post(COMPLETIONS, body), roomy.post(COMPLETIONS, body)
    assert answer.json["model"] == "altered"
    assert output(answer) != output(other), "model.seed"
    assert altered.post(COMPLETIONS, greedy([1] * 200, 1)).status == 400, "model.max_model_len"
    assert altered.metric("cache_config_info", block_size="8", num_gpu_blocks="75") == 1
    assert altered.post(COMPLETIONS, {**body, "n": 6}).status == 400, "server.max_choices"
    assert altered.post(COMPLETIONS, {**body, "logprobs": 4}).status == 400, "server.max_logprobs"
    assert altered.post(COMPLETIONS, {**body, "max_token": 4}).status == 400, "server.unknown_fields"
    assert altered.post(COMPLETIONS, {**body, "user": "x" * 200, "stop": ["y" * 900] * 5}).status == 413
    assert altered.post("/reset_prefix_cache", {}).status == 404, "server.dev_endpoints"
    twice = [altered.post(COMPLETIONS, greedy([9] * 100, 1)).json["usage"] for _ in range(2)]
    assert twice[1]["prompt_tokens_details"]["cached_tokens"] == 0, "scheduler/prefix_cache=none"
    too_many_tokens = altered.post(COMPLETIONS, {"prompt": [[1] * 150] * 4, "max_tokens": 1})
    assert (too_many_tokens.status, "max_queue_tokens=500" in too_many_tokens.text) == (503, True)


def test_the_limits_of_a_step_hold(altered: Served) -> None:
    """H05: never more than max_num_seqs requests or max_step_tokens tokens in a step, and no chunk above its size."""
    before = altered.stats
    replies = altered.together([greedy(random_ids(i, 80), 20) for i in range(6)])
    assert [reply.status for reply in replies] == [200] * 6
    after = altered.stats
    num_steps = after["num_steps_total"] - before["num_steps_total"]
    assert num_steps >= 6 * 20 / 3, "scheduler.max_num_seqs"
    assert altered.metric("iteration_tokens_total_bucket", le="64.0") == altered.metric("iteration_tokens_total_count")
    alone = altered.stats["num_steps_total"]
    altered.post(COMPLETIONS, greedy(random_ids(7, 100), 1))
    altered.wait_until_idle()
    assert altered.stats["num_steps_total"] - alone == 5, "chunk_tokens=20"


def test_the_effective_configuration_is_shown(altered: Served) -> None:
    """H05: what was set, what is in force, and where it came from."""
    config = altered.info["config"]
    assert (config["scheduler.max_num_seqs"], config["scheduler.prefix_cache.kind"]) == (3, "none")
    assert config["server.api_key_env"] == "SERVEKIT_TEST_KEY" and "secret" not in altered.log
    assert "scheduler.max_num_seqs=3 (command line)" in altered.log


def test_the_log_is_json_and_has_statistics(altered: Served) -> None:
    """H05: server.log_format and server.stats_interval_s; every line is an object, of the engine's process too."""
    assert altered.post(COMPLETIONS, greedy([1, 2], 150)).status == 200
    altered.wait_until(lambda: '"message": "prompt ' in altered.log)
    for line in altered.log.splitlines():
        assert set(json.loads(line)) >= {"ts", "level", "message"}, line


def test_a_key_is_asked_for(altered: Served) -> None:
    """H05: server.api_key_env; probes stay public."""
    without = Served(altered.process, altered.log_path, altered.url)
    assert without.post(COMPLETIONS, greedy([1], 1)).status == without.get("/v1/models").status == 401
    assert without.get("/health").status == without.get("/metrics").status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["system", "user"]])
def test_what_a_chat_template_refuses_is_the_clients_mistake(altered: Served, roles: list[str], stream: bool) -> None:
    """F21: with the template's own message and before any event."""
    reply = altered.post(CHAT, {"messages": [{"role": role, "content": "x"} for role in roles], "stream": stream})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "roles must alternate" in reply.error["message"]
    fine = altered.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream})
    assert fine.status == 200
