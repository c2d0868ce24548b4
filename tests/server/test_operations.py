"""What operators and tools ask: probes, models, tokenisation, metrics, information, keys, phases."""

from __future__ import annotations

import dataclasses
import json

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servekit.config.schema import Config, GenerationDefaults, ModelConfig
from servekit.core.request import FinishReason
from servekit.core.stats import Service
from servekit.engine.client import EngineState
from servekit.engine.messages import Breakdown, EngineStats, StepRecord
from servekit.server.lifecycle import Phase
from server.fake_engine import LiveServer, Script, fake_config, live_server, serving_of
from server.raw_http import get, get_json, post, request

PROBES = ["/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready"]
COMPLETION = json.dumps({"prompt": "x", "max_tokens": 3}).encode()


def sample(server: LiveServer, name: str, **labels: str) -> float:
    """A value that a scrape shows, 0 if it is not there."""
    status, body, headers = get(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    for family in text_string_to_metric_families(body):
        for found in family.samples:
            if found.name == f"servekit:{name}" and labels.items() <= found.labels.items():
                return float(found.value)
    return 0.0


def test_models(client: openai.OpenAI, server: LiveServer) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created, model.owned_by) == ("fake", "model", 1_700_000_000, "servekit")
    assert model.to_dict()["max_model_len"] == 256
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("path", PROBES)
def test_probes_of_a_healthy_server(server: LiveServer, path: str) -> None:
    assert get(server, path)[0] == 200
    assert get(server, path, "HEAD")[0] == 200


def test_probes_and_requests_while_loading() -> None:
    with live_server(is_loaded=False) as server:
        server.service.lifecycle.progress = "weights 40 %"
        for path in PROBES:
            status, body, _ = get(server, path)
            assert (status, json.loads(body)) == (503, {"status": "loading: weights 40 %"})
        for path in ("/v1/models", "/metrics", "/server_info", "/tokenizer_info"):
            assert get(server, path)[0] == 503
        status, error = request(server, "/v1/completions", COMPLETION)
        assert (status, error["code"]) == (503, "loading")
        assert "weights 40 %" in error["message"]
        assert get(server, "/version")[0] == 200
        server.call(lambda: server.service.serve(serving_of(server.engine, server.service.config, None)))
        assert get(server, "/ready")[0] == 200


def test_probes_and_requests_while_draining(server: LiveServer) -> None:
    server.service.lifecycle.phase = Phase.draining
    try:
        assert get(server, "/health")[0] == 200
        assert get(server, "/ready")[0] == 503
        assert json.loads(get(server, "/v2/health/ready")[1]) == {"status": "draining"}
        status, error = request(server, "/v1/completions", COMPLETION)
        assert (status, error["code"]) == (503, "draining")
        assert get(server, "/v1/completions", "POST")[2]["retry-after"] == "1"
        assert get(server, "/v1/models")[0] == 200
        assert sample(server, "admission_rejections_total", reason="draining") >= 2
    finally:
        server.service.lifecycle.phase = Phase.serving


@pytest.mark.parametrize(("state", "is_healthy", "text"), [
    (EngineState.dead, False, "dead"), (EngineState.restarting, False, "restarting"),
    (EngineState.ready, False, "silent")])
def test_a_sick_engine(server: LiveServer, state: EngineState, is_healthy: bool, text: str) -> None:
    server.engine.state, server.engine.is_healthy = state, is_healthy
    try:
        for path in ("/health", "/ready"):
            status, body, _ = get(server, path)
            assert (status, json.loads(body)) == (503, {"status": text})
        if state is not EngineState.ready:
            status, error = request(server, "/v1/completions", COMPLETION)
            assert (status, error["code"]) == (503, "engine_unavailable")
    finally:
        server.engine.state, server.engine.is_healthy = EngineState.ready, True


def test_probes_make_no_tokens(server: LiveServer) -> None:
    before = server.engine.tokens_made
    for _ in range(20):
        get(server, "/health")
    assert server.engine.tokens_made == before
    assert server.engine.submitted == []


def test_tokenize_and_back(server: LiveServer) -> None:
    assert post(server, "/tokenize", prompt="hi") == {"count": 3, "max_model_len": 256, "tokens": [256, 104, 105]}
    plain = post(server, "/tokenize", prompt="hé", add_special_tokens=False, return_token_strs=True)
    assert plain["tokens"] == list("hé".encode())
    assert plain["token_strs"] == ["h", "\ufffd", "\ufffd"]
    chat = post(server, "/tokenize", messages=[{"role": "user", "content": "x"}])
    assert post(server, "/detokenize", tokens=chat["tokens"])["prompt"] == (
        "<|bos|><|turn|>user\nx\n<|turn|>assistant\n")
    assert post(server, "/detokenize", tokens=[])["prompt"] == ""
    assert request(server, "/tokenize", b'{"prompt": 5}')[0] == 400
    assert request(server, "/tokenize", b'{"prompt": "x", "model": "other"}')[0] == 404


def test_tokenizer_info(server: LiveServer) -> None:
    info = get_json(server, "/tokenizer_info")
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<|bos|>", "<|turn|>", [257])
    assert "message.content" in info["chat_template"]


def test_server_info(server: LiveServer) -> None:
    info = get_json(server, "/server_info")
    assert info["config"]["scheduler.max_num_seqs"] == 128
    assert len(info["config_hash"]) == 12
    assert (info["engine"]["kv_tokens"], info["state"], info["phase"]) == (1024, "ready", "serving")
    assert "lower is sooner" in info["priority"]
    assert "upper bound" in info["max_tokens"]
    assert get_json(server, "/version")["version"]


def test_the_cache_is_reset_only_with_dev_endpoints() -> None:
    with live_server(fake_config(dev_endpoints=True)) as server:
        assert post(server, "/reset_prefix_cache") == {"num_blocks_forgotten": 7}
        assert server.engine.num_resets == 1


def test_an_api_key() -> None:
    with live_server(api_key="s3cret") as server:
        for path in [*PROBES, "/metrics", "/version"]:
            assert get(server, path)[0] == 200
        for path in ("/v1/models", "/server_info", "/tokenizer_info"):
            status, body, headers = get(server, path)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
            assert get(server, path, authorization="Bearer wrong")[0] == 401
            assert get(server, path, authorization="Bearer s3cr\xe9t")[0] == 401
            assert get(server, path, authorization="Basic s3cret")[0] == 401
            assert get(server, path, authorization="Bearer s3cret")[0] == 200
        with (openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as wrong,
              pytest.raises(openai.AuthenticationError)):
            wrong.completions.create(model="fake", prompt="x")
        with openai.OpenAI(base_url=server.url + "/v1", api_key="s3cret", max_retries=0) as right:
            assert right.completions.create(model="fake", prompt="x", max_tokens=1).choices


def test_every_answer_has_a_request_id(server: LiveServer) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        assert get(server, path)[2]["x-request-id"]
        assert get(server, path, **{"X-Request-Id": "abc"})[2]["x-request-id"] == "abc"


def test_an_unexpected_error_is_500_without_a_traceback(server: LiveServer, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.engine, "submit", broken)
    status, error = request(server, "/v1/completions", COMPLETION)
    assert (status, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text


def test_the_log_has_facts_and_no_text(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "servekit.access")
    post(server, "/v1/completions", prompt="a private matter", max_tokens=5, request_id="logged")
    get(server, "/health")
    records = [record for record in caplog.records if record.name == "servekit.access"]
    (record,) = [record for record in records if record.facts["n_in"] == 17]  # type: ignore[attr-defined]
    facts = record.facts  # type: ignore[attr-defined]
    assert (facts["n_out"], facts["finish"], facts["status"]) == (5, "length", 200)
    assert facts["ttft_ms"] >= 0
    assert "private" not in caplog.text
    assert "/health" not in caplog.text


GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"]
COUNTERS = ["prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
            "prompt_tokens_by_source", "prompt_tokens_recomputed", "request_success", "admission_rejections", "steps",
            "steps_by_execution", "http_requests", "preemptions_by_kind", "swapped_blocks",
            *(f"{scope}_{what}" for scope in ("class", "tenant")
              for what in ("started_requests", "queue_seconds", "prompt_tokens", "generation_tokens"))]
HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
              "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
              "request_generation_tokens", "request_params_max_tokens", "iteration_tokens_total",
              "scheduler_step_seconds"]


def test_names_and_types_of_metrics(server: LiveServer) -> None:
    server.engine.script = lambda _: Script(refusal=FinishReason.queue_full)
    request(server, "/v1/completions", COMPLETION)
    server.engine.script = lambda _: Script()
    post(server, "/v1/completions", prompt="x")
    families = {family.name: family.type for family in text_string_to_metric_families(get(server, "/metrics")[1])}
    assert families == {**{f"servekit:{name}": "gauge" for name in GAUGES},
                        **{f"servekit:{name}": "counter" for name in COUNTERS},
                        **{f"servekit:{name}": "histogram" for name in HISTOGRAMS}}


def test_openmetrics_is_spoken_too(server: LiveServer) -> None:
    _, body, headers = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")
    assert "_created" not in body


def test_requests_are_counted(server: LiveServer) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
             "inter_token_latency_seconds_count", "request_time_per_output_token_seconds_count",
             "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
             "request_generation_tokens_sum", "request_prompt_tokens_sum"]
    before = [sample(server, name) for name in names]
    finished = sample(server, "request_success_total", finished_reason="length")
    post(server, "/v1/completions", prompt="abc", max_tokens=6)
    after = [sample(server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 6, 1, 5, 1, 1, 1, 6, 4]
    assert sample(server, "request_success_total", finished_reason="length") == finished + 1
    handled = sample(server, "http_requests_total", handler="/v1/completions", status="200", method="POST")
    assert handled >= 1


def test_errors_do_not_flatter_the_latencies(server: LiveServer) -> None:
    before = sample(server, "e2e_request_latency_seconds_count")
    failed = sample(server, "request_success_total", finished_reason="error")
    server.engine.script = lambda _: Script(fail_after=2)
    assert request(server, "/v1/completions", COMPLETION)[0] == 500
    assert sample(server, "e2e_request_latency_seconds_count") == before
    assert sample(server, "request_success_total", finished_reason="error") == failed + 1


def test_refusals_are_counted(server: LiveServer) -> None:
    before = sample(server, "admission_rejections_total", reason="queue_full")
    server.engine.script = lambda _: Script(refusal=FinishReason.queue_full)
    assert request(server, "/v1/completions", COMPLETION)[0] == 503
    assert sample(server, "admission_rejections_total", reason="queue_full") == before + 1


def test_steps_become_gauges_and_counters() -> None:
    with live_server() as server:
        first = EngineStats(num_running=3, num_waiting=2, kv_blocks_used=16, kv_blocks_total=64, num_steps_total=5,
                            prompt_tokens_total=40, cached_tokens_total=16, prefix_queries_total=64,
                            preemptions_total=1, recomputed_tokens_total=4, breakdown=Breakdown({"sequences": 5}),
                            schedule_s_total=0.001, execute_s_total=0.2, update_s_total=0.002)
        server.call(lambda: server.engine.step(first, StepRecord(40, 3, 4, 0.2)))
        assert sample(server, "num_requests_running") == 3
        assert sample(server, "num_requests_waiting") == 2
        assert sample(server, "kv_cache_usage_perc") == 0.25
        assert sample(server, "prompt_tokens_by_source_total", source="local_compute") == 40
        assert sample(server, "prompt_tokens_by_source_total", source="local_cache_hit") == 16
        assert sample(server, "prefix_cache_queries_total") == 64
        assert sample(server, "prefix_cache_hits_total") == 16
        assert sample(server, "num_preemptions_total") == 1
        assert sample(server, "steps_total", bound="sequences") == 5
        assert sample(server, "iteration_tokens_total_sum") == 43
        assert sample(server, "scheduler_step_seconds_sum", part="execute") == pytest.approx(0.2)
        assert sample(server, "cache_config_info", block_size="16", num_gpu_blocks="64") == 1
        server.call(lambda: server.engine.step(EngineStats(), None))
        assert sample(server, "num_requests_running") == sample(server, "num_requests_waiting") == 0
        assert sample(server, "kv_cache_usage_perc") == 0
        assert sample(server, "prompt_tokens_by_source_total", source="local_compute") == 40
        assert sample(server, "iteration_tokens_total_count") == 1
        restarted = EngineStats(num_steps_total=1, prompt_tokens_total=10, breakdown=Breakdown({"sequences": 1}))
        server.call(lambda: server.engine.step(restarted, None))
        assert sample(server, "prompt_tokens_by_source_total", source="local_compute") == 50
        assert sample(server, "steps_total", bound="sequences") == 6
        assert sample(server, "iteration_tokens_total_count") == 1


def test_what_classes_and_tenants_got_is_counted() -> None:
    with live_server() as server:
        first = Breakdown(preemptions={"swap": 2, "pause": 1}, classes={"0": Service(2, 3.0, 40, 5)},
                          tenants={"alice": Service(1, 1.0, 30, 4), "": Service(1, 2.0, 10, 1)})
        stats = EngineStats(num_steps_total=1, swapped_out_blocks_total=7, swapped_in_blocks_total=3, breakdown=first)
        server.call(lambda: server.engine.step(stats, None))
        server.call(lambda: server.engine.step(dataclasses.replace(stats, num_steps_total=2), None))
        assert sample(server, "preemptions_by_kind_total", kind="swap") == 2
        assert sample(server, "swapped_blocks_total", direction="out") == 7
        assert sample(server, "swapped_blocks_total", direction="in") == 3
        assert sample(server, "class_queue_seconds_total", priority="0") == 3.0
        assert sample(server, "class_started_requests_total", priority="0") == 2
        assert sample(server, "tenant_prompt_tokens_total", tenant="alice") == 30
        assert sample(server, "tenant_generation_tokens_total", tenant="alice") == 4
        second = Breakdown(tenants={"alice": Service(3, 1.5, 90, 14), "other": Service(1, 0.0, 1, 1)})
        server.call(lambda: server.engine.step(dataclasses.replace(stats, num_steps_total=3, breakdown=second), None))
        assert sample(server, "tenant_queue_seconds_total", tenant="alice") == 1.5
        assert sample(server, "tenant_generation_tokens_total", tenant="alice") == 14
        assert sample(server, "tenant_started_requests_total", tenant="other") == 1
        again = EngineStats(num_steps_total=1, breakdown=Breakdown(tenants={"alice": Service(1, 0.5, 10, 1)}))
        server.call(lambda: server.engine.step(EngineStats(), None))
        server.call(lambda: server.engine.step(again, None))
        assert sample(server, "tenant_prompt_tokens_total", tenant="alice") == 100, "a restarted engine adds to it"


def test_buckets_reach_down_to_a_millisecond(server: LiveServer) -> None:
    body = get(server, "/metrics")[1]
    for bucket in ("0.001", "0.002", "0.005", "0.01", "0.025"):
        assert f'servekit:inter_token_latency_seconds_bucket{{le="{bucket}",model_name="fake"}}' in body
    assert 'servekit:time_to_first_token_seconds_bucket{le="2560.0",model_name="fake"}' in body
    assert 'servekit:request_prompt_tokens_bucket{le="500.0",model_name="fake"}' in body


def test_the_models_defaults_apply_only_when_chosen() -> None:
    for choice, expected in ((GenerationDefaults.openai, (1.0, None)), (GenerationDefaults.model, (0.6, 20))):
        config = Config(ModelConfig("dummy:tiny", generation_defaults=choice))
        with live_server(config, is_loaded=False) as server:
            serving = serving_of(server.engine, config, None, {"temperature": 0.6, "top_k": 20})
            server.call(lambda serving=serving, server=server: server.service.serve(serving))
            post(server, "/v1/completions", prompt="x", max_tokens=1)
            post(server, "/v1/completions", prompt="x", max_tokens=1, temperature=0.1, top_k=0)
            first, second = (spec.sampling for spec in server.engine.submitted)
            assert (first.temperature, first.top_k) == expected
            assert (second.temperature, second.top_k) == (0.1, None)


def test_long_prompts_are_tokenised_beside_the_event_loop(server: LiveServer) -> None:
    assert post(server, "/tokenize", prompt="x" * 100_000, add_special_tokens=False)["count"] == 100_000


def test_the_page(server: LiveServer) -> None:
    status, body, headers = get(server, "/")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/html")
    assert "http://" not in body.replace("http://www.w3.org/", "")
    assert "https://" not in body


def test_the_api_describes_itself(server: LiveServer) -> None:
    document = get_json(server, "/openapi.json")
    assert document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert document["components"]["schemas"]["CompletionBody"]["required"] == ["prompt"]
    assert document["components"]["schemas"]["ChatBody"]["properties"]["temperature"]
