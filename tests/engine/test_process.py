"""ProcessClient against real engine processes: events, aborts, death, silence, restarts, refusal to start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import CACHE_DIR, dummy_model, make_config, make_engine, run, spec
from servekit.config.errors import ConfigError
from servekit.config.schema import Config, EngineConfig, RestartPolicy
from servekit.core.request import FinishReason, RequestEvent
from servekit.engine.client import EngineState, EngineUnavailable, StartError
from servekit.engine.in_process_client import InProcessClient
from servekit.engine.process_client import ProcessClient
from servekit.model.local import LocalModel, SourceKind

Client = ProcessClient | InProcessClient
CLIENTS = [ProcessClient, InProcessClient]


def session(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 100))


async def all_events(stream: AsyncIterator[RequestEvent]) -> list[RequestEvent]:
    return [event async for event in stream]


async def until(condition: Any, limit_s: float = 30) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


def client_for(kind: type[Client], config: Config | None = None) -> Client:
    return kind(config or make_config(prefix_cache=True), dummy_model(), CACHE_DIR, lambda _: None)


@pytest.mark.parametrize("kind", CLIENTS)
def test_tokens_are_those_of_the_engine_alone(kind: type[Client]) -> None:
    async def body() -> None:
        client = client_for(kind)
        await client.start()
        try:
            specs = [spec(range(i, i + 20), 10) for i in range(4)]
            heard = await asyncio.gather(*map(all_events, client.submit(specs)))
            expected = run(make_engine(), [spec(one.prompt_token_ids, 10) for one in specs])
            assert [[t for e in events for t in e.token_ids] for events in heard] == [e.tokens for e in expected]
            assert client.facts.max_model_len == 512 and client.is_healthy
            assert client.stats.generation_tokens_total == 40
            assert await client.reset_prefix_cache() > 0
        finally:
            await client.shutdown()
        with pytest.raises(EngineUnavailable):
            client.submit([spec([1])])

    session(body())


@pytest.mark.parametrize("kind", CLIENTS)
def test_nothing_is_delivered_after_an_abort(kind: type[Client]) -> None:
    async def body() -> None:
        client = client_for(kind)
        await client.start()
        try:
            one = spec([1, 2, 3], 400)
            (stream,) = client.submit([one])
            first = await anext(stream)
            client.abort([one.request_id])
            rest = await all_events(stream)
            assert first.token_ids and rest[-1].finish is FinishReason.abort
            await until(lambda: client.stats.num_running == 0)
            tokens_then = client.stats.generation_tokens_total
            await asyncio.sleep(0.2)
            assert client.stats.generation_tokens_total == tokens_then
        finally:
            await client.shutdown()

    session(body())


@pytest.mark.parametrize("kind", CLIENTS)
def test_shutdown_ends_what_is_in_flight_with_a_reason(kind: type[Client]) -> None:
    async def body() -> None:
        client = client_for(kind)
        await client.start()
        streams = client.submit([spec([1], 400), spec([2], 400)])
        await client.shutdown()
        await client.shutdown()
        for stream in streams:
            events = await all_events(stream)
            assert [e.finish for e in events if e.finish] == [FinishReason.shutdown]

    session(body())


def test_an_id_in_use_is_refused_and_harms_nobody() -> None:
    async def body() -> None:
        client = client_for(ProcessClient)
        await client.start()
        try:
            one = spec([1], 5)
            (stream,) = client.submit([one])
            with pytest.raises(ValueError, match="in use"):
                client.submit([one])
            assert (await all_events(stream))[-1].finish is FinishReason.length
        finally:
            await client.shutdown()

    session(body())


def test_death_is_an_error_for_requests_in_flight_and_the_engine_comes_back() -> None:
    async def body() -> None:
        client = client_for(ProcessClient)
        await client.start()
        try:
            streams = client.submit([spec([1], 480), spec([2], 480)])
            await anext(streams[0])
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGKILL)
            for stream in streams:
                last = (await all_events(stream))[-1]
                assert last.finish is FinishReason.error and "lost" in last.message
            assert not client.is_healthy
            with pytest.raises(EngineUnavailable):
                client.submit([spec([3])])
            await until(lambda: client.state is EngineState.ready)
            (stream,) = client.submit([spec([4], 5)])
            assert (await all_events(stream))[-1].finish is FinishReason.length
        finally:
            await client.shutdown()

    session(body())


def test_without_restarts_a_dead_engine_stays_dead() -> None:
    async def body() -> None:
        client = client_for(ProcessClient, make_config(engine=EngineConfig(threads=1, restart=RestartPolicy.never)))
        await client.start()
        try:
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGKILL)
            await until(lambda: client.state is EngineState.dead)
            assert not client.is_healthy
        finally:
            await client.shutdown()

    session(body())


def test_a_frozen_engine_is_found_out_killed_and_replaced() -> None:
    async def body() -> None:
        client = client_for(ProcessClient, make_config(engine=EngineConfig(threads=1, heartbeat_timeout_s=2)))
        await client.start()
        try:
            (stream,) = client.submit([spec([1], 480)])
            await anext(stream)
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGSTOP)
            last = (await all_events(stream))[-1]
            assert last.finish is FinishReason.error and "silent" in last.message
            await until(lambda: client.state is EngineState.ready)
        finally:
            await client.shutdown()

    session(body())


def test_an_idle_engine_shows_that_it_lives() -> None:
    async def body() -> None:
        client = client_for(ProcessClient, make_config(engine=EngineConfig(threads=1, heartbeat_timeout_s=2)))
        await client.start()
        try:
            await asyncio.sleep(3.5)
            assert client.is_healthy
        finally:
            await client.shutdown()

    session(body())


def test_the_engine_ends_with_its_client() -> None:
    """A client that is killed leaves no engine behind."""
    script = textwrap.dedent("""
        import asyncio, os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from engine.helpers import CACHE_DIR, dummy_model, make_config
        from servekit.engine.process_client import ProcessClient
        async def main():
            client = ProcessClient(make_config(), dummy_model(), CACHE_DIR, lambda _: None)
            await client.start()
            print(client.process_id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    tests_dir = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script, str(tests_dir)], capture_output=True, text=True, timeout=60)
    engine_id = int(done.stdout)

    async def gone() -> None:
        await until(lambda: not _is_alive(engine_id), 10)

    session(gone())


def _is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_setting_that_does_not_fit_is_a_config_error(kind: type[Client]) -> None:
    async def body() -> None:
        client = client_for(kind, make_config(num_kv_blocks=8, max_model_len=512))
        with pytest.raises(ConfigError, match=r"model\.max_model_len=512"):
            await client.start()
        await client.shutdown()

    session(body())


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_model_that_is_not_there_is_a_start_error(kind: type[Client], tmp_path: Any) -> None:
    async def body() -> None:
        path = tmp_path / "missing.gguf"
        path.write_bytes(b"GGUF but not really")
        client = kind(make_config(), LocalModel(SourceKind.gguf, "m", path), CACHE_DIR, lambda _: None)
        with pytest.raises(StartError, match=r"missing\.gguf"):
            await client.start()
        await client.shutdown()

    session(body())
