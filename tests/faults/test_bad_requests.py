"""Mistakes of clients, sent by hand and by the SDK: 4xx in OpenAI's form, never 500, and nobody is harmed."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable

import openai
import pytest

from faults.serving import CHAT, COMPLETIONS, Served

GOOD = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
MALFORMED = {
    "truncated": b'{"prompt": "x", "max_tok', "a list": b"[]", "a string": b'"x"', "null": b"null", "empty": b"",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "twice": b'{"prompt": "x", "prompt": "y"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}', "infinity": b'{"prompt": "x", "temperature": 1e999}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}', "long number": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"), "BOM": b"\xef\xbb\xbf" + GOOD, "trailing": GOOD + b"}"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bodies_are_the_clients_mistake(roomy: Served, path: str, body: bytes) -> None:
    """G12: on every route that reads one."""
    reply = roomy.post(path, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(("headers", "body", "status"), [
    ({"content-type": "text/plain"}, GOOD, 415), ({"content-type": "application/x-www-form-urlencoded"}, GOOD, 415),
    ({"content-encoding": "gzip"}, gzip.compress(GOOD, mtime=0), 415),
    ({"content-type": "application/json; charset=utf-8"}, GOOD, 200)], ids=str)
def test_bodies_of_other_kinds(roomy: Served, headers: dict[str, str], body: bytes, status: int) -> None:
    """G12: a wrong media type or a compressed body is named, not guessed."""
    reply = roomy.post(COMPLETIONS, body, headers)
    assert reply.status == status, reply.text
    assert status == 200 or reply.error["code"] == "unsupported_media_type"


def test_a_body_of_fifty_megabytes_is_refused_before_it_has_come(roomy: Served) -> None:
    """G12: by its announced length, and by counting where none is announced; memory stays flat."""
    before = roomy.rss_bytes
    with socket.create_connection(roomy.address, timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\n\r\n")
        assert b" 413 " in connection.recv(4096)
    with socket.create_connection(roomy.address, timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(50):
                connection.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
        except OSError:
            pass  # The server has closed the connection, as it said.
        assert b" 413 " in connection.recv(4096)
    assert roomy.rss_bytes - before < 64e6


def test_a_prompt_far_beyond_the_context_does_not_stop_the_server(roomy: Served) -> None:
    """G12, D08: three megabytes are refused for their length, or tokenised while probes and requests are answered."""
    words = "word " * 600_000
    refused = roomy.post(COMPLETIONS, {"prompt": words})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    replies = []
    asking = threading.Thread(target=lambda: replies.append(roomy.post(
        COMPLETIONS, {"prompt": words, "truncate_prompt_tokens": 100, "max_tokens": 1})))
    asking.start()
    num_answers = 0
    while asking.is_alive():
        assert roomy.get("/health").status == 200
        assert roomy.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200
        assert roomy.post("/tokenize", {"prompt": "word " * 5000}).status == 200
        num_answers += 1
    usage = replies[0].json["usage"]
    assert usage["prompt_tokens"] == 100 and usage["prompt_tokens_details"]["truncated_tokens"] == 5 * 600_000 - 99
    assert num_answers >= 5, "the server answered nobody while it tokenised"


SURROGATE = '"\\ud83d"'


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("body", [
    f'{{"messages": [{{"role": "user", "content": {SURROGATE}}}]',
    f'{{"messages": [{{"role": {SURROGATE}, "content": "x"}}]',
    f'{{"messages": [{{"role": "user", "content": "x"}}], "stop": {SURROGATE}',
    f'{{"messages": [{{"role": "user", "content": "x"}}], "model": {SURROGATE}',
    f'{{"messages": [{{"role": "user", "content": "x"}}], "user": {SURROGATE}',
    f'{{"messages": [{{"role": "user", "content": "x"}}], {SURROGATE}: 1'])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(roomy: Served, body: str, stream: str) -> None:
    """G16: content, role, stop, model, user, and a key; the error itself can be encoded."""
    reply = roomy.post(CHAT, f'{body}, "stream": {stream}}}'.encode())
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


def test_odd_characters_are_characters(roomy: Served) -> None:
    """G16: U+0000, U+FFFF, a byte-order mark and a whole surrogate pair come back as they went."""
    text = "a\0b\uffffc\ufeff🌶"
    reply = roomy.post(COMPLETIONS, {"prompt": text, "echo": True, "max_tokens": 1, "ignore_eos": True})
    assert reply.status == 200 and reply.json["choices"][0]["text"].startswith(text)
    paired = roomy.post(COMPLETIONS, b'{"prompt": "\\ud83c\\udf36", "echo": true, "max_tokens": 1}')
    assert paired.json["choices"][0]["text"].startswith("🌶")


@pytest.mark.parametrize("n", [0, -1, 10**6, "2", 1.5, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_impossible_number_of_choices_is_refused(roomy: Served, path: str, stream: bool, n: object) -> None:
    """G10: with a status, before any event."""
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    reply = roomy.post(path, {**body, "n": n, "stream": stream})
    assert (reply.status, reply.error["param"]) == (400, "n")


def test_choices_of_many_prompts_have_a_limit_together(roomy: Served) -> None:
    """G10: n prompts times n choices can be refused for good, which a client must not try again."""
    reply = roomy.post(COMPLETIONS, {"prompt": ["x"] * 128, "n": 128, "max_tokens": 1})
    assert reply.status == 400, reply.text


@pytest.mark.parametrize(("name", "status"), [("dummy:tiny", 200), (None, 200), ("Dummy:tiny", 404), ("gpt-4", 404),
                                              ("", 404)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_models_name_is_checked_and_reported(roomy: Served, path: str, name: str | None, status: int) -> None:
    """G13: another name is 404; no name means the one model, which the answer names."""
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    reply = roomy.post(path, {**body, "model": name, "max_tokens": 1})
    assert reply.status == status, reply.text
    if status == 200:
        assert reply.json["model"] == roomy.get("/v1/models").json["data"][0]["id"] == "dummy:tiny"
    else:
        assert reply.error["code"] == "model_not_found" and "dummy:tiny" in reply.error["message"]


def test_fields_of_sdks_pass_and_misspelt_ones_are_said(roomy: Served) -> None:
    """G14: what SDKs send by habit is fine; a typo is in the log with what was meant; what would matter is refused."""
    habits = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "service_tier": "auto"}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert roomy.post(CHAT, {**body, **habits}).status == 200
    assert roomy.post(CHAT, {**body, "max_token": 5, "temprature": 0}).status == 200
    roomy.wait_until(lambda: "did you mean max_tokens?" in roomy.log and "did you mean temperature?" in roomy.log)
    for fields in ({"best_of": 2}, {"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}):
        assert roomy.post(CHAT, {**body, **fields}).error["code"] == "unsupported_parameter"


def test_the_openai_client_raises_the_right_class_for_every_failure(roomy: Served) -> None:
    """G11: status, code and message are where the SDK looks for them."""
    with roomy.openai() as client:
        ask = client.completions.create
        failures: list[tuple[type[openai.APIStatusError], str, Callable[[], object]]] = [
            (openai.NotFoundError, "model_not_found", lambda: ask(model="other", prompt="x")),
            (openai.BadRequestError, "invalid_value", lambda: ask(model="dummy:tiny", prompt="x", temperature=-1)),
            (openai.BadRequestError, "invalid_value", lambda: ask(model="dummy:tiny", prompt="x", n=0)),
            (openai.BadRequestError, "context_length_exceeded", lambda: ask(model="dummy:tiny", prompt=[1] * 5000)),
            (openai.BadRequestError, "invalid_prompt", lambda: ask(model="dummy:tiny", prompt=[])),
            (openai.BadRequestError, "unsupported_parameter", lambda: ask(model="dummy:tiny", prompt="x", suffix="y")),
            (openai.InternalServerError, "not_implemented", lambda: client.embeddings.create(model="x", input="y")),
            (openai.NotFoundError, "not_found", lambda: client.get("/nowhere", cast_to=object)),
            (openai.APIStatusError, "method_not_allowed", lambda: client.get("/completions", cast_to=object)),
            (openai.APIStatusError, "body_too_large", lambda: ask(model="dummy:tiny", prompt="x" * (17 << 20))),
        ]
        for kind, code, attempt in failures:
            with pytest.raises(kind) as error:
                attempt()
            assert error.value.code == code, error.value
            assert isinstance(error.value.body, dict) and error.value.body["message"]


@pytest.mark.parametrize(("messages", "status"), [
    ([], 400), ([{"role": "user"}], 400), ([{"role": "user", "content": None}], 400), ([{"content": "x"}], 400),
    ([{"role": "wizard", "content": "x"}], 400), ("hello", 400), ([["user", "x"]], 400), ([None], 400),
    ([{"role": "user", "content": ""}], 200), ([{"role": "user", "content": []}], 200),
    ([{"role": "assistant", "content": "x"}], 200), ([{"role": "user", "content": "x"}] * 2, 200),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], 200),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 400)], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_conversations_of_every_shape(roomy: Served, messages: object, status: int, stream: bool) -> None:
    """F09, F21: refused with the place, before any event, or answered."""
    reply = roomy.post(CHAT, {"messages": messages, "max_tokens": 1, "stream": stream})
    assert reply.status == status, reply.text
    assert status == 200 or reply.error["param"].startswith("messages")


def test_half_a_request_line_and_noise_do_not_harm(roomy: Served) -> None:
    """G12: what is not even HTTP."""
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"POST", b"\r\n" * 50,
                 b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-y: z\r\n" * 5000 + b"\r\n"):
        with socket.create_connection(roomy.address, timeout=60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            try:
                connection.recv(4096)
            except ConnectionResetError:
                continue
