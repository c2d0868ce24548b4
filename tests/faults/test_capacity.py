"""How long a request may be: what is advertised holds to the token, and what is beyond it is refused with numbers."""

from __future__ import annotations

import re

import pytest

from faults.outputs import Reference, greedy, output, outputs, random_ids, streamed
from faults.serving import CHAT, COMPLETIONS, Reply, Served

CONTEXT = 192
"""Tokens of the tight server, in its context and in its whole KV cache."""


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True, **fields}


def prompt_tokens(server: Served, text: str) -> int:
    """Tokens of a conversation of one turn."""
    return int(server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json["count"])


def is_too_long(reply: Reply) -> bool:
    """Whether the answer is the refusal of a prompt for its length."""
    if reply.status == 200:
        return False
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), reply.text
    return True


def test_every_prompt_length_around_the_pools_capacity_is_answered_or_refused(tight: Served) -> None:
    """A03, A07, A09: no length hangs or gives an empty answer, and the switch comes once, where it is advertised."""
    assert tight.get("/v1/models").json["data"][0]["max_model_len"] == CONTEXT
    assert tight.info["engine"]["kv_tokens"] == CONTEXT
    for length in range(CONTEXT - 16, CONTEXT + 9):
        reply = tight.post(COMPLETIONS, greedy(random_ids(length, length), 1))
        assert is_too_long(reply) == (length >= CONTEXT), length
        assert length >= CONTEXT or len(output(reply).token_ids) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_max_tokens_is_an_upper_bound_that_the_context_may_undercut(tight: Served, path: str, stream: bool) -> None:
    """A05: clients send a huge max_tokens; all four ways to ask get the same clamp."""
    text = "x" * 140
    if path == CHAT:
        num_prompt, body = prompt_tokens(tight, text), chat(text)
    else:
        num_prompt, body = 141, {"prompt": text, "temperature": 0, "ignore_eos": True}
    reply = tight.post(path, {**body, "max_tokens": 65_535, "stream": stream, "stream_options": {"include_usage": True}
                              if stream else None})
    assert reply.status == 200, reply.text
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    choices = [choice for event in reply.events for choice in event["choices"]] if stream else reply.json["choices"]
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_prompt, CONTEXT)


@pytest.mark.parametrize("excess", [0, 1, 2 * CONTEXT])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_numbers_of_a_refusal_are_the_limit_and_the_prompts_length(tight: Served, path: str, excess: int) -> None:
    """A06, A08: nothing is cut silently, and every number in the message is one that the client can check."""
    text = "unique" + "y" * (CONTEXT + excess)
    body = chat(text) if path == CHAT else {"prompt": text}
    num_prompt = prompt_tokens(tight, text) if path == CHAT else len(text) + 1
    reply = tight.post(path, {**body, "max_tokens": 7})
    assert is_too_long(reply)
    assert {int(number) for number in re.findall(r"\d+", reply.error["message"])} == {CONTEXT, num_prompt, CONTEXT - 1}
    assert reply.error["param"] == ("messages" if path == CHAT else "prompt")


def test_a_prompt_is_truncated_only_on_request_and_the_answer_says_so(tight: Served, reference: Reference) -> None:
    """A08: the end of the prompt is kept, usage has the tokens that were used and how many were not."""
    ids = random_ids(1, 300)
    assert is_too_long(tight.post(COMPLETIONS, greedy(ids, 5)))
    reply = tight.post(COMPLETIONS, greedy(ids, 5, truncate_prompt_tokens=100))
    assert output(reply) == reference.one(greedy(ids[-100:], 5))
    usage = reply.json["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["truncated_tokens"]) == (100, 200)
    whole = tight.post(COMPLETIONS, greedy(ids[:150], 5)).json["usage"]
    assert whole["prompt_tokens"] == 150 and "truncated_tokens" not in whole["prompt_tokens_details"]


def test_the_longest_prompt_is_one_token_less_than_the_context(tight: Served) -> None:
    """A09: found by bisection, as a suspicious user would."""
    low, high = 1, 4 * CONTEXT
    while high - low > 1:
        middle = (low + high) // 2
        if is_too_long(tight.post(COMPLETIONS, {"prompt": [5] * middle, "max_tokens": 1})):
            high = middle
        else:
            low = middle
    assert low == CONTEXT - 1


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 10**9}])
def test_a_generation_without_end_ends_at_the_context(tight: Served, limit: dict[str, int]) -> None:
    """A10: neither no limit nor a huge one shifts the context or goes on for ever."""
    reply = tight.post(CHAT, chat("tell me everything", **limit))
    assert reply.status == 200, reply.text
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"]["total_tokens"] == CONTEXT


def test_requests_that_are_too_long_leave_no_trace(tight: Served) -> None:
    """A11 (80 requests rather than 200): all refused, no KV block kept, no memory lost."""
    bodies = [greedy(random_ids(i, CONTEXT + i), 5, n=1 + 2 * (i % 2), stream=i % 3 == 0) for i in range(80)]
    tight.together(bodies[:20])
    before = tight.rss_bytes
    assert all(map(is_too_long, tight.together(bodies)))
    assert tight.stats["kv_blocks_used"] == 0
    assert tight.rss_bytes - before < 32e6


def test_many_that_could_each_fill_most_of_the_pool_all_finish(tight: Served, reference: Reference) -> None:
    """A13, B12 (16 requests rather than 32): preemption loses nothing, and usage knows prompts from recomputation."""
    bodies = [greedy(random_ids(i, 45 + i), 60) for i in range(16)]
    before = tight.stats
    replies = tight.together(bodies)
    assert tight.stats["preemptions_total"] > before["preemptions_total"], "the pool was meant to be too small"
    assert [output(reply) for reply in replies] == reference.many(bodies)
    for i, reply in enumerate(replies):
        usage = reply.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (45 + i, 60, 105 + i)


def test_a_request_that_may_grow_large_does_not_keep_small_ones_waiting(busy: Served) -> None:
    """A12: memory is taken as tokens come, so eight small requests finish beside one that may fill the pool."""
    with busy.sent(COMPLETIONS, {"prompt": "x", "max_tokens": 32_000, "stream": True}) as large:
        assert b"200 OK" in large.recv(4096)
        replies = busy.together([{"prompt": f"small {i}", "max_tokens": 10} for i in range(8)])
        assert [reply.status for reply in replies] == [200] * 8
        assert busy.stats["num_running"] == 1, "the large one was meant to outlast them"


def test_a_stop_string_frees_what_a_large_request_might_have_taken(busy: Served) -> None:
    """A12: max_tokens is near the pool's size, a stop string ends it early, and its blocks come back."""
    body = {"prompt": "x", "max_tokens": 32_000, "temperature": 0, "ignore_eos": True}
    opening = busy.post(COMPLETIONS, {**body, "max_tokens": 30}).json["choices"][0]["text"]
    reply = busy.post(COMPLETIONS, {**body, "stop": opening[5:12]})
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "stop" and opening.startswith(choice["text"])
    busy.wait_until_idle()


def test_choices_and_prompts_each_get_their_own_answer(tight: Served, reference: Reference) -> None:
    """A13: prompts of one request compete for the pool like requests of their own."""
    prompts = [random_ids(100 + i, 40) for i in range(6)]
    reply = tight.post(COMPLETIONS, {**greedy([], 60), "prompt": prompts, "n": 2})
    expected = reference.many([greedy(prompt, 60) for prompt in prompts for _ in range(2)])
    assert outputs(reply) == expected
    assert reply.json["usage"]["prompt_tokens"] == 240 and reply.json["usage"]["completion_tokens"] == 720


def test_the_stream_of_a_preempted_request_repeats_nothing(tight: Served, reference: Reference) -> None:
    """B12: joined, the deltas are the reference; usage counts tokens, not recomputation."""
    bodies = [greedy(random_ids(200 + i, 50), 80, stream=True, stream_options={"include_usage": True})
              for i in range(10)]
    before = tight.stats["preemptions_total"]
    replies = tight.together(bodies)
    assert tight.stats["preemptions_total"] > before, "the pool was meant to be too small"
    expected = reference.many([greedy(random_ids(200 + i, 50), 80) for i in range(10)])
    assert [streamed(reply.events) for reply in replies] == expected
    for reply in replies:
        assert reply.events[-1]["usage"]["completion_tokens"] == 80
        assert reply.events[-1]["usage"]["prompt_tokens"] == 50
