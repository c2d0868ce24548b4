"""Bodies that cannot be honoured: a quick 4xx in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import threading
import time
from typing import Any

import pytest

from servekit.config.admission import OnDemandAdmissionConfig
from servekit.config.schema import SchedulerConfig, UnknownFields
from server.fake_engine import MAX_MODEL_LEN, VOCAB, LiveServer, Script, fake_config, live_server
from server.raw_http import JSON, Reply, exchange, request


def refused(server: LiveServer, body: dict[str, Any] | bytes, path: str = "/v1/completions") -> dict[str, Any]:
    """The error that a body gets: always 400, complete, in one line, without Python in it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, error = request(server, path, data)
    assert status == 400, error
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    for sign in ("\n", "Traceback", "msgspec", "object at 0x"):
        assert sign not in error["message"]
    return error


def with_field(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, **fields}


MALFORMED = [
    b"", b"{", b'{"prompt": "x"', b"[]", b'"x"', b"null", b"1", b"{'prompt': 'x'}", b'{"prompt": "x",}',
    b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": -1e999}', b'{"prompt": "\xff"}', "{\"prompt\": \"x\"}".encode("utf-16"),
    b"\xef\xbb\xbf" + b'{"prompt": "x"}', b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    b"[" * 900 + b"]" * 900, b'{"prompt": "\\ud83d"}', b'{"prompt": "x", "stop": "\\udc00"}',
    b'{"prompt": "x", "user": "\\ud83d"}', b'{"prompt": "x", "model": "\\ud83d"}', b'{"prompt": "x", "\\ud83d": 1}',
    b'{"prompt": "x\x00"}', b'{"prompt": "x", "stream": true, "stop": "\\ud83d"}',
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:30]))
def test_malformed_bodies(server: LiveServer, body: bytes) -> None:
    started_s = time.monotonic()
    assert refused(server, body)["code"] == "invalid_json"
    assert time.monotonic() - started_s < 5
    assert request(server, "/v1/completions", json.dumps(with_field()).encode())[0] == 200


def test_surrogates_in_a_conversation(server: LiveServer) -> None:
    for body in (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
                 b'{"messages": [{"role": "\\ud83d", "content": "x"}], "stream": true}'):
        assert refused(server, body, "/v1/chat/completions")["code"] == "invalid_json"


def test_odd_but_valid_characters(server: LiveServer) -> None:
    for text in ("\\u0000", "\\uffff", "\\ufeff", "\\ud83c\\udf36"):
        body = b'{"prompt": "x%s", "max_tokens": 1}' % text.encode()
        assert request(server, "/v1/completions", body)[0] == 200


@pytest.mark.parametrize(("headers", "body", "status"), [
    ({"content-type": "text/plain"}, b'{"prompt": "x"}', 415),
    ({"content-type": "application/x-www-form-urlencoded"}, b'{"prompt": "x"}', 415),
    ({**JSON, "content-encoding": "gzip"}, gzip.compress(b'{"prompt": "x"}', mtime=0), 415),
    ({**JSON, "x-request-id": "a b"}, b'{"prompt": "x"}', 400),
    ({**JSON, "x-request-id": "a" * 129}, b'{"prompt": "x"}', 400),
    ({"content-type": "application/json; charset=utf-8"}, b'{"prompt": "x"}', 200),
    ({}, b'{"prompt": "x"}', 200),
])
def test_headers(server: LiveServer, headers: dict[str, str], body: bytes, status: int) -> None:
    assert request(server, "/v1/completions", body, headers=headers)[0] == status


def test_a_body_over_the_limit() -> None:
    with live_server(fake_config(max_body_bytes=1024)) as server:
        status, error = request(server, "/v1/completions", b'{"prompt": "' + b"x" * 5000 + b'"}')
        assert (status, error["code"]) == (413, "body_too_large")
        assert "server.max_body_bytes=1024" in error["message"]
        chunked = {**JSON, "transfer-encoding": "chunked"}
        chunks = b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n"
        assert request(server, "/v1/completions", chunks, headers=chunked)[0] == 413


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/nothing", 404), ("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405),
    ("DELETE", "/v1/models", 405), ("POST", "/v1/embeddings", 501), ("POST", "/v1/responses", 501),
    ("POST", "/v1/audio/speech", 501), ("GET", "/v1/models/other", 404), ("POST", "/reset_prefix_cache", 404),
])
def test_paths(server: LiveServer, method: str, path: str, status: int) -> None:
    got, error = request(server, path, b"{}" if method == "POST" else None, method)
    assert got == status
    assert set(error) == {"message", "type", "param", "code"}
    assert path in error["message"] or "other" in error["message"]


@pytest.mark.parametrize("prompt", [
    "", [], [[]], ["a", ""], {}, 5, None, True, [1, "a"], [["a"]], [1.0], [True], [None]])
def test_prompts(server: LiveServer, prompt: object) -> None:
    """With the beginning-of-sequence token of this model "" is a prompt; without it, it is none."""
    refused(server, {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False})


def test_a_missing_prompt(server: LiveServer) -> None:
    assert refused(server, {"max_tokens": 1})["message"] == "prompt: this field is required"


@pytest.mark.parametrize("messages", [
    [], None, "hi", [None], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "robot", "content": "x"}], [{"content": "x"}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
])
def test_messages(server: LiveServer, messages: object) -> None:
    assert "messages" in str(refused(server, {"messages": messages}, "/v1/chat/completions")["param"])


WRONG_EVERYWHERE = ["x", [], {}, [[1]], True, "", {"a": {"b": []}}]
NUMBERS = {
    "n": [0, -1, 10**6, 1.5, 1.0, 2**70], "max_tokens": [-1, 1.5, 2**63], "temperature": [-0.1, 1e308, 101, 2**80],
    "top_p": [-0.1, 1.1, 1e308], "top_k": [-2, 0.01, 1.5, 2**31], "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1, 1e308], "frequency_penalty": [-2.1, 2.1], "repetition_penalty": [0, -1, 1e308],
    "seed": [1.5, 2**63, -(2**63) - 1], "min_tokens": [-1, 1.5, 2], "logprobs": [-1, 21, VOCAB, 10**9, 1.5],
    "best_of": [0, 2], "priority": [1, -5, 2**31, 1.5], "truncate_prompt_tokens": [0, -1, 1.5],
}


@pytest.mark.parametrize(("name", "value"), [
    (name, value) for name, values in NUMBERS.items() for value in [*values, *WRONG_EVERYWHERE]])
def test_numbers(server: LiveServer, name: str, value: object) -> None:
    error = refused(server, with_field(**{name: value}))
    assert error["param"] == name
    assert error["message"].startswith(name)


@pytest.mark.parametrize("name", ["stream", "echo", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
                                  "return_token_ids", "add_special_tokens"])
@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_switches(server: LiveServer, name: str, value: object) -> None:
    assert refused(server, with_field(**{name: value}))["param"] == name


@pytest.mark.parametrize(("name", "value"), [
    ("user", 5), ("user", "x" * 300), ("cache_salt", 5), ("cache_salt", []), ("stop", ""), ("stop", [""]), ("stop", 5),
    ("stop", ["x"] * 65), ("request_id", ""), ("request_id", "a b"), ("stream_options", 5), ("logit_bias", []),
    ("logit_bias", {"a": 1}), ("logit_bias", {"1.5": 1}), ("logit_bias", {"5": "x"}), ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 101}), ("allowed_token_ids", []), ("model", 5),
])
def test_other_fields(server: LiveServer, name: str, value: object) -> None:
    assert str(refused(server, with_field(**{name: value}))["param"]).startswith(name)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31, 2**63, 2**70])
def test_token_ids_outside_the_vocabulary_are_named(server: LiveServer, wrong: int) -> None:
    for fields in ({"prompt": [97, wrong]}, {"prompt": [[97], [wrong]]}, {"stop_token_ids": [wrong]},
                   {"allowed_token_ids": [97, wrong]}, {"logit_bias": {str(wrong): 1}}):
        assert str(wrong) in refused(server, with_field(**fields))["message"]
    status, error = request(server, "/detokenize", json.dumps({"tokens": [wrong]}).encode())
    assert (status, error["param"]) == (400, "tokens")


@pytest.mark.parametrize("wrong", ["5", 1.0, True])
def test_token_ids_of_a_wrong_type(server: LiveServer, wrong: object) -> None:
    for fields in ({"prompt": [97, wrong]}, {"stop_token_ids": [wrong]}, {"allowed_token_ids": [wrong]}):
        refused(server, with_field(**fields))


def test_rows_of_the_embedding_without_a_token_are_valid(server: LiveServer) -> None:
    assert request(server, "/v1/completions", json.dumps(with_field(prompt=[VOCAB - 1], echo=True)).encode())[0] == 200


@pytest.mark.parametrize("fields", [
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"functions": [{}]}, {"modalities": ["audio"]}, {"audio": {"voice": "x"}}, {"reasoning_effort": "high"},
    {"guided_json": {}}, {"bad_words": ["x"]}, {"prompt_logprobs": 1}, {"echo": True}, {"best_of": 1}, {"suffix": "x"},
])
def test_what_is_not_implemented_is_refused_by_name(server: LiveServer, fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused(server, {"messages": [{"role": "user", "content": "x"}], **fields}, "/v1/chat/completions")
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_fields_that_clients_send_by_habit_are_accepted(server: LiveServer) -> None:
    habits = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
              "user": "me", "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
              "modalities": ["text"], "max_token": 5, "prompt_cache_key": "k", "safety_identifier": "s"}
    body = {"messages": [{"role": "user", "content": "x", "name": None}], "max_tokens": 1, **habits}
    assert request(server, "/v1/chat/completions", json.dumps(body).encode())[0] == 200


def test_misspelt_fields_can_be_refused() -> None:
    with live_server(fake_config(unknown_fields=UnknownFields.refuse)) as server:
        error = refused(server, with_field(temprature=0.5))
        assert error["message"] == "temprature: no such field; did you mean temperature?"
        assert error["code"] == "unknown_parameter"
        assert request(server, "/v1/completions", json.dumps(with_field(metadata={})).encode())[0] == 200


def test_misspelt_fields_are_told_in_the_log(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    assert request(server, "/v1/completions", json.dumps(with_field(max_token=5)).encode())[0] == 200
    assert "max_token: no such field; did you mean max_tokens?" in caplog.text


@pytest.mark.parametrize("model", ["other", "Fake", "", "fake "])
def test_other_models(server: LiveServer, model: str) -> None:
    status, error = request(server, "/v1/completions", json.dumps(with_field(model=model)).encode())
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_contradictions(server: LiveServer) -> None:
    assert "contradicts" in refused(server, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                                             "max_completion_tokens": 2}, "/v1/chat/completions")["message"]
    assert "echo" in refused(server, with_field(max_tokens=0))["message"]
    refused(server, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "/v1/chat/completions")


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": ["x"] * 129}, "prompt"), ({"n": 129}, "n"), ({"prompt": ["x"] * 43, "n": 3}, "n"),
    ({"prompt": [[97]] * 129}, "prompt"), ({"prompt": ["x"] * 128, "n": 2**31 - 1}, "n")])
def test_choices_have_a_limit_together(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = refused(server, with_field(**fields))
    assert error["param"] == param
    assert "server.max_choices=128" in error["message"]
    assert "several requests" in error["message"]


def test_more_choices_than_can_run_and_wait_are_refused() -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, admission=OnDemandAdmissionConfig(max_queue_requests=3))
    with live_server(dataclasses.replace(fake_config(), scheduler=scheduler)) as server:
        for fields in ({"n": 6}, {"prompt": ["x"] * 6}, {"prompt": ["x"] * 3, "n": 2}):
            message = refused(server, with_field(**fields))["message"]
            assert "6 choices" in message
            assert "scheduler.max_num_seqs=2 and scheduler.admission.max_queue_requests=3" in message
        assert request(server, "/v1/completions", json.dumps(with_field(n=5)).encode())[0] == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert refused(server, {**chat, "n": 6}, "/v1/chat/completions")["param"] == "n"


def test_a_text_that_cannot_fit_is_not_even_tokenised(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token of the fake model has 8 bytes."""
    def encode(*_: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(server.service.serving.model.tokenizer, "encode", encode)
    for path, body in (("/v1/completions", with_field(prompt="x" * 80_000)),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 80_000}]})):
        error = refused(server, body, path)
        assert (error["code"], error["param"]) == (
            "context_length_exceeded", "prompt" if path == "/v1/completions" else "messages")
        assert re.search(r"has at least 1000\d: shorten it to at most 255", error["message"])


def test_a_long_text_that_is_to_be_truncated_is_tokenised(server: LiveServer) -> None:
    body = with_field(prompt="x" * 80_000, truncate_prompt_tokens=10)
    status, answer = request(server, "/v1/completions", json.dumps(body).encode())
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_a_stream_has_options(server: LiveServer, path: str) -> None:
    body: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "x"}]}
    for options in ({"include_usage": True}, {"include_usage": False}, {"x": 1}):
        for stream in (None, False):
            error = refused(server, {**body, "stream_options": options, "stream": stream}, path)
            assert error["param"] == "stream_options"
            assert "stream=true" in error["message"]
    for options in (None, {}):
        assert request(server, path, json.dumps({**body, "stream_options": options}).encode())[0] == 200


def streamed(server: LiveServer, **options: object) -> int:
    """The status of a stream with these options."""
    body = json.dumps(with_field(stream=True, stream_options=options)).encode()
    return exchange(server, "/v1/completions", "POST", body, JSON)[0]


def test_options_of_a_stream_that_do_not_exist(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    assert streamed(server, include_usage=True, continuous_usage_stats=True, include_obfuscation=False) == 200
    assert "no such field" not in caplog.text
    assert streamed(server, include_usge=True) == 200
    assert "stream_options.include_usge: no such field; did you mean include_usage?" in caplog.text
    with live_server(fake_config(unknown_fields=UnknownFields.refuse)) as strict:
        error = refused(strict, with_field(stream=True, stream_options={"include_usge": True}))
        assert (error["param"], error["code"]) == ("stream_options.include_usge", "unknown_parameter")
        assert streamed(strict, include_usage=True, include_obfuscation=True) == 200


def test_fields_of_a_message_that_do_not_exist(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    def body(**fields: object) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y", **fields}],
                "max_tokens": 1}

    def status(**fields: object) -> int:
        return request(server, "/v1/chat/completions", json.dumps(body(**fields)).encode())[0]

    assert status(refusal=None, annotations=[], audio=None) == 200
    assert "no such field" not in caplog.text
    assert status(contents="z") == 200
    assert "messages[1].contents: no such field; did you mean content?" in caplog.text
    with live_server(fake_config(unknown_fields=UnknownFields.refuse)) as strict:
        error = refused(strict, body(contents="z"), "/v1/chat/completions")
        assert (error["param"], error["code"]) == ("messages[1].contents", "unknown_parameter")


def test_bad_requests_do_not_disturb_others(server: LiveServer) -> None:
    server.engine.script = lambda _: Script(delay_s=0.005)
    answers: list[Reply] = []
    body = json.dumps(with_field(max_tokens=100)).encode()
    threads = [threading.Thread(target=lambda: answers.append(request(server, "/v1/completions", body)))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for bad in MALFORMED[:12]:
        refused(server, bad)
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN * 3):
        refused(server, with_field(prompt=[97] * length, n=3))
    for thread in threads:
        thread.join()
    assert [(status, answer["choices"][0]["text"]) for status, answer in answers] == [
        (200, ("hello world" * 10)[:100])] * 4
