"""POST /v1/chat/completions through the openai package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from servekit.core.request import FinishReason
from servekit.model.chat_template import ChatTemplate
from server.fake_engine import EOS, MAX_MODEL_LEN, LiveServer, Script, live_server, tokens

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def prompt_text(server: LiveServer) -> str:
    """The last prompt that the engine got, special tokens shown."""
    ids = server.engine.submitted[-1].prompt_token_ids
    return server.service.serving.model.tokenizer.decode(ids, skip_special_tokens=False)


def test_an_answer(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script([*tokens("Hi there"), EOS], num_cached=2)
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hi there", "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(server.engine.submitted[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len("Hi there") + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert prompt_text(server) == "<|bos|><|turn|>user\nhello\n<|turn|>assistant\n"


def test_the_default_is_what_the_context_has_left(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_completion_tokens": 3},
                                   {"max_tokens": 3, "max_completion_tokens": 3}])
def test_both_names_of_the_limit(client: openai.OpenAI, limit: dict[str, int]) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, **limit)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "hel"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_an_upper_bound_here_too(client: openai.OpenAI, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=65_535, stream=stream,
                                            extra_body=options)
    last = list(answer)[-1] if stream else answer
    assert last.usage.total_tokens == MAX_MODEL_LEN


def test_a_stream(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script([*tokens("Hi"), EOS])
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    first, *rest = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in rest)
    assert [chunk.choices[0].delta.content for chunk in rest] == ["H", "i", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_choices_of_a_stream_are_told_apart(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, n=3, max_tokens=5, stream=True))
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "hello"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]


def test_logprobs(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens("é"))
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert [bytes(token.bytes or []) for token in scores.content] == [b"\xc3", b"\xa9"]
    assert [(other.token, other.logprob) for other in scores.content[0].top_logprobs] == [("\ufffd", -0.5), ("a", -1.0)]
    streamed = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, logprobs=True,
                                              top_logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token for part in parts if part for token in part.content or []] == scores.content


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, logprobs=True)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert [(token.token, token.top_logprobs) for token in scores.content or []] == [("h", []), ("e", [])]


def test_content_parts_names_and_the_developer_role(client: openai.OpenAI, server: LiveServer) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert prompt_text(server) == ("<|bos|><|turn|>system\nbe brief\n<|turn|>user\none\ntwo\n<|turn|>assistant\n")


def test_continuing_the_last_message(client: openai.OpenAI, server: LiveServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    client.chat.completions.create(model="fake", messages=messages, max_tokens=1,
                                   extra_body={"continue_final_message": True})
    assert prompt_text(server) == "<|bos|><|turn|>user\nhello\n<|turn|>assistant\nWell, "
    client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1,
                                   extra_body={"add_generation_prompt": False})
    assert prompt_text(server) == "<|bos|><|turn|>user\nhello\n"
    with pytest.raises(openai.BadRequestError, match="contradicts"):
        client.chat.completions.create(model="fake", messages=messages, extra_body={
            "continue_final_message": True, "add_generation_prompt": True})


TEMPLATE = """{{ "loud " if shout else "" }}{% for m in messages %}{% if m.role != 'user' %}\
{{ raise_exception('only users, please') }}{% endif %}{{ m.content }}{% endfor %}"""


def test_template_variables_and_refusals() -> None:
    with (live_server(template=ChatTemplate(TEMPLATE)) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client):
        client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1,
                                       extra_body={"chat_template_kwargs": {"shout": True}})
        assert prompt_text(server) == "loud hello"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="only users, please") as error:
                client.chat.completions.create(model="fake", messages=[{"role": "assistant", "content": "x"}],
                                               stream=stream)
            assert error.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="bos_token cannot be set"):
            client.chat.completions.create(model="fake", messages=HELLO,
                                           extra_body={"chat_template_kwargs": {"bos_token": "x"}})


def test_a_model_without_template() -> None:
    with (live_server(has_template=False) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="fake", messages=HELLO)
        assert client.completions.create(model="fake", prompt="x", max_tokens=1).choices[0].text == "h"


@pytest.mark.parametrize("reason", [FinishReason.error, FinishReason.request_timeout, FinishReason.shutdown])
def test_a_failure_in_a_stream_raises_in_the_client(client: openai.OpenAI, server: LiveServer,
                                                    reason: FinishReason) -> None:
    server.engine.script = lambda _: Script(fail_after=3, failure=reason, message="it broke", delay_s=0.002)
    seen = ""
    with pytest.raises(openai.APIError, match="it broke"):
        for chunk in client.chat.completions.create(model="fake", messages=HELLO, max_tokens=50, stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert seen == "hel"


def test_a_timeout_tells_how_far_it_came(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(fail_after=3, failure=FinishReason.request_timeout, message="too late")
    with pytest.raises(openai.APIStatusError, match=r"too late \(after 3 output tokens\)") as error:
        client.chat.completions.create(model="fake", messages=HELLO, max_tokens=50)
    assert error.value.status_code == 504
    assert error.value.response.headers["x-should-retry"] == "false"


def test_the_request_id_comes_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1,
                                            extra_headers={"X-Request-Id": "my-id"})
    assert (answer._request_id, answer.id) == ("my-id", "chatcmpl-my-id")
    named = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1,
                                           extra_body={"request_id": "other"})
    assert named.id == "chatcmpl-other"
    assert client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)._request_id
