"""Streams say exactly what whole answers say, in OpenAI's form, and end in a way that a client can tell apart."""

from __future__ import annotations

import random
from typing import Any

import pytest

from faults.outputs import Reference, greedy, output, random_ids, streamed
from faults.serving import CHAT, COMPLETIONS, Json, Served

UTF8 = sorted(set("é中🌶a ".encode()))
"""Bytes whose random sequences are characters, halves of characters, and nonsense."""


def chat(**fields: object) -> Json:
    return {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True, "max_tokens": 8,
            **fields}


def test_characters_that_span_tokens_are_sent_once(roomy: Served) -> None:
    """G02 (ten seeds): of a stream of bytes, no delta repeats or takes back, and the sum is the whole answer."""
    for seed in range(10):
        body = {**greedy([256, 97], 40, allowed_token_ids=UTF8, repetition_penalty=1, temperature=1, seed=seed)}
        whole = roomy.post(COMPLETIONS, body)
        events = roomy.post(COMPLETIONS, {**body, "stream": True}).events
        assert streamed(events) == output(whole)
        assert output(whole).text == bytes(output(whole).token_ids).decode(errors="replace")


def test_a_prompt_that_ends_inside_a_character_lends_nothing_to_the_output(roomy: Served) -> None:
    """G03: the ids of a text without its last byte."""
    ids = [256, *"abc 🌶".encode()[:-1]]
    body = {**greedy(ids, 10), "allowed_token_ids": list(b"xyz")}
    events = roomy.post(COMPLETIONS, {**body, "stream": True}).events
    assert streamed(events) == output(roomy.post(COMPLETIONS, body))
    assert len(streamed(events).text) == 10 and set(streamed(events).text) <= set("xyz")


def test_stop_strings_lose_no_character(roomy: Served, reference: Reference) -> None:
    """G05, G06 (50 stop strings rather than 100): joined, the stream is the whole answer, up to the stop."""
    rng = random.Random(6)
    prompt = random_ids(7, 30)
    text = reference.one(greedy(prompt, 60)).text
    bodies = []
    for _ in range(50):
        begin = rng.randrange(len(text) - 8)
        stops = [text[begin:begin + rng.randrange(1, 8)], rng.choice(["zzz", text[:2] + "!", " w"]) ]
        bodies.append(greedy(prompt, 60, stop=stops))
    whole = [output(reply) for reply in roomy.together(bodies)]
    streams = [reply.events for reply in roomy.together([{**body, "stream": True} for body in bodies])]
    assert [streamed(events) for events in streams] == whole
    for body, found in zip(bodies, whole, strict=True):
        assert found.finish == "stop"
        assert found.text == text[:min(at for stop in body["stop"] if (at := text.find(stop)) >= 0)] or any(
            text.startswith(found.text + stop) for stop in body["stop"])
    for events in streams:
        assert all(choice["text"] or choice["finish_reason"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_in_one_last_chunk_if_asked_for(roomy: Served, path: str) -> None:
    """G07: with include_usage one chunk without choices; every other chunk has usage null, or none if not asked."""
    body = chat() if path == CHAT else greedy("hello", 8)
    usage = roomy.post(path, body).json["usage"]
    asked = roomy.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}).events
    assert asked[-1]["choices"] == []
    assert {name: asked[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert all(event["usage"] is None and event["choices"] for event in asked[:-1])
    for options in (None, {}, {"include_usage": False}):
        events = roomy.post(path, {**body, "stream": True, "stream_options": options}).events
        assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_options_without_a_stream_are_refused(roomy: Served, path: str) -> None:
    """G07: as OpenAI does; nothing is silently ignored."""
    body = chat() if path == CHAT else greedy("hello", 8)
    reply = roomy.post(path, {**body, "stream_options": {"include_usage": True}})
    assert (reply.status, reply.error["param"]) == (400, "stream_options")


@pytest.mark.parametrize(("fields", "reason"), [
    ({"stop": "w"}, "stop"), ({"stop_token_ids": list(range(256, 512))}, "stop"), ({"max_tokens": 3}, "length"),
    ({"max_tokens": None}, "length")], ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_reason_of_the_end_comes_once_and_last(roomy: Served, path: str, fields: Json, reason: str) -> None:
    """G08: null before, one of OpenAI's words on the last chunk, the same as in a whole answer."""
    prompt = {"messages": [{"role": "user", "content": "x" * 1800}]} if path == CHAT else {"prompt": random_ids(8, 30)}
    base = {**prompt, "repetition_penalty": 50, "temperature": 0, "ignore_eos": True, "max_tokens": 300, **fields}
    reasons = [event["choices"][0]["finish_reason"] for event in roomy.post(path, {**base, "stream": True}).events]
    assert reasons == [None] * (len(reasons) - 1) + [reason]
    assert roomy.post(path, base).json["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_of_a_chat_begins_with_its_role(roomy: Served, n: int) -> None:
    """G17: role and a content that is a string first, then no role; the indexes are told apart."""
    events = roomy.post(CHAT, chat(n=n, stream=True, temperature=1)).events
    for index in range(n):
        deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta and isinstance(delta.get("content", ""), str) for delta in deltas[1:])
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_the_openai_client_sees_one_answer_streamed_and_whole(roomy: Served) -> None:
    """G07, G17: through the SDK, both endpoints."""
    with roomy.openai() as client:
        name = client.models.list().data[0].id
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 20,
                                    "extra_body": {"ignore_eos": True, "repetition_penalty": 50}}
        whole = client.completions.create(model=name, prompt="hello", **settings)
        stream = client.completions.create(model=name, prompt="hello", stream=True,
                                           stream_options={"include_usage": True}, **settings)
        chunks = list(stream)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
        messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model=name, messages=messages, **settings)
        pieces = client.chat.completions.create(model=name, messages=messages, stream=True,
                                                **settings)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == answer.choices[0].message.content and answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(("logprobs", "status"), [(-1, 400), (0, 200), (1, 200), (20, 200), (21, 400), (512, 400),
                                                  (10**9, 400)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_logprobs_have_a_documented_maximum(roomy: Served, path: str, logprobs: int, status: int) -> None:
    """G18: server.max_logprobs; above it nothing is computed."""
    fields = {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}
    reply = roomy.post(path, {**(chat() if path == CHAT else {"prompt": "hello", "max_tokens": 3}), **fields})
    assert reply.status == status, reply.text
    if status == 400 and logprobs > 0:
        assert "20" in reply.error["message"] and str(logprobs) in reply.error["message"]
