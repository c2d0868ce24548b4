"""Shared prefixes save work and change nothing: hits equal cold answers, and only equal prefixes meet."""

from __future__ import annotations

import random

import pytest

from faults.outputs import Reference, greedy, output, random_ids, streamed
from faults.serving import COMPLETIONS, Served, read_until

BLOCK = 16
"""Tokens of a block of the roomy server."""


def cached_tokens(server: Served, prompt: list[int], **fields: object) -> int:
    """How much of a prompt is found in the cache; it is found by others afterwards."""
    usage = server.post(COMPLETIONS, greedy(prompt, 1, **fields)).json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_repeated_prompt_hits_and_every_number_says_so(roomy: Served) -> None:
    """E08: usage, metrics and a reset agree; the last token is always computed."""
    prompt = random_ids(2000, 10 * BLOCK)
    hits, queries = roomy.metric("prefix_cache_hits_total"), roomy.metric("prefix_cache_queries_total")
    assert [cached_tokens(roomy, prompt) for _ in range(2)] == [0, 9 * BLOCK]
    roomy.wait_until(lambda: roomy.metric("prefix_cache_hits_total") == hits + 9 * BLOCK)
    assert roomy.metric("prefix_cache_queries_total") >= queries + 20 * BLOCK
    assert roomy.post("/reset_prefix_cache", {}).json["num_blocks_forgotten"] >= 10
    assert cached_tokens(roomy, prompt) == 0


def test_cold_hit_and_hit_after_every_ending_are_equal(roomy: Served, reference: Reference) -> None:
    """E03 (ten prompts rather than twenty): after a stop string, after a client that left, after a length."""
    for number in range(10):
        prompt = random_ids(2100 + number, 50 + 7 * number)
        body = greedy(prompt, 24)
        expected = reference.one(body)
        first_line = next((text for text in (expected.text[3:6], expected.text[2:4]) if text), "x")
        assert output(roomy.post(COMPLETIONS, body)) == expected
        assert output(roomy.post(COMPLETIONS, body)) == expected
        stopped = output(roomy.post(COMPLETIONS, {**body, "stop": first_line}))
        assert stopped.finish == "stop" and expected.text.startswith(stopped.text)
        assert output(roomy.post(COMPLETIONS, body)) == expected
        with roomy.sent(COMPLETIONS, {**body, "max_tokens": 1500, "stream": True}) as connection:
            read_until(connection, 2)
        hit = roomy.post(COMPLETIONS, body)
        assert output(hit) == expected
        assert hit.json["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // BLOCK * BLOCK


def test_equal_prompts_at_once_on_a_cold_cache_are_all_right(roomy: Served, reference: Reference) -> None:
    """E04: eight times the same 300 tokens in one batch."""
    body = greedy(random_ids(2200, 300), 20)
    replies = roomy.together([body] * 8)
    assert [output(reply) for reply in replies] == reference.many([body]) * 8


def test_preempted_requests_that_find_their_prefix_again_are_right(tight: Served, reference: Reference) -> None:
    """E02 (64 requests rather than 256, of 16 kinds): two shared blocks, a pool for a few, preemption certain."""
    shared = random_ids(2300, 16)
    bodies = [greedy(shared + random_ids(2301 + i % 16, 10 + i % 16), 40) for i in range(64)]
    before = tight.stats
    replies = tight.together(bodies)
    after = tight.stats
    assert after["preemptions_total"] > before["preemptions_total"]
    assert after["cached_tokens_total"] > before["cached_tokens_total"]
    assert [output(reply) for reply in replies] == reference.many(bodies)


def test_tenants_share_only_within_a_salt(roomy: Served) -> None:
    """E05: a positive hit for each salt, none across; a tenant named like another's salt finds nothing."""
    prompt = random_ids(2400, 5 * BLOCK + 1)
    whole = 5 * BLOCK
    assert cached_tokens(roomy, prompt, cache_salt="a") == 0
    assert cached_tokens(roomy, prompt, cache_salt="a") == whole
    assert cached_tokens(roomy, prompt, cache_salt="b") == 0
    assert cached_tokens(roomy, prompt, user="a") == 0
    assert cached_tokens(roomy, prompt) == whole, "without a salt, users share"
    assert cached_tokens(roomy, prompt, cache_salt="") == whole, "an empty salt is none"
    assert cached_tokens(roomy, prompt, cache_salt="b", user="a") == whole


@pytest.mark.parametrize("salt", [5, True, ["a"], {"a": 1}, 1.5, "x" * 257])
def test_an_odd_salt_is_refused(roomy: Served, salt: object) -> None:
    """E05: never turned into text that might be another's."""
    reply = roomy.post(COMPLETIONS, greedy([1, 2, 3], 1, cache_salt=salt))
    assert (reply.status, reply.error["param"]) == (400, "cache_salt")


def test_a_block_is_found_only_after_the_same_beginning(roomy: Served, reference: Reference) -> None:
    """E06: equal second block after another first one; equal blocks in another order."""
    one, two, three = (random_ids(2500 + i, BLOCK) for i in range(3))
    assert cached_tokens(roomy, one + two + three + [1]) == 0
    for prompt, expected in ((three + two + one + [1], 0), (two + one + three + [1], 0),
                             (one + three + two + [1], BLOCK), (one + two + [1], 2 * BLOCK)):
        reply = roomy.post(COMPLETIONS, greedy(prompt, 12))
        assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        assert output(reply) == reference.one(greedy(prompt, 12))


def test_no_prompt_among_many_gets_anothers_blocks(roomy: Served, reference: Reference) -> None:
    """E06 (400 prompts rather than 50,000, of which 20 are checked): different prompts never hit each other."""
    rng = random.Random(4)
    prompts = [random_ids(3000 + i, rng.randrange(17, 60)) for i in range(400)]
    replies = [reply for begin in range(0, 400, 100)
               for reply in roomy.together([greedy(prompt, 1) for prompt in prompts[begin:begin + 100]])]
    assert all(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for reply in replies)
    checked = [greedy(prompt, 8) for prompt in rng.sample(prompts, 20)]
    assert [output(reply) for reply in roomy.together(checked)] == reference.many(checked)


def test_prompt_logprobs_of_a_cached_prompt_are_those_of_a_cold_one(roomy: Served) -> None:
    """E07: echo with logprobs, twice and after a hit: one entry a token, the first without a score."""
    prompt = random_ids(2600, 3 * BLOCK + 2)
    body = greedy(prompt, 4, echo=True, logprobs=2)
    cold = roomy.post(COMPLETIONS, body).json["choices"][0]
    assert cached_tokens(roomy, prompt) == 3 * BLOCK
    hot = roomy.post(COMPLETIONS, body).json["choices"][0]
    lists = cold["logprobs"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert [len(lists[name]) for name in names] == [len(prompt) + 4] * 4
    assert lists["token_logprobs"][0] is None and None not in lists["token_logprobs"][1:]
    assert hot["logprobs"]["tokens"] == lists["tokens"] and hot["text"] == cold["text"]
    assert hot["logprobs"]["token_logprobs"][1:] == pytest.approx(lists["token_logprobs"][1:], abs=1e-9)


def test_many_prefixes_under_eviction_are_right(tight: Served, reference: Reference) -> None:
    """E09 (90 requests rather than 500; aborts are in test_leaving.py): three prefixes fight for 24 blocks."""
    rng = random.Random(5)
    shared = [random_ids(2700 + i, 48) for i in range(3)]
    bodies = [greedy(rng.choice(shared) + random_ids(2800 + i % 25, 1 + i % 25), 10, stream=True) for i in range(90)]
    replies = tight.together(bodies)
    expected = reference.many([{**body, "stream": False} for body in bodies])
    assert [streamed(reply.events) for reply in replies] == expected
