"""The HTTP target against a server whose answers, delays and faults are known."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from load.mock_openai import Answer, Exchange, MockOpenAI, one_token_a_chunk, text
from servekit.config.bench import BenchConfig, Endpoint
from servekit.config.errors import ConfigError
from servekit.load.driver import Limits, run_load
from servekit.load.metrics import e2e_s, ttft_s
from servekit.load.openai import OpenAITarget, RequestOptions, ServerFacts, as_text, ask_facts, open_session
from servekit.load.records import RequestRecord
from servekit.load.target import FailureKind
from servekit.load.workload import WorkloadRequest

REQUEST = WorkloadRequest(0, [5, 6, 7], 4, arrival_s=0.0, tenant="tenant-1")


def options(**fields: Any) -> RequestOptions:
    return RequestOptions(**{"endpoint": Endpoint.completions, "model": "mock", **fields})


async def one(url: str, request: WorkloadRequest, asked: RequestOptions, timeout_s: float = 20) -> RequestRecord:
    async with open_session(url) as session:
        (record,) = await run_load([request], OpenAITarget(session, asked), Limits(timeout_s=timeout_s))
    return record


def answered(answer: Answer, request: WorkloadRequest = REQUEST, **fields: Any) -> RequestRecord:
    """The record of one request to a server that answers so."""
    with MockOpenAI(answer) as server:
        return asyncio.run(one(server.url, request, options(**fields)))


def failure_of(answer: Answer) -> tuple[FailureKind, int | None, str]:
    failure = answered(answer).failure
    assert failure is not None
    return failure.kind, failure.status, failure.text


def test_completion_is_sent_as_token_ids_with_a_fixed_length() -> None:
    with MockOpenAI() as server:
        asyncio.run(one(server.url, REQUEST, options(extra_body={"cache_prompt": False})))
    assert server.bodies == [{
        "model": "mock", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "user": "tenant-1",
        "cache_prompt": False}]


def test_options_can_be_left_out() -> None:
    request = WorkloadRequest(0, [5], 4, arrival_s=0.0)
    body = options(ignore_eos=False, temperature=None, continuous_usage=False).body(request)
    assert body == {"model": "mock", "prompt": [5], "max_tokens": 4, "stream": True,
                    "stream_options": {"include_usage": True}}


def test_every_token_is_counted() -> None:
    record = answered(one_token_a_chunk)
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 4, 3)
    assert list(record.chunk_tokens) == [1, 1, 1, 1]
    assert record.finish_reason == "length"


async def _role_first(exchange: Exchange) -> web.StreamResponse:
    await exchange.send({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    await asyncio.sleep(0.3)
    await exchange.send({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})
    await exchange.send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    await exchange.send({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 1}})
    return await exchange.done()


def test_role_chunk_is_not_the_first_token() -> None:
    record = answered(_role_first, endpoint=Endpoint.chat)
    assert record.failure is None
    assert ttft_s(record.timeline) >= 0.3
    assert (record.prompt_tokens, record.num_output_tokens) == (20, 1)


async def _reasoning(exchange: Exchange) -> web.StreamResponse:
    await exchange.send({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    await exchange.send({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
    return await exchange.done()


def test_reasoning_is_output() -> None:
    assert answered(_reasoning, endpoint=Endpoint.chat).num_output_tokens == 2


def test_chat_prompt_is_text_with_the_same_prefixes() -> None:
    with MockOpenAI(_reasoning) as server:
        asyncio.run(one(server.url, REQUEST, options(endpoint=Endpoint.chat)))
    assert server.bodies[0]["messages"] == [{"role": "user", "content": as_text([5, 6, 7])}]
    assert "prompt" not in server.bodies[0]
    assert as_text([5, 6, 7, 8]).startswith(as_text([5, 6, 7]) + " ")
    assert len(as_text(range(1000)).split()) == 1000


@pytest.mark.parametrize("in_every_chunk", [True, False])
def test_four_tokens_a_chunk(in_every_chunk: bool) -> None:
    async def answer(exchange: Exchange) -> web.StreamResponse:
        for i in range(3):
            usage = {"prompt_tokens": 3, "completion_tokens": 4 * (i + 1)} if in_every_chunk else {}
            await exchange.send(text("a b c d", "length" if i == 2 else None, **usage))
            await asyncio.sleep(0.02)
        await exchange.send({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 12}})
        return await exchange.done()

    record = answered(answer)
    assert record.num_output_tokens == len(record.timeline.token_times_s) == 12
    assert e2e_s(record.timeline) >= 0.06


async def _error_event(exchange: Exchange) -> web.StreamResponse:
    await exchange.send(text("a"))
    await exchange.send({"error": {"message": "engine died", "type": "server_error"}})
    return exchange.response


async def _cut(exchange: Exchange) -> web.StreamResponse:
    await exchange.send(text("a"))
    return exchange.cut()


async def _clean_end_without_reason(exchange: Exchange) -> web.StreamResponse:
    await exchange.send(text("a"))
    return exchange.response


async def _no_token(exchange: Exchange) -> web.StreamResponse:
    await exchange.send(text("", "length"))
    return await exchange.done()


async def _not_json(exchange: Exchange) -> web.StreamResponse:
    await exchange.send_raw(b"data: {oops\n\n")
    return exchange.response


async def _full(exchange: Exchange) -> web.StreamResponse:
    return web.json_response({"error": {"message": "queue is full", "type": "overloaded"}}, status=503)


async def _plain_text_error(exchange: Exchange) -> web.StreamResponse:
    return web.Response(text="Internal\nServer Error", status=500)


@pytest.mark.parametrize(("answer", "kind", "status", "reason"), [
    (_error_event, FailureKind.stream, 200, "engine died"),
    (_cut, FailureKind.connection, None, ""),
    (_clean_end_without_reason, FailureKind.incomplete, None, "without a finish reason"),
    (_no_token, FailureKind.incomplete, None, "without a single token"),
    (_not_json, FailureKind.protocol, 200, "{oops"),
    (_full, FailureKind.status, 503, "queue is full"),
    (_plain_text_error, FailureKind.status, 500, "Internal Server Error"),
])
def test_faults_are_told_apart(answer: Answer, kind: FailureKind, status: int | None, reason: str) -> None:
    found = failure_of(answer)
    assert found[:2] == (kind, status)
    assert reason in found[2]
    assert found[2] != ""
    assert "\n" not in found[2]


def test_tokens_before_an_error_are_kept() -> None:
    record = answered(_error_event)
    assert record.num_output_tokens == 1


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_connection_refused() -> None:
    record = asyncio.run(one(f"http://127.0.0.1:{_closed_port()}", REQUEST, options()))
    assert record.failure is not None
    assert record.failure.kind is FailureKind.connection


def test_abandoned_request_is_disconnected() -> None:
    left: list[bool] = []

    async def answer(exchange: Exchange) -> web.StreamResponse:
        await exchange.send(text("a"))
        try:
            while True:
                await asyncio.sleep(0.01)
                await exchange.send_raw(b": still here\n")
        except ConnectionError:
            left.append(True)
            raise

    with MockOpenAI(answer) as server:
        record = asyncio.run(one(server.url, REQUEST, options(), timeout_s=0.2))
    assert record.failure is not None
    assert record.failure.kind is FailureKind.timeout
    assert left == [True]


def facts(config: BenchConfig) -> ServerFacts:
    async def ask() -> ServerFacts:
        async with open_session(config.url, "secret") as session:
            return await ask_facts(session, config)

    return asyncio.run(ask())


def test_facts_of_a_server() -> None:
    with MockOpenAI() as server:
        assert facts(BenchConfig(url=server.url)) == ServerFacts("mock", {"version": "1.2.3"}, None)
        assert facts(BenchConfig(url=server.url + "/", model="other")).model == "other"


def test_unreachable_server_is_a_config_error_in_one_line() -> None:
    url = f"http://127.0.0.1:{_closed_port()}"
    with pytest.raises(ConfigError) as caught:
        facts(BenchConfig(url=url))
    assert str(caught.value).startswith(f"url={url}: cannot be reached (")
    assert "\n" not in str(caught.value)


def test_api_key_is_sent() -> None:
    async def send(url: str) -> None:
        async with open_session(url, "secret") as session:
            await run_load([REQUEST], OpenAITarget(session, options()), Limits())

    with MockOpenAI() as server:
        asyncio.run(send(server.url))
    assert server.headers[0]["Authorization"] == "Bearer secret"
