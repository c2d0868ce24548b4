"""POST /v1/completions through the openai package."""

from __future__ import annotations

import openai
import pytest

from servekit.core.request import FinishReason
from server.fake_engine import EOS, MAX_MODEL_LEN, LiveServer, Script, tokens


def test_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("hello", "length", 0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 5, 9)


def test_the_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], [[97, 98, 99]], ["abc"]])
def test_prompt_forms(client: openai.OpenAI, server: LiveServer, prompt: object) -> None:
    client.completions.create(model="fake", prompt=prompt, extra_body={"add_special_tokens": False})
    assert server.engine.submitted[0].prompt_token_ids == (97, 98, 99)


def test_lists_of_prompts_are_submitted_together_and_numbered_in_order(
        client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda spec: Script(spec.prompt_token_ids[1:], delay_s=0.03 / spec.prompt_token_ids[1])
    answer = client.completions.create(model="fake", prompt=["aaa", "bb", "c"], n=2, max_tokens=3, echo=False)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == ["aaa", "aaa", "bbb", "bbb", "ccc", "ccc"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4 + 3 + 2
    assert answer.usage.completion_tokens == 18


def test_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="say: ", max_tokens=5, echo=True)
    assert answer.choices[0].text == "say: hello"
    chunks = client.completions.create(model="fake", prompt=tokens("say: "), max_tokens=5, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "say: hello"


def test_a_stream_says_the_same_and_finishes_once(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_stop_strings_across_tokens(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens("one two three"), delay_s=0.002)
    answer = client.completions.create(model="fake", prompt="x", max_tokens=200, stop=["o t", "zzz"])
    assert answer.choices[0].text == "one tw"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == "o t"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one two t")
    chunks = list(client.completions.create(model="fake", prompt="x", max_tokens=200, stop="o t", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one tw"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].text for chunk in chunks[:-1]), "a chunk without text"
    server.wait_until(lambda: len(server.engine.aborted) == 2)


def test_include_the_stop_string(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens("one two three"))
    answer = client.completions.create(model="fake", prompt="x", max_tokens=50, stop="two",
                                       extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].text == "one two"


def test_stop_null_is_no_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", max_tokens=5, stop=None)
    assert answer.choices[0].text == "hello"


def test_eos_ends_and_is_not_shown(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script([*tokens("hi"), EOS])
    answer = client.completions.create(model="fake", prompt="x", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")
    ignored = client.completions.create(model="fake", prompt="x", max_tokens=6, extra_body={"ignore_eos": True})
    assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ("hihi", "length")
    shown = client.completions.create(model="fake", prompt="x", max_tokens=3,
                                      extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].text == "hi<|turn|>"


def test_client_stop_tokens_add_to_the_models_own(client: openai.OpenAI, server: LiveServer) -> None:
    client.completions.create(model="fake", prompt="x", extra_body={"stop_token_ids": [5]})
    client.completions.create(model="fake", prompt="x", extra_body={"stop_token_ids": [5], "ignore_eos": True})
    assert [spec.sampling.stop_token_ids for spec in server.engine.submitted] == [(5, EOS), (5,)]


def test_characters_are_never_split(client: openai.OpenAI, server: LiveServer) -> None:
    text = "naïve 🌶 日本語"
    server.engine.script = lambda _: Script(tokens(text))
    chunks = client.completions.create(model="fake", prompt="x", max_tokens=len(tokens(text)), stream=True)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_max_tokens_is_an_upper_bound(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[97] * (MAX_MODEL_LEN - 10), max_tokens=65_535)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")


def test_the_longest_prompt_is_one_less_than_the_context(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[97] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="fake", prompt=[97] * length, max_tokens=1)
        assert error.value.code == "context_length_exceeded"
        assert f"{MAX_MODEL_LEN} tokens" in error.value.message
        assert f"has {length}" in error.value.message


def test_truncation_is_asked_for_and_shown(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(model="fake", prompt=[*tokens("x" * 300), *tokens("tail")], echo=True,
                                       max_tokens=1, extra_body={"truncate_prompt_tokens": 4})
    assert server.engine.submitted[0].prompt_token_ids == tuple(tokens("tail"))
    assert answer.choices[0].text == "tailh"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.to_dict()["prompt_tokens_details"] == {"cached_tokens": 0, "truncated_tokens": 300}


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", max_tokens=3, logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens == ["h", "e", "l"]
    assert scores.token_logprobs == [-0.5, -0.5, -0.5]
    assert scores.top_logprobs is not None
    assert scores.top_logprobs[0] == {"h": -0.5, "a": -1.0}
    assert scores.text_offset == [0, 1, 2]


def test_streamed_logprobs_are_the_same(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens("né!"))
    whole = client.completions.create(model="fake", prompt="x", max_tokens=4, logprobs=1).choices[0].logprobs
    chunks = client.completions.create(model="fake", prompt="x", max_tokens=4, logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts if part for item in getattr(part, name)] == getattr(whole, name)
    assert whole.text_offset == [0, 1, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    """What evaluation harnesses ask for: echo and logprobs."""
    answer = client.completions.create(model="fake", prompt=[97, 98, 99], max_tokens=max_tokens, echo=True, logprobs=1,
                                       temperature=0)
    (choice,) = answer.choices
    assert choice.text == "abc" + "h" * max_tokens
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "h"][:3 + max_tokens]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5][:3 + max_tokens]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[:2] == [None, {"b": -0.5}]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens


def test_scoring_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="b", max_tokens=0, echo=True, logprobs=1, stream=True,
                                            stream_options={"include_usage": True}))
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["b"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 0


def test_usage_in_streams(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(num_cached=3)
    whole = client.completions.create(model="fake", prompt="abc", max_tokens=5).usage
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=5, stream=True,
                                            stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole)
    assert whole is not None
    assert whole.prompt_tokens_details is not None
    assert whole.prompt_tokens_details.cached_tokens == 3
    continuous = list(client.completions.create(
        model="fake", prompt="abc", max_tokens=5, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk.usage.completion_tokens for chunk in continuous if chunk.usage] == [1, 2, 3, 4, 5, 5]


def test_tokens_that_come_together_go_together(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens_per_event=4)
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=11, stream=True,
                                            extra_body={"return_token_ids": True}))
    assert [chunk.choices[0].text for chunk in chunks] == ["hell", "o wo", "rld"]
    assert [id_ for chunk in chunks for id_ in chunk.choices[0].token_ids] == tokens("hello world")
    assert chunks[0].choices[0].prompt_token_ids == [256, 97, 98, 99]


def test_every_choice_has_a_seed_of_its_own(client: openai.OpenAI, server: LiveServer) -> None:
    for prompt in ("x", "x", ["y", "x"]):
        client.completions.create(model="fake", prompt=prompt, n=3, seed=7, max_tokens=1)
    seeds = [spec.sampling.seed for spec in server.engine.submitted]
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] * 4 == seeds
    client.completions.create(model="fake", prompt="x", n=3, max_tokens=1)
    assert set(seeds).isdisjoint(spec.sampling.seed for spec in server.engine.submitted[-3:])


def test_sampling_parameters_arrive(client: openai.OpenAI, server: LiveServer) -> None:
    client.completions.create(
        model="fake", prompt="x", temperature=0.3, top_p=0.4, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"5": 1.5}, user="alice", max_tokens=9,
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "cache_salt": "s",
                    "allowed_token_ids": [1, 2], "priority": 0})
    (spec,) = server.engine.submitted
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.4, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.min_tokens) == ({5: 1.5}, (1, 2), 2)
    assert (spec.tenant, spec.cache_salt, sampling.max_tokens) == ("alice", "s", 9)


def test_null_means_absent(client: openai.OpenAI, server: LiveServer) -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
             "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "n",
             "logprobs", "echo", "user", "stream", "stream_options", "best_of", "cache_salt", "priority", "model",
             "response_format", "tools", "some_unknown_field")
    answer = client.completions.create(model="fake", prompt="x", extra_body=dict.fromkeys(names))
    assert answer.choices[0].text == "hello worldhello"
    assert server.engine.submitted[0].sampling.temperature == 1.0


def test_best_of(client: openai.OpenAI) -> None:
    assert len(client.completions.create(model="fake", prompt="x", n=2, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of=3"):
        client.completions.create(model="fake", prompt="x", n=2, best_of=3)


def test_a_failed_choice_fails_the_request_and_ends_the_others(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda spec: Script(
        delay_s=0.01, fail_after=2 if spec.request_id.endswith("-0") else None, message="NaN in the logits")
    with pytest.raises(openai.InternalServerError, match="NaN in the logits") as error:
        client.completions.create(model="fake", prompt="x", n=3, max_tokens=200)
    assert error.value.code == "generation_failed"
    server.wait_until(lambda: len(server.engine.aborted) == 2)


@pytest.mark.parametrize(("refusal", "status", "code"), [
    (FinishReason.queue_full, 503, "queue_full"),
    (FinishReason.queue_timeout, 503, "queue_timeout"),
    (FinishReason.too_long, 400, "context_length_exceeded"),
    (FinishReason.request_timeout, 504, "request_timeout"),
    (FinishReason.shutdown, 503, "draining"),
    (FinishReason.error, 500, "generation_failed"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_a_status_of_their_own(client: openai.OpenAI, server: LiveServer, refusal: FinishReason,
                                             status: int, code: str, stream: bool) -> None:
    server.engine.script = lambda _: Script(refusal=refusal, message="because")
    with pytest.raises(openai.APIStatusError, match="because") as error:
        client.completions.create(model="fake", prompt="x", n=2, stream=stream)
    assert (error.value.status_code, error.value.code) == (status, code)
    assert ("retry-after" in error.value.response.headers) == (status == 503)
