"""Changing the settings of an engine that goes on with its weights: it must be as if it had just started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.helpers import CACHE_DIR, dummy_model, make_config, make_engine, run, spec
from servekit.config.batching import StaticBatchingConfig
from servekit.config.errors import ConfigError
from servekit.config.preemption import SwapPreemptionConfig
from servekit.config.schema import Config
from servekit.core.request import RequestEvent
from servekit.engine.in_process_client import InProcessClient
from servekit.engine.process_client import ProcessClient

Client = ProcessClient | InProcessClient
CLIENTS = [ProcessClient, InProcessClient]
PROMPTS = [range(i, i + 40) for i in range(4)]


def session(kind: type[Client], body: Any) -> None:
    async def started() -> None:
        client = kind(make_config(prefix_cache=True), dummy_model(), CACHE_DIR, lambda _: None)
        await client.start()
        try:
            await body(client)
        finally:
            await client.shutdown()

    asyncio.run(asyncio.wait_for(started(), 100))


async def events_of(stream: AsyncIterator[RequestEvent]) -> list[RequestEvent]:
    return [event async for event in stream]


async def answers(client: Client) -> list[list[int]]:
    heard = await asyncio.gather(*map(events_of, client.submit([spec(prompt, 10) for prompt in PROMPTS])))
    return [[token for event in events for token in event.token_ids] for events in heard]


def other_settings() -> Config:
    """A smaller cache with smaller blocks, another scheduler."""
    return make_config(num_kv_blocks=64, block_size=8, max_num_seqs=2, chunk_tokens=16, prefix_cache=True,
                       preemption=SwapPreemptionConfig(swap_space_bytes=1 << 20))


@pytest.mark.parametrize("kind", CLIENTS)
def test_it_answers_as_before_and_starts_over(kind: type[Client]) -> None:
    async def body(client: Client) -> None:
        expected = [e.tokens for e in run(make_engine(), [spec(prompt, 10) for prompt in PROMPTS])]
        assert await answers(client) == expected
        facts = await client.reconfigure(other_settings())
        assert (facts.num_kv_blocks, facts.block_size_tokens) == (64, 8)
        assert facts.num_host_blocks > 0
        assert client.facts == facts
        assert await client.reset_prefix_cache() == 0, "cached prefixes survived"
        assert await answers(client) == expected
        assert client.stats.generation_tokens_total == 40, "counters survived"
        await client.reconfigure(replace(other_settings(), scheduler=replace(
            other_settings().scheduler, batching=StaticBatchingConfig(max_batch_delay_ms=20.0))))
        assert await answers(client) == expected

    session(kind, body)


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_it_cannot_change_is_refused_and_it_goes_on(kind: type[Client]) -> None:
    async def body(client: Client) -> None:
        before, config = client.facts, make_config(prefix_cache=True)
        for wrong, key in ((replace(config, model=replace(config.model, seed=7)), "model"),
                           (replace(config, engine=replace(config.engine, threads=2)), "engine"),
                           (replace(config, memory=replace(config.memory, num_kv_blocks=10**9)),
                            "memory.num_kv_blocks")):
            with pytest.raises(ConfigError) as refused:
                await client.reconfigure(wrong)
            assert refused.value.key == key
        assert client.facts == before
        assert len(await answers(client)) == 4

    session(kind, body)


@pytest.mark.parametrize("kind", CLIENTS)
def test_requests_in_flight_are_not_lost(kind: type[Client]) -> None:
    async def body(client: Client) -> None:
        (stream,) = client.submit([spec(range(20), 300)])
        first = await anext(stream)
        with pytest.raises(ConfigError, match="has requests"):
            await client.reconfigure(other_settings())
        rest = await events_of(stream)
        assert sum(len(event.token_ids) for event in (first, *rest)) == 300

    session(kind, body)
