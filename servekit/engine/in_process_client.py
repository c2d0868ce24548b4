"""InProcessClient: an engine in this process, for tests and offline use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from servekit.config.schema import Config
from servekit.core.request import FinishReason, RequestId, RequestSpec
from servekit.engine.build import ReconfigurableEngine, build_engine
from servekit.engine.client import EngineState, EngineUnavailable, StartError, StepObserver
from servekit.engine.engine import Engine
from servekit.engine.messages import EngineFacts, EngineStats, Loading, StepOutput
from servekit.engine.streams import EventStream, StreamTable
from servekit.model.local import LocalModel, ModelFileError


class InProcessClient:
    """An EngineClient that steps an engine in one thread of this process.

    The engine is touched by that thread alone: what `submit` and `abort` want is done between two steps.
    """

    def __init__(self, config: Config, local: LocalModel, cache_dir: Path,
                 on_progress: Callable[[Loading], None]) -> None:
        self._config = config
        self._local = local
        self._cache_dir = cache_dir
        self._on_progress = on_progress
        self._state = EngineState.starting
        self._facts: EngineFacts | None = None
        self._stats = EngineStats()
        self._observers: list[StepObserver] = []
        self._streams = StreamTable()
        self._thread = ThreadPoolExecutor(1, "engine")
        self._host: ReconfigurableEngine | None = None
        self._orders: list[Callable[[Engine], object]] = []
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_healthy(self) -> bool:
        return self._state is EngineState.ready

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineUnavailable("the engine has not been ready yet")
        return self._facts

    @property
    def stats(self) -> EngineStats:
        return self._stats

    def observe(self, observer: StepObserver) -> None:
        self._observers.append(observer)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def report(stage: str, done: int, total: int, unit: str) -> None:
            loop.call_soon_threadsafe(self._on_progress, Loading(stage, done, total, unit))

        try:
            built = await loop.run_in_executor(self._thread, build_engine, self._config, self._local,
                                               self._cache_dir, report)
        except ModelFileError as error:
            raise StartError(str(error)) from error
        self._host, self._facts = ReconfigurableEngine(self._config, built), built.facts
        self._state = EngineState.ready
        self._loop_task = asyncio.create_task(self._run(), name="engine-loop")

    def submit(self, specs: Sequence[RequestSpec]) -> list[EventStream]:
        if self._state is not EngineState.ready:
            raise EngineUnavailable(f"the engine is {self._state.value}")
        streams = self._streams.open(specs)
        self._order(lambda engine: engine.add(specs))
        return streams

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        ended = self._streams.end(request_ids, FinishReason.abort, "")
        if ended:
            self._order(lambda engine: engine.abort(ended))

    async def reset_prefix_cache(self) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self._order(lambda engine: loop.call_soon_threadsafe(answer.set_result, engine.reset_prefix_cache()))
        return await answer

    async def reconfigure(self, config: Config) -> EngineFacts:
        if self._state is not EngineState.ready or self._host is None:
            raise EngineUnavailable(f"the engine is {self._state.value}")
        self._facts = await asyncio.get_running_loop().run_in_executor(self._thread, self._host.reconfigure, config)
        self._config = config
        return self._facts

    async def shutdown(self) -> None:
        if self._state is EngineState.dead:
            return
        self._state = EngineState.dead
        self._wake.set()
        if self._loop_task is not None:
            await self._loop_task
        self._streams.end_all(FinishReason.shutdown, "the engine is shutting down")
        self._thread.shutdown()

    def _order(self, order: Callable[[Engine], object]) -> None:
        self._orders.append(order)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._host is not None
        try:
            while self._state is EngineState.ready:
                orders, self._orders = self._orders, []
                idle_s = self._host.engine.idle_s()
                if not orders and idle_s != 0.0:
                    await self._sleep(idle_s)
                    continue
                self._publish(await loop.run_in_executor(self._thread, _advance, self._host.engine, orders))
        except Exception as error:
            self._state = EngineState.dead
            self._streams.end_all(FinishReason.error, f"the engine failed: {error}")
            raise

    async def _sleep(self, idle_s: float | None) -> None:
        """Until an order comes, or a waiting request's time."""
        self._wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), idle_s)

    def _publish(self, output: StepOutput) -> None:
        self._stats = output.stats.after(self._stats)
        self._streams.deliver(output.events)
        for observer in self._observers:
            observer(self._stats, output.step)


def _advance(engine: Engine, orders: Sequence[Callable[[Engine], object]]) -> StepOutput:
    for order in orders:
        order(engine)
    return engine.step()
