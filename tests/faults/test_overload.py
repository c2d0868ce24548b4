"""More than the server can do: surplus is refused at once and politely, what was accepted finishes, probes go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from faults.configurations import BUSY, ENDLESS_TOKENS, left_as_found
from faults.serving import CHAT, COMPLETIONS, Json, Reply, Served, post, read_until, run, served

ENDLESS = {"prompt": "x", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
SLOTS, QUEUE = 4, 8
"""Of the busy server."""
CONVERSATION = {"messages": [{"role": "user", "content": "x"}]}


@contextmanager
def filled(server: Served, num_waiting: int) -> Iterator[None]:
    """A server whose slots are taken and whose queue holds `num_waiting`."""
    with ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(server.sent(COMPLETIONS, ENDLESS))
        server.wait_until(lambda: server.stats["num_running"] == SLOTS)
        for _ in range(num_waiting):
            stack.enter_context(server.sent(COMPLETIONS, ENDLESS))
        server.wait_until(lambda: server.stats["num_waiting"] == num_waiting)
        yield
    server.wait_until_idle()


def is_refused(reply: Reply, code: str = "queue_full") -> bool:
    """Whether the answer is a refusal that clients understand."""
    if reply.status == 200:
        return False
    assert (reply.status, reply.error["code"], reply.error["type"]) == (503, code, "server_error"), reply.text
    assert int(reply.headers["retry-after"]) >= 1
    return True


def test_a_flood_is_served_up_to_the_limit_and_the_rest_refused(busy: Served) -> None:
    """D01 (150 requests rather than 500): every request is answered or refused, counted right, without memory lost."""
    bodies = [{"prompt": f"{i}", "max_tokens": 60, "ignore_eos": True, "stream": i % 2 == 0} for i in range(150)]
    busy.together(bodies)
    memory, counted = busy.rss_bytes, busy.metric("admission_rejections_total", reason="queue_full")
    replies = busy.together(bodies)
    num_refused = sum(map(is_refused, replies))
    assert 0 < num_refused < 150
    assert busy.metric("admission_rejections_total", reason="queue_full") == counted + num_refused
    for reply in replies:
        if reply.status == 200 and reply.headers["content-type"] == "application/json":
            assert reply.json["usage"]["completion_tokens"] == 60
        elif reply.status == 200:
            assert reply.events[-1]["choices"][0]["finish_reason"] == "length"
    assert busy.rss_bytes - memory < 64e6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), [
    (COMPLETIONS, {"prompt": "x"}), (COMPLETIONS, {"prompt": ["x", "y"]}), (COMPLETIONS, {"prompt": "x", "n": 2}),
    (COMPLETIONS, {"prompt": [[1], [2]], "n": 2}), (CHAT, CONVERSATION), (CHAT, {**CONVERSATION, "n": 2})], ids=str)
def test_the_limit_holds_on_every_way_in(busy: Served, path: str, fields: Json, stream: bool) -> None:
    """D02: whole and streamed, both endpoints, lists of prompts and several choices, which count as many."""
    with filled(busy, QUEUE):
        assert is_refused(busy.post(path, {**fields, "stream": stream, "max_tokens": 1}))


def test_several_choices_are_accepted_or_refused_as_one(busy: Served) -> None:
    """D02: two places are free; three choices take none of them, two take both."""
    with filled(busy, QUEUE - 2):
        assert is_refused(busy.post(COMPLETIONS, {"prompt": "x", "n": 3, "max_tokens": 1}))
        assert busy.stats["num_waiting"] == QUEUE - 2
        with busy.sent(COMPLETIONS, {**ENDLESS, "n": 2}):
            busy.wait_until(lambda: busy.stats["num_waiting"] == QUEUE)


def test_an_idle_server_takes_as_many_as_it_can_run_and_queue(busy: Served) -> None:
    """D01: what could start at once does not wait, so it does not count as waiting."""
    reply = busy.post(COMPLETIONS, {"prompt": "x", "n": SLOTS + QUEUE, "max_tokens": 1})
    assert reply.status == 200, reply.text
    assert len(reply.json["choices"]) == SLOTS + QUEUE


def test_more_choices_than_can_ever_run_and_wait_are_a_mistake_not_an_overload(busy: Served) -> None:
    """D02: trying again cannot help, so the answer must not say so."""
    reply = busy.post(COMPLETIONS, {"prompt": "x", "n": SLOTS + QUEUE + 1, "max_tokens": 1})
    assert reply.status == 400, reply.text
    assert "retry-after" not in reply.headers


def test_probes_cost_nothing_and_wait_for_nobody(busy: Served) -> None:
    """D09 (100 probes rather than 500): with slots and queue full, no probe queues, computes or is refused."""
    names = ("num_requests_running", "num_requests_waiting", "admission_rejections_total")

    async def probe() -> None:
        async with busy.session() as session:
            for path in ("/health", "/ready", "/metrics", "/ping", "/v1/models") * 20:
                async with session.get(path) as answer:
                    assert answer.status == 200

    with filled(busy, QUEUE):
        before = [busy.metric(name) for name in names]
        prompt_tokens = busy.stats["prompt_tokens_total"]
        run(probe())
        assert [busy.metric(name) for name in names] == before
        assert busy.stats["prompt_tokens_total"] == prompt_tokens


def test_health_stays_good_through_long_prefills(busy: Served) -> None:
    """D08 (seconds rather than a minute): nothing comes out of the engine for long, and yet it is well."""
    long = {"prompt": [3] * 6_000, "max_tokens": 1}

    async def body() -> None:
        async with busy.session() as session:
            work = [asyncio.create_task(post(session, COMPLETIONS, long)) for _ in range(4)]
            num_probes = 0
            while not all(task.done() for task in work):
                async with session.get("/health") as answer:
                    assert answer.status == 200
                num_probes += 1
                await asyncio.sleep(0.05)
            assert num_probes > 3
            assert [(await task).status for task in work] == [200] * 4

    run(body())


@pytest.fixture(scope="module")
def impatient_server(endless_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("impatient"), endless_model, *BUSY, "scheduler.max_num_seqs=1",
                "scheduler.admission.queue_timeout_s=0.5", "scheduler.admission.request_timeout_s=1.5") as server:
        yield server


@pytest.fixture
def impatient(impatient_server: Served) -> Iterator[Served]:
    """One slot; half a second in the queue, one and a half in all."""
    yield from left_as_found(impatient_server)


def test_a_request_that_takes_too_long_ends_and_tells_how_far_it_came(impatient: Served) -> None:
    """D05: a running request is ended, not only a waiting one; its blocks come back; clients are told not to retry."""
    reply = impatient.post(COMPLETIONS, ENDLESS)
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "request_timeout", "false")
    assert "output tokens" in reply.error["message"] and "request_timeout_s" in reply.error["message"]
    impatient.wait_until_idle()
    assert impatient.metric("request_success_total", finished_reason="request_timeout") >= 1


def test_a_stream_that_takes_too_long_ends_with_an_error_after_its_text(impatient: Served) -> None:
    """D05: what was generated has been delivered; the last event before [DONE] is the error."""
    events = impatient.post(COMPLETIONS, {**ENDLESS, "stream": True}).events
    assert len(events) > 2 and all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_told_to_come_back(impatient: Served, stream: bool) -> None:
    """D05: the queue has a time limit of its own, and a status of its own also for streams."""
    with impatient.sent(COMPLETIONS, {**ENDLESS, "stream": True}) as running:
        read_until(running, 1)
        assert is_refused(impatient.post(COMPLETIONS, {**ENDLESS, "stream": stream}), "queue_timeout")
    assert impatient.metric("request_success_total", finished_reason="queue_timeout") >= 1
