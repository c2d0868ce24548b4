"""ProcessClient: an engine in a process of its own, watched, and restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, RestartPolicy
from servekit.core.request import FinishReason, RequestId, RequestSpec
from servekit.engine.client import EngineState, EngineUnavailable, StartError, StepObserver
from servekit.engine.messages import (
    Abort,
    AddRequests,
    EngineFacts,
    EngineStats,
    Loading,
    PrefixCacheReset,
    Ready,
    Reconfigure,
    Reconfigured,
    ReconfigureRefused,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    StepOutput,
    StepRecord,
    ToEngine,
)
from servekit.engine.streams import EventStream, StreamTable
from servekit.engine.wire import StartOrder, address_in, from_engine_decoder, private_directory
from servekit.model.local import LocalModel

_SHUTDOWN_S = 10.0
"""How long an engine may take to end after it was told to."""

log = logging.getLogger(__name__)


class ProcessClient:
    """An EngineClient whose engine runs in a process of its own (see engine/process.py).

    When the process dies or shows no life for engine.heartbeat_timeout_s, every request in flight ends with
    FinishReason.error. Then the engine is started again, at most engine.max_restarts times within
    engine.restart_window_s; after that the client is dead for good.
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
        self._resets: deque[asyncio.Future[int]] = deque()
        self._reconfiguring: asyncio.Future[EngineFacts] | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = from_engine_decoder().decode
        self._directory = private_directory()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._generation = 0
        self._last_sign_of_life_s = 0.0
        self._restarts: deque[float] = deque()
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closing = False

    # What the engine is.

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_healthy(self) -> bool:
        return self._state is EngineState.ready and self._silence_s() <= self._config.engine.heartbeat_timeout_s

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineUnavailable("the engine has not been ready yet")
        return self._facts

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def process_id(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._process.pid if self._process is not None else None

    def observe(self, observer: StepObserver) -> None:
        self._observers.append(observer)

    # Requests.

    def submit(self, specs: Sequence[RequestSpec]) -> list[EventStream]:
        if self._state is not EngineState.ready or self._is_closing:
            raise EngineUnavailable(f"the engine is {'shutting down' if self._is_closing else self._state.value}")
        streams = self._streams.open(specs)
        self._send(AddRequests(tuple(specs)))
        return streams

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        ended = self._streams.end(request_ids, FinishReason.abort, "")
        if ended and self._state is EngineState.ready:
            self._send(Abort(tuple(ended)))

    async def reset_prefix_cache(self) -> int:
        if self._state is not EngineState.ready:
            raise EngineUnavailable(f"the engine is {self._state.value}")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._send(ResetPrefixCache())
        return await answer

    async def reconfigure(self, config: Config) -> EngineFacts:
        if self._state is not EngineState.ready:
            raise EngineUnavailable(f"the engine is {self._state.value}")
        assert self._reconfiguring is None, "one change of settings at a time"
        self._reconfiguring = asyncio.get_running_loop().create_future()
        self._send(Reconfigure(pickle.dumps(config)))
        try:
            self._facts = await self._reconfiguring
        finally:
            self._reconfiguring = None
        self._config = config
        return self._facts

    # Life and death of the process.

    async def start(self) -> None:
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def shutdown(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(zmq.ZMQError):
                self._send(Shutdown())
            await self._wait_or_kill()
        if self._supervisor is not None:
            await self._supervisor
        self._streams.end_all(FinishReason.shutdown, "the server is shutting down")
        self._state = EngineState.dead
        self._context.destroy(linger=0)
        self._directory.cleanup()

    async def _launch(self) -> None:
        """Start a process and wait until its engine is ready. Raises ConfigError or StartError."""
        self._generation += 1
        address = address_in(self._directory.name, self._generation)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "servekit.engine.process", stdin=asyncio.subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(StartOrder(self._config, self._local, self._cache_dir, address)))
        await self._process.stdin.drain()
        try:
            async with asyncio.timeout(self._config.engine.startup_timeout_s):
                await self._wait_until_ready()
        except TimeoutError:
            await self._kill()
            raise StartError(f"the engine was not ready after {self._config.engine.startup_timeout_s:g} s; raise "
                             "engine.startup_timeout_s") from None
        except BaseException:
            await self._kill()
            raise

    async def _wait_until_ready(self) -> None:
        while True:
            frame = await self._next_frame()
            if frame is None:
                raise StartError(f"the engine process ended with status {await self._exit_status()} while it was "
                                 "starting; its last words are above")
            match self._decode(frame):
                case Loading() as progress:
                    self._on_progress(progress)
                case Ready(facts):
                    self._facts = facts
                    self._last_sign_of_life_s = time.monotonic()
                    self._state = EngineState.ready
                    return
                case StartFailed(message, setting):
                    raise ConfigError(*setting) if setting is not None else StartError(message)

    async def _supervise(self) -> None:
        """Receive until the engine is gone; then restart it or give up."""
        while True:
            cause = await self._receive()
            if self._is_closing:
                return
            await self._kill()
            self._fail_in_flight(cause)
            if not self._may_restart():
                self._state = EngineState.dead
                log.error("%s; giving up after %d restarts", cause, len(self._restarts))
                return
            self._state = EngineState.restarting
            log.error("%s; restarting it (%d of at most %d)", cause, len(self._restarts),
                      self._config.engine.max_restarts)
            try:
                await self._launch()
            except (ConfigError, StartError) as error:
                self._state = EngineState.dead
                log.error("the engine could not be restarted: %s", error)
                return
            log.info("the engine is ready again")

    async def _receive(self) -> str:
        """Handle messages until the process ends or falls silent; returns what happened."""
        while True:
            frame = await self._next_frame(timeout_s=0.1)
            if frame is not None:
                self._last_sign_of_life_s = time.monotonic()
                self._handle(frame)
            elif self._has_ended():
                return f"the engine process ended with status {await self._exit_status()}"
            elif self._silence_s() > self._config.engine.heartbeat_timeout_s:
                return f"the engine has been silent for {self._silence_s():.0f} s (engine.heartbeat_timeout_s)"

    def _handle(self, frame: bytes) -> None:
        match self._decode(frame):
            case StepOutput(events, stats, step):
                self._streams.deliver(events)
                self._publish(stats, step)
            case PrefixCacheReset(num_blocks):
                answer = self._resets.popleft()
                if not answer.cancelled():
                    answer.set_result(num_blocks)
            case Reconfigured(facts) if self._reconfiguring is not None:
                self._reconfiguring.set_result(facts)
            case ReconfigureRefused(setting) if self._reconfiguring is not None:
                self._reconfiguring.set_exception(ConfigError(*setting))

    def _publish(self, stats: EngineStats, step: StepRecord | None) -> None:
        self._stats = stats.after(self._stats)
        for observer in self._observers:
            observer(self._stats, step)

    def _fail_in_flight(self, cause: str) -> None:
        self._streams.end_all(FinishReason.error, f"{cause}; the request was lost, send it again")
        self._publish(EngineStats(), None)
        while self._resets:
            self._resets.popleft().set_exception(EngineUnavailable(cause))
        if self._reconfiguring is not None and not self._reconfiguring.done():
            self._reconfiguring.set_exception(EngineUnavailable(cause))

    def _may_restart(self) -> bool:
        """Count this death; False when the policy or the count forbids another start."""
        engine, now = self._config.engine, time.monotonic()
        while self._restarts and self._restarts[0] < now - engine.restart_window_s:
            self._restarts.popleft()
        if engine.restart is RestartPolicy.never or len(self._restarts) >= engine.max_restarts:
            return False
        self._restarts.append(now)
        return True

    # Plumbing.

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # With no high-water mark a pair socket takes every message at once; the future is already done.
        self._socket.send(self._encode(message))

    async def _next_frame(self, timeout_s: float = 0.2) -> bytes | None:
        """The next message; None when none came in time or the process has ended and left none."""
        assert self._socket is not None
        while True:
            if await self._socket.poll(timeout_s * 1e3):
                frame: bytes = await self._socket.recv()
                return frame
            if self._has_ended() or self._state is EngineState.ready:
                return None

    def _has_ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def _exit_status(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def _silence_s(self) -> float:
        return time.monotonic() - self._last_sign_of_life_s

    async def _wait_or_kill(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
