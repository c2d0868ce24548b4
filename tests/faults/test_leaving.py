"""Clients that leave or give up: their work ends wherever it is, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket

import aiohttp
import pytest

from faults.configurations import ENDLESS_TOKENS
from faults.outputs import Reference, greedy, output, random_ids, streamed
from faults.serving import CHAT, COMPLETIONS, Json, Served, post, read_to_end, read_until, run

ENDLESS: dict[str, Json] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_running_request_ends_when_its_client_leaves(busy: Served, path: str, stream: bool, n: int) -> None:
    """C01, C07: every endpoint, whole or streamed, one choice or several; counted, and without a traceback."""
    before = busy.metric("request_success_total", finished_reason="abort")
    with busy.sent(path, {**ENDLESS[path], "stream": stream, "n": n}) as connection:
        busy.wait_until(lambda: busy.stats["num_running"] == n)
        if stream:
            read_until(connection, 5)
    busy.wait_until_idle()
    busy.wait_until(lambda: busy.metric("request_success_total", finished_reason="abort") == before + n)


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_ends_when_its_client_leaves(busy: Served, stream: bool) -> None:
    """C01: also in the queue, where nothing is sent that could fail."""
    with busy.sent(COMPLETIONS, {**ENDLESS[COMPLETIONS], "n": 4}):
        busy.wait_until(lambda: busy.stats["num_running"] == 4)
        with busy.sent(COMPLETIONS, {**ENDLESS[COMPLETIONS], "stream": stream}):
            busy.wait_until(lambda: busy.stats["num_waiting"] == 1)
        busy.wait_until(lambda: busy.stats["num_waiting"] == 0)
        assert busy.stats["num_running"] == 4, "the others were meant to stay"


def test_a_prefill_stops_when_its_client_leaves(busy: Served) -> None:
    """C03: most of the thousand chunks of a long prompt are never computed."""
    before = busy.stats["prompt_tokens_total"]
    with busy.sent(COMPLETIONS, {"prompt": [9] * 32_000, "max_tokens": 5, "stream": True}):
        busy.wait_until(lambda: busy.stats["prompt_tokens_total"] - before >= 64)
        assert busy.stats["kv_blocks_used"] > 0
    busy.wait_until_idle()
    assert busy.stats["prompt_tokens_total"] - before < 16_000


def test_many_that_leave_at_random_harm_nobody(roomy: Served, reference: Reference) -> None:
    """C04, C05 (60 disconnects rather than 300): at concurrency 20, then ten normal requests equal the reference."""
    rng = random.Random(1)
    moments = [rng.uniform(0, 0.3) for _ in range(60)]

    async def leave(number: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            body = greedy(random_ids(number, 10 + 5 * number), 1500, stream=number % 2 == 0, n=1 + number % 3)
            hasty = aiohttp.ClientTimeout(moments[number] + 0.001)
            async with aiohttp.ClientSession(roomy.url, timeout=hasty) as session:
                with pytest.raises(TimeoutError):
                    await post(session, COMPLETIONS if number % 4 else CHAT, body if number % 4 else {
                        **ENDLESS[CHAT], "max_tokens": 1500, "stream": number % 8 == 0})

    async def body() -> None:
        gate = asyncio.Semaphore(20)
        await asyncio.gather(*(leave(number, gate) for number in range(60)))

    run(body())
    bodies = [greedy(random_ids(900 + i, 40), 20) for i in range(10)]
    assert [output(reply) for reply in roomy.together(bodies)] == reference.many(bodies)


def test_the_pool_adds_up_under_every_kind_of_ending(tight: Served, reference: Reference) -> None:
    """C05, E09 (120 requests rather than five minutes): aborts, stops, lengths, errors, preemptions, prefix hits."""
    rng = random.Random(2)
    shared = [random_ids(i, 40) for i in range(3)]
    bodies = [greedy(shared[i % 3] + random_ids(1000 + i % 30, 5 + i % 30), 30) for i in range(120)]

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number * 0.005)
        match number % 5:
            case 0:
                assert output(await post(session, COMPLETIONS, bodies[number])) == expected[number]
            case 1:
                hasty = aiohttp.ClientTimeout(rng.uniform(0.01, 0.2))
                with contextlib.suppress(TimeoutError):
                    stream = {**bodies[number], "stream": True}
                    async with session.post(COMPLETIONS, json=stream, timeout=hasty) as answer:
                        await answer.read()
            case 2:
                token = expected[number].token_ids[7]
                stopped = output(await post(session, COMPLETIONS, {**bodies[number], "stop_token_ids": [token]}))
                assert stopped.finish == "stop"
                assert stopped.token_ids == expected[number].token_ids[:expected[number].token_ids.index(token) + 1]
            case 3:
                reply_too_long = await post(session, COMPLETIONS, greedy(random_ids(number, 193), 5))
                assert reply_too_long.status == 400
            case 4:
                reply = await post(session, COMPLETIONS, {**bodies[number], "stream": True})
                assert streamed(reply.events) == expected[number]

    async def watch(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get("/server_info") as answer:
                stats = (await answer.json())["stats"]
            assert 0 <= stats["kv_blocks_used"] <= stats["kv_blocks_total"] == 24
            await asyncio.sleep(0.02)

    async def body() -> None:
        async with tight.session() as session:
            watcher = asyncio.create_task(watch(session))
            await asyncio.gather(*(one(session, number) for number in range(120)))
            assert not watcher.done(), watcher
            watcher.cancel()

    expected = reference.many(bodies)
    before = tight.stats
    run(body())
    after = tight.stats
    assert after["preemptions_total"] > before["preemptions_total"]
    assert after["cached_tokens_total"] > before["cached_tokens_total"]
    tight.wait_until_idle()
    assert tight.post("/reset_prefix_cache", {}).json["num_blocks_forgotten"] <= 24
    again = tight.post(COMPLETIONS, bodies[0])
    assert output(again) == expected[0] and again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_nothing_is_delivered_after_an_abort_by_id(busy: Served) -> None:
    """C06 (30 aborts rather than 200): once the abort has answered, no token is counted and the stream is an error."""
    rng = random.Random(3)
    for number in range(30):
        body = {**ENDLESS[COMPLETIONS], "stream": True, "request_id": f"mine-{number}"}
        with busy.sent(COMPLETIONS, body) as connection:
            head = read_until(connection, rng.randrange(1, 30))
            assert busy.post("/abort_request", {"request_id": f"mine-{number}"}).json == {"num_aborted": 1}
            counted = busy.metric("generation_tokens_total")
            text = read_to_end(connection, head)
        last = [line for line in text.splitlines() if line.startswith("data: ")][-2:]
        assert '"code":"request_aborted"' in last[0] and last[1] == "data: [DONE]"
        assert '"finish_reason":"' not in text
        assert busy.metric("generation_tokens_total") == counted
    assert busy.post("/abort_request", {"request_id": "mine-1"}).json == {"num_aborted": 0}


def test_an_abort_ends_a_whole_answer_and_a_waiting_one_too(busy: Served) -> None:
    """C06: in the batch or in the queue."""
    with (busy.sent(COMPLETIONS, {**ENDLESS[COMPLETIONS], "n": 4, "request_id": "runs"}) as runs,
          busy.sent(COMPLETIONS, {**ENDLESS[COMPLETIONS], "request_id": "waits"}) as waits):
        busy.wait_until(lambda: (busy.stats["num_running"], busy.stats["num_waiting"]) == (4, 1))
        for request_id, connection, count in (("waits", waits, 1), ("runs", runs, 4)):
            assert busy.post("/abort_request", {"request_id": request_id}).json == {"num_aborted": count}
            assert b" 499 " in connection.recv(4096)


def test_a_client_that_reads_nothing_holds_nobody_up(roomy: Served, reference: Reference) -> None:
    """C04: its stream fills the socket's buffers and waits there; others are served meanwhile."""
    body = {**greedy(random_ids(5, 10), 1200, stream=True), "logprobs": 20}
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(roomy.address)
        data = json.dumps(body).encode()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n" % len(data) + data)
        roomy.wait_until(lambda: roomy.stats["num_running"] == 1)
        bodies = [greedy(random_ids(700 + i, 20), 20) for i in range(5)]
        assert [output(reply) for reply in roomy.together(bodies)] == reference.many(bodies)
        roomy.wait_until_idle()
        assert read_to_end(slow).count("data: ") > 1000


def test_a_body_that_never_ends_is_not_waited_for(roomy: Served) -> None:
    """C07: the client leaves before its request is complete."""
    for _ in range(5):
        with socket.create_connection(roomy.address) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\"")
    assert roomy.num_in_engine == 0
