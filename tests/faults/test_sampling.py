"""Sampling parameters at their edges, through the real engine: documented, finite, and nobody else's business."""

from __future__ import annotations

import json

import pytest

from faults.outputs import VOCAB, Reference, greedy, output, outputs, random_ids, streamed
from faults.serving import CHAT, COMPLETIONS, Json, Reply, Served, run

PROMPT = random_ids(1, 20)
ODD_VALUES = ["high", "", [], [[1]], {}, {"a": {"b": 1}}, True, -1, -(2**70), 2**70, 1e308, -1e308, 0.01]
"""Sent as JSON; NaN and infinity, which JSON has no words for, are sent as Python writes them."""
NUMBERS = ["n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "seed", "min_tokens", "logprobs", "truncate_prompt_tokens", "priority"]
OTHERS = ["stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "stream_options", "cache_salt", "user", "echo"]
NULLABLE = [*NUMBERS, *OTHERS, "stream", "ignore_eos", "best_of", "suffix", "model"]


def sampled(server: Served, **fields: object) -> Json:
    reply = server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True,
                                      **fields})
    assert reply.status == 200, reply.text
    answer: Json = reply.json
    return answer


def test_several_choices_differ_and_a_seed_repeats_them(roomy: Served) -> None:
    """F04: n=4 at temperature 1, twice; each choice has its index, the prompt counts once."""
    first, second = (sampled(roomy, n=4, temperature=1, seed=7) for _ in range(2))
    tokens = [[choice["token_ids"] for choice in answer["choices"]] for answer in (first, second)]
    assert tokens[0] == tokens[1]
    assert len({tuple(ids) for ids in tokens[0]}) == 4
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (20, 48)
    unseeded = sampled(roomy, n=4, temperature=1)["choices"]
    assert len({tuple(choice["token_ids"]) for choice in unseeded}) == 4


@pytest.mark.parametrize("fields", [
    {"temperature": 0}, {"temperature": 1e-9}, {"temperature": 5e-324}, {"top_p": 0}, {"top_p": 0, "temperature": 100},
    {"top_k": 1, "temperature": 2}, {"min_p": 1, "temperature": 2}], ids=str)
def test_everything_that_means_greedy_is_greedy(roomy: Served, fields: Json) -> None:
    """F08: no NaN, no division by zero, whatever the way to say it."""
    expected = sampled(roomy, temperature=0)["choices"][0]["token_ids"]
    assert sampled(roomy, **fields)["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("fields", [
    {"temperature": 100}, {"temperature": 2, "top_p": 1, "top_k": -1}, {"top_k": 2**31 - 1},
    {"repetition_penalty": 0.01}, {"repetition_penalty": 100},
    {"presence_penalty": 2, "frequency_penalty": -2}, {"seed": -(2**63)},
    {"logit_bias": {"0": -100, str(VOCAB - 1): 100}}, {"min_tokens": 12, "logit_bias": {"3": 1}},
    {"min_tokens": 5, "stop_token_ids": [7]}], ids=str)
def test_the_ends_of_every_range_work(roomy: Served, fields: Json) -> None:
    """F08: what is accepted is computed."""
    tokens = sampled(roomy, **fields)["choices"][0]["token_ids"]
    assert 5 <= len(tokens) <= 12 and all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("fields", [
    {"allowed_token_ids": [7, 8], "stop_token_ids": [7, 8]}, {"stop_token_ids": list(range(VOCAB))}],
    ids=["allowed", "all"])
def test_a_request_that_leaves_no_token_is_refused(roomy: Served, fields: Json, temperature: float) -> None:
    """F08: min_tokens bans the stop tokens, and nothing else is allowed. No token outside the allowed ones comes."""
    reply = roomy.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "min_tokens": 3, "temperature": temperature,
                                     "return_token_ids": True, **fields})
    assert reply.status in (400, 500), reply.json["choices"][0]["token_ids"]
    assert reply.error["message"]


@pytest.mark.parametrize("top_p", [1, 0.9])
def test_only_allowed_tokens_are_sampled(roomy: Served, top_p: float) -> None:
    """F08: also when the allowed ones are unlikely."""
    allowed = [3, 99, 300]
    answer = sampled(roomy, allowed_token_ids=allowed, temperature=1, top_p=top_p, max_tokens=50)
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)


def test_odd_values_of_every_field_are_refused_and_running_streams_go_on(roomy: Served, reference: Reference) -> None:
    """F07: over 300 requests with one bad field each, while four streams run; the streams equal the reference."""
    bodies = [greedy(random_ids(50 + i, 20), 400) for i in range(4)]

    async def body() -> None:
        async with roomy.session() as session:
            streams = [await session.post(COMPLETIONS, json={**one, "stream": True}) for one in bodies]
            for name in (*NUMBERS, *OTHERS):
                for value in (*ODD_VALUES, float("nan"), float("inf"), float("-inf")):
                    data = json.dumps({"prompt": PROMPT, "max_tokens": 2, name: value})
                    async with session.post(COMPLETIONS, data=data, headers=is_json) as reply:
                        answer = await reply.json()
                    if reply.status == 200:
                        accepted.append((name, value))
                    else:
                        assert reply.status == 400 and answer["error"]["message"], (name, value)
            texts = [await stream.text() for stream in streams]
        assert [streamed(Reply(200, {}, text).events) for text in texts] == expected

    is_json = {"content-type": "application/json"}
    accepted: list[tuple[str, object]] = []
    expected = reference.many(bodies)
    run(body())
    assert {name for name, value in accepted if isinstance(value, float) and value != value} == set(), "NaN"
    assert {(name, value) for name, value in accepted if not isinstance(value, list | dict)} <= {
        ("temperature", 0.01), ("top_p", 0.01), ("min_p", 0.01), ("presence_penalty", 0.01), ("presence_penalty", -1),
        ("frequency_penalty", 0.01), ("frequency_penalty", -1), ("repetition_penalty", 0.01), ("top_k", -1),
        ("seed", -1), ("stop", "high"), ("cache_salt", "high"), ("cache_salt", ""), ("user", "high"), ("user", ""),
        ("echo", True)}
    assert [(name, value) for name, value in accepted if isinstance(value, list | dict)] == [
        ("stop", []), ("stop_token_ids", []), ("logit_bias", {}), ("stream_options", {})], "empty ones ask for nothing"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize(("max_tokens", "status"), [(0, None), (1, 200), (-1, 400), (1.5, 400)])
def test_very_few_tokens(roomy: Served, max_tokens: float, status: int | None, logprobs: int | None, echo: bool,
                         stream: bool) -> None:
    """F11: zero tokens score the prompt if echo asks for it and are refused otherwise; one is exactly one."""
    reply = roomy.post(COMPLETIONS, {"prompt": "hello", "max_tokens": max_tokens, "echo": echo, "logprobs": logprobs,
                                     "stream": stream, "ignore_eos": True, "return_token_ids": True,
                                     "stream_options": {"include_usage": True} if stream else None})
    assert reply.status == (status or (200 if echo else 400)), reply.text
    if reply.status != 200:
        assert reply.error["param"] == "max_tokens"
        return
    events = reply.events if stream else [reply.json]
    choices = [choice for event in events for choice in event["choices"]]
    assert sum(len(choice["token_ids"]) for choice in choices) == max_tokens
    assert events[-1]["usage"]["completion_tokens"] == max_tokens
    assert choices[-1]["finish_reason"] == "length"
    text = "".join(choice["text"] for choice in choices)
    assert text.startswith("hello") == echo
    scored = sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])
    assert scored == (0 if logprobs is None else max_tokens + 6 * echo)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_the_same_as_leaving_a_field_out(roomy: Served, path: str) -> None:
    """F12: for every optional field, one at a time and all at once."""
    base: Json = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    base |= {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x" * 1800}]}
    expected = roomy.post(path, base).json["choices"]
    given = [{name: None} for name in NULLABLE if name not in base]
    for fields in (*given, {name: None for one in given for name in one}):
        reply = roomy.post(path, {**base, **fields})
        assert reply.status == 200, (fields, reply.text)
        assert reply.json["choices"] == expected
    without_limit = roomy.post(path, {**base, "max_tokens": None})
    assert without_limit.json["usage"]["completion_tokens"] == (
        16 if path == COMPLETIONS else 2048 - without_limit.json["usage"]["prompt_tokens"])


def test_one_prompt_in_several_forms_is_one_prompt(roomy: Served, reference: Reference) -> None:
    """F09: text, ids, a list of each, and several at once."""
    ids = [256, *b"hello"]
    expected = reference.one(greedy(ids, 10))
    for prompt in ("hello", ids, ["hello"], [ids]):
        assert output(roomy.post(COMPLETIONS, {**greedy([], 10), "prompt": prompt})) == expected
    both = outputs(roomy.post(COMPLETIONS, {**greedy([], 10), "prompt": ["hello", ids]}))
    assert both == [expected] * 2
