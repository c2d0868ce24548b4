"""Fields of a request that its scheduler honours: tenant, class, predicted length, its own limit on waiting."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from servekit.config.admission import ClassLimitsConfig, OnDemandAdmissionConfig, Reserve, WorstCaseAdmissionConfig
from servekit.config.policy import FifoPolicyConfig, Prediction, PriorityPolicyConfig, SjfPolicyConfig, SrtfPolicyConfig
from servekit.config.schema import SchedulerConfig
from servekit.config.tenants import TenantKey, TenantsConfig
from servekit.core.request import FinishReason, RequestSpec
from server.fake_engine import LiveServer, Script, fake_config, live_server
from server.raw_http import JSON, exchange, get, request


@contextmanager
def server_with(**scheduler: Any) -> Iterator[LiveServer]:
    config = dataclasses.replace(fake_config(), scheduler=SchedulerConfig(**scheduler))
    with live_server(config) as server:
        yield server


def send(server: LiveServer, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"prompt": "x", "max_tokens": 8, **fields}).encode()
    return request(server, "/v1/completions", body, headers={**JSON, **(headers or {})})


def accepted(server: LiveServer, headers: dict[str, str] | None = None, **fields: Any) -> RequestSpec:
    status, answer = send(server, headers, **fields)
    assert status == 200, answer
    return server.engine.submitted[-1]


def refused(server: LiveServer, **fields: Any) -> str:
    status, error = send(server, **fields)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] in fields
    return str(error["message"])


def test_the_tenant_is_the_user_unless_a_header_names_it() -> None:
    with server_with() as server:
        assert accepted(server, {"x-tenant": "b"}, user="alice").tenant == "alice"
        assert accepted(server, {"x-tenant": "b"}).tenant == ""
    with server_with(tenants=TenantsConfig(key=TenantKey.header, header="X-Org")) as server:
        assert accepted(server, {"x-org": "b"}, user="alice").tenant == "b"
        assert accepted(server, user="alice").tenant == ""
        for name in ("a b", "x" * 257, "n\xe4me"):
            status, error = send(server, {"X-Org": name})
            assert (status, error["code"]) == (400, "invalid_header")
            assert error["message"].startswith("X-Org: ")


def test_priorities_are_honoured_by_the_policy_or_by_limits_of_their_class() -> None:
    with server_with(policy=PriorityPolicyConfig()) as server:
        assert [accepted(server, priority=p).priority for p in (0, 7, -3)] == [0, 7, -3]
    limits = OnDemandAdmissionConfig(classes={1: ClassLimitsConfig(max_queue_requests=2)})
    with server_with(policy=FifoPolicyConfig(), admission=limits) as server:
        assert accepted(server, priority=1).priority == 1
        assert refused(server, priority=2) == (
            "priority=2: scheduler.policy.kind=fifo ignores priorities; send 0 or leave it out, or send a class of "
            "scheduler.admission.classes: 1")


@pytest.mark.parametrize("scheduler", [
    {"policy": SjfPolicyConfig(prediction=Prediction.oracle)},
    {"policy": SrtfPolicyConfig(prediction=Prediction.oracle)},
    {"admission": WorstCaseAdmissionConfig(reserve=Reserve.oracle)},
    {"admission": WorstCaseAdmissionConfig(reserve=Reserve.power_of_two)},
])
def test_predictions_reach_components_that_use_them(scheduler: dict[str, Any]) -> None:
    with server_with(**scheduler) as server:
        assert accepted(server, predicted_output_tokens=8).predicted_output_tokens == 8
        assert accepted(server).predicted_output_tokens is None
        assert "must not exceed max_tokens=8" in refused(server, predicted_output_tokens=9)
        for wrong in (0, -1, 1.5, "x", True):
            refused(server, predicted_output_tokens=wrong)


@pytest.mark.parametrize("scheduler", [
    {}, {"policy": SjfPolicyConfig(prediction=Prediction.learned)}, {"admission": WorstCaseAdmissionConfig()}])
def test_predictions_that_nobody_uses_are_refused(scheduler: dict[str, Any]) -> None:
    with server_with(**scheduler) as server:
        message = refused(server, predicted_output_tokens=4)
        assert "scheduler.policy.kind=" in message
        assert "scheduler.admission.kind=" in message
        assert server.engine.submitted == []


def test_a_request_may_wait_less_than_the_server_allows_and_not_more() -> None:
    limits = OnDemandAdmissionConfig(queue_timeout_s=60, classes={3: ClassLimitsConfig(queue_timeout_s=5)})
    with server_with(policy=PriorityPolicyConfig(), admission=limits) as server:
        assert accepted(server, queue_timeout_s=2.5).queue_timeout_s == 2.5
        assert accepted(server, queue_timeout_s=60).queue_timeout_s == 60
        assert refused(server, queue_timeout_s=61) == (
            "queue_timeout_s=61: must not exceed the server's limit for requests of class 0, 60 s")
        assert "class 3, 5 s" in refused(server, queue_timeout_s=6, priority=3)
        for wrong in (0, -1, "x", 1e9):
            refused(server, queue_timeout_s=wrong)
    with server_with(admission=OnDemandAdmissionConfig(queue_timeout_s=None)) as server:
        assert accepted(server, queue_timeout_s=1000).queue_timeout_s == 1000


def over_quota(server: LiveServer, retry_after_s: float | None) -> None:
    """Make the engine refuse every request."""
    def refuse(spec: RequestSpec) -> Script:
        return Script(refusal=FinishReason.over_quota, message="tenant 'a' has used more", retry_after_s=retry_after_s)

    server.engine.script = refuse


@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_over_its_quota_gets_429_and_is_told_when_to_come_back(server: LiveServer, stream: bool) -> None:
    over_quota(server, 2.3)
    body = json.dumps({"prompt": "x", "user": "a", "stream": stream}).encode()
    status, text, headers = exchange(server, "/v1/completions", "POST", body, JSON)
    assert (status, headers["retry-after"]) == (429, "3")
    assert json.loads(text)["error"] == {"message": "tenant 'a' has used more", "type": "rate_limit_error",
                                         "param": None, "code": "rate_limit_exceeded"}
    assert 'servekit:admission_rejections_total{model_name="fake",reason="rate_limit_exceeded"}' in get(
        server, "/metrics")[1]


def test_the_openai_client_knows_it_as_a_rate_limit(client: openai.OpenAI, server: LiveServer) -> None:
    over_quota(server, None)
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model="fake", prompt="x")
    assert error.value.code == "rate_limit_exceeded"
    assert error.value.response.headers["retry-after"] == "1"


def test_the_log_names_tenant_and_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "servekit.access")
    with server_with(policy=PriorityPolicyConfig()) as server:
        accepted(server, user="alice", priority=2)
    facts = next(r.facts for r in caplog.records if r.name == "servekit.access")  # type: ignore[attr-defined]
    assert (facts["tenant"], facts["priority"]) == ("alice", 2)
