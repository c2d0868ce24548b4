"""One server for all tests of this folder that need no special one; each test gets it with a fresh script."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from server.fake_engine import LiveServer, Script, live_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; after the test nothing may be left in its engine."""
    engine = shared_server.engine
    engine.script = lambda _: Script()
    engine.submitted.clear()
    engine.aborted.clear()
    yield shared_server
    shared_server.wait_until(lambda: engine.num_running == 0 and shared_server.service.lifecycle.num_in_flight == 0)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
