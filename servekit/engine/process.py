"""The engine in a process of its own: `python -m servekit.engine.process`, started by ProcessClient.

The process reads a StartOrder from its standard input, connects to the client's socket, builds the engine, and then
alternates between its inbox and steps. It ends when told to, or when its standard input closes, which is what
happens when the client dies.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from typing import Protocol

import msgspec
import zmq

from servekit.config.errors import ConfigError, show
from servekit.config.schema import Config
from servekit.core.request import FinishReason
from servekit.engine.engine import Engine
from servekit.engine.messages import (
    Abort,
    AddRequests,
    EngineFacts,
    FromEngine,
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
)
from servekit.engine.wire import StartOrder, to_engine_decoder
from servekit.garbage import take_for_permanent
from servekit.model.local import ModelFileError

_HEARTBEATS = 4
"""An idle engine shows that it lives so many times within engine.heartbeat_timeout_s, but at most once a second."""

log = logging.getLogger(__name__)


class EngineHost(Protocol):
    """Where the process finds its engine, which may be another one after each message."""

    @property
    def engine(self) -> Engine: ...

    def reconfigure(self, config: Config) -> EngineFacts:
        """Put a new engine in place of one without requests. Raises ConfigError, with the old one in place."""

    def check(self) -> None:
        """Raise RankLost if a process that the engine needs has ended."""


class EngineProcess:
    """One engine and its end of the wire."""

    def __init__(self, socket: zmq.Socket[bytes], heartbeat_timeout_s: float) -> None:
        self._socket = socket
        self._heartbeat_s = min(1.0, heartbeat_timeout_s / _HEARTBEATS)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = to_engine_decoder().decode
        self._is_shutting_down = False

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encode(message))

    def serve(self, host: EngineHost) -> None:
        """Alternate between inbox and steps until told to shut down."""
        while not self._is_shutting_down:
            engine = host.engine
            was_working = engine.has_work
            idle_s = engine.idle_s()
            self._take_inbox(host, wait_s=self._heartbeat_s if idle_s is None else min(idle_s, self._heartbeat_s))
            host.check()
            engine = host.engine
            output = engine.step() if engine.has_work else StepOutput((), engine.stats())
            self.send(output)
            if was_working and not engine.has_work:
                engine.check()
        self._say_goodbye(host.engine)

    def _take_inbox(self, host: EngineHost, wait_s: float) -> None:
        """Handle every message that is here; wait for the first one for at most `wait_s`."""
        timeout_ms = int(1e3 * wait_s)
        while self._socket.poll(timeout_ms):
            self._handle(host, self._socket.recv())
            timeout_ms = 0

    def _handle(self, host: EngineHost, frame: bytes) -> None:
        match self._decode(frame):
            case AddRequests(specs):
                host.engine.add(specs)
            case Abort(request_ids):
                host.engine.abort(request_ids)
            case ResetPrefixCache():
                self.send(PrefixCacheReset(host.engine.reset_prefix_cache()))
            case Reconfigure(config):
                self.send(self._reconfigured(host, pickle.loads(config)))
            case Shutdown():
                self._is_shutting_down = True

    def _reconfigured(self, host: EngineHost, config: Config) -> Reconfigured | ReconfigureRefused:
        try:
            return Reconfigured(host.reconfigure(config))
        except ConfigError as error:
            return ReconfigureRefused((error.key, show(error.value), error.limit, error.remedy))

    def _say_goodbye(self, engine: Engine) -> None:
        engine.abort_all(FinishReason.shutdown, "the server is shutting down")
        self.send(engine.step())


def main() -> int:
    """Run the process that a StartOrder on standard input describes; returns its exit status."""
    # Ctrl-C reaches the whole terminal group; the client decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order: StartOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_client, name="client-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(order.address)
    try:
        return _run(EngineProcess(socket, order.config.engine.heartbeat_timeout_s), order)
    finally:
        context.destroy(linger=2000)


def _run(process: EngineProcess, order: StartOrder) -> int:
    process.send(Loading("torch", 0, 1, ""))
    # torch takes seconds to import; until here the process has not needed it.
    from servekit.engine.build import ReconfigurableEngine, build_engine
    from servekit.runner.group import RankLost

    try:
        # Held by nobody else: a change of settings gives its cache back before it makes another.
        host = ReconfigurableEngine(order.config, build_engine(order.config, order.local, order.cache_dir,
                                                               _ProgressSender(process)))
    except ConfigError as error:
        process.send(StartFailed(str(error), (error.key, show(error.value), error.limit, error.remedy)))
        return 1
    except (ModelFileError, MemoryError, RankLost) as error:
        process.send(StartFailed(str(error)))
        return 1
    take_for_permanent()
    process.send(Ready(host.facts))
    try:
        process.serve(host)
    except RankLost as error:
        print(f"servekit: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


class _ProgressSender:
    """Passes progress on, but no more than ten times a second."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._sent_s = 0.0

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._sent_s > 0.1 or done >= total:
            self._sent_s = now
            self._process.send(Loading(stage, done, total, unit))


def _exit_with_client() -> None:
    """End at once when standard input closes: whoever started this process is gone."""
    # Not through sys.stdin: a thread that holds its lock would abort the interpreter's normal end.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
