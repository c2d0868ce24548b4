"""`servekit serve`: bind, load, serve, drain. One process for HTTP, one for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from servekit.config.errors import require, show
from servekit.config.resolve import config_hash, flatten
from servekit.config.schema import Config, RestartPolicy, ServerConfig
from servekit.engine.client import EngineClient, EngineState, StartError
from servekit.engine.messages import EngineFacts, Loading
from servekit.engine.process_client import ProcessClient
from servekit.garbage import take_for_permanent
from servekit.model.chat_template import ChatTemplate, load_chat_template
from servekit.model.loader import load_spec
from servekit.model.local import LocalModel, ModelFileError
from servekit.model.source import default_cache_dir, fetch
from servekit.model.tokenizer import Tokenizer, load_tokenizer
from servekit.server.app import create_app
from servekit.server.intake import Intake, ModelFacts
from servekit.server.lifecycle import Phase
from servekit.server.logs import set_up_logging
from servekit.server.memory_table import memory_table
from servekit.server.metrics import Metrics
from servekit.server.progress import LoadingProgress
from servekit.server.service import Service, Serving
from servekit.server.throughput import log_throughput

if TYPE_CHECKING:
    from servekit.config.compose import Composed

log = logging.getLogger(__name__)

EXIT_OK, EXIT_ENGINE_LOST, EXIT_START_FAILED = 0, 1, 3
CHOSEN_LAYERS = ("preset", "site", "environment", "command_line")
"""Layers of the configuration above the default values."""
BACKLOG = 2048
LAST_WORDS_S = 5.0
"""How long the last answers may take to leave after the engine has ended."""
Result = TypeVar("Result")


def run(composed: Composed[Config]) -> int:
    """Serve until told to stop; returns the exit status.

    0 after SIGTERM or SIGINT, 1 if the engine was lost for good, 3 if the server could not start (one line on
    standard error says why). Raises ConfigError for a setting that cannot be honoured.
    """
    config = composed.config
    set_up_logging(config.server.log_format)
    _log_settings(composed)
    api_key = _api_key(config.server)
    try:
        with _listener(config.server) as listener:
            server = Server(config, api_key, listener)
            with asyncio.Runner(loop_factory=server.loop_factory) as runner:
                return runner.run(server.run())
    except (StartError, ModelFileError) as error:
        print(f"servekit: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_START_FAILED


def _log_settings(composed: Composed[Config]) -> None:
    """One line with the configuration's hash and every value that differs because somebody chose it."""
    chosen = [f"{key}={show(value)} ({composed.origins[key]})" for key, value in flatten(composed.config).items()
              if composed.origins[key].layer.name in CHOSEN_LAYERS and value is not None]
    log.info("configuration %s%s", config_hash(composed.config), ": " + ", ".join(chosen) if chosen else "")
    for setting in composed.dropped:
        log.warning("%s=%s (%s) is without effect: a later choice replaced its component", setting.key, setting.value,
                    setting.origin)


def _api_key(config: ServerConfig) -> str | None:
    """The key that clients must send; None if they need none."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    require(key != "", "server.api_key_env", config.api_key_env, "this environment variable is not set or empty",
            "export it with the key, or set server.api_key_env=null")
    return key


@contextlib.contextmanager
def _listener(config: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket, bound before anything slow begins. Raises StartError, in one line."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            listener.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"server.port={config.port}: another process listens on {config.host}:{config.port}; "
                                 "stop it or choose another with server.port=<port>") from None
            raise StartError(f"server.host={config.host}, server.port={config.port}: cannot listen there "
                             f"({error.strerror or error}); choose an address of this machine and a free "
                             "port") from None
        yield listener


class Server:
    """One run of `servekit serve`."""

    def __init__(self, config: Config, api_key: str | None, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._service = Service(config, api_key)
        self._http = _HttpServer(uvicorn.Config(
            create_app(self._service), log_config=None, access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=int(LAST_WORDS_S)))
        self._stop = asyncio.Event()
        """Set by the first signal, or when the engine is lost."""
        self._hurry = asyncio.Event()
        """Set by the second signal."""
        self._engine_lost = False

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """uvicorn's choice of an event loop."""
        return self._http.config.get_loop_factory()

    async def run(self) -> int:
        """Answer probes at once, requests when the model is loaded, until told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        async with self._answering():
            engine = await self._until_stopped(self._start_engine())
            if engine is None:
                log.info("stopped while loading")
                return EXIT_OK
            helpers = [asyncio.create_task(log_throughput(lambda: engine.stats, self._config.server.stats_interval_s)),
                       asyncio.create_task(self._watch(engine))]
            try:
                await self._stop.wait()
            finally:
                for task in helpers:
                    task.cancel()
                await self._drain(engine)
        return EXIT_ENGINE_LOST if self._engine_lost else EXIT_OK

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._hurry.set()
        log.info("%s: %s", signal.Signals(number).name, "ending at once" if self._hurry.is_set() else "stopping")
        self._stop.set()

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Run the HTTP server meanwhile."""
        serving = asyncio.create_task(self._http.serve([self._listener]))
        try:
            yield
        finally:
            self._http.should_exit = True
            await serving

    async def _until_stopped(self, work: Coroutine[None, None, Result]) -> Result | None:
        """The result of `work`, or None if a signal comes first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        finally:
            stopped.cancel()

    # Starting.

    async def _start_engine(self) -> EngineClient:
        """Fetch and load everything; from then on requests are taken."""
        split = _TimeSplit()
        lifecycle, cache_dir = self._service.lifecycle, default_cache_dir(os.environ)
        with LoadingProgress(lambda text: setattr(lifecycle, "progress", text)) as progress:
            progress.stage("model files")
            with split.part("fetch"):
                local = await _in_thread(lambda: fetch(self._config.model, cache_dir, progress.bytes_done))
            engine = ProcessClient(self._config, local, cache_dir, lambda loading: _show(loading, progress))
            try:
                with split.part("engine"):
                    starting = asyncio.create_task(engine.start())
                    try:
                        texts = await _in_thread(lambda: _load_texts(self._config, local))
                        await starting
                    finally:
                        starting.cancel()
            except BaseException:
                await engine.shutdown()
                raise
        take_for_permanent()
        self._service.serve(_serving(engine, texts, self._config))
        self._log_ready(engine.facts, split)
        return engine

    def _log_ready(self, facts: EngineFacts, split: _TimeSplit) -> None:
        for note in facts.notes:
            log.info("derived: %s", note)
        host, port = self._config.server.host, self._listener.getsockname()[1]
        swap_space = f", swap space {facts.num_host_blocks * facts.block_size_tokens} tokens"
        log.info("%s on %s, %s, %s kernels, %d threads; context %d tokens, KV cache %d tokens (%.1f MB)%s",
                 facts.model_name, facts.device, facts.dtype, facts.kernels, facts.threads, facts.max_model_len,
                 facts.kv_tokens, facts.kv_bytes / 1e6, swap_space if facts.num_host_blocks else "")
        for line in memory_table(facts):
            log.info("%s", line)
        log.info("ready after %s, of which weights %.1f s", split, facts.load_s)
        log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    # Running and stopping.

    async def _watch(self, engine: EngineClient) -> None:
        """Stop the server once the engine is lost for good; without restarts, stay and let /health say so."""
        while engine.state is not EngineState.dead:
            await asyncio.sleep(0.5)
        if self._config.engine.restart is RestartPolicy.never:
            log.error("the engine has died and engine.restart=never: /health answers 503 from now on")
            return
        log.error("the engine is lost: the server ends")
        self._engine_lost = True
        self._stop.set()

    async def _drain(self, engine: EngineClient) -> None:
        """Take no new requests, let those in flight finish for a while, end the rest with an error."""
        lifecycle = self._service.lifecycle
        lifecycle.phase = Phase.draining
        if lifecycle.num_in_flight:
            log.info("draining: %d requests in flight have %g s", lifecycle.num_in_flight,
                     self._config.server.drain_timeout_s)
        waits = [asyncio.ensure_future(lifecycle.idle(self._config.server.drain_timeout_s)),
                 asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await engine.shutdown()
        if not await lifecycle.idle(LAST_WORDS_S):
            log.warning("%d requests were cut off", lifecycle.num_in_flight)
        log.info("stopped")


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handling of its own: on a signal it would close the port before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Server`."""
        yield


@dataclass(frozen=True)
class _Texts:
    """What the server itself needs of a model: everything about text, nothing about weights."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation_defaults: Mapping[str, float | int | bool]


def _load_texts(config: Config, local: LocalModel) -> _Texts:
    return _Texts(load_tokenizer(local, config.model.tokenizer), load_chat_template(local, config.model.chat_template),
                  load_spec(local).generation_defaults)


def _serving(engine: EngineClient, texts: _Texts, config: Config) -> Serving:
    facts = engine.facts
    model = ModelFacts(facts.model_name, facts.max_model_len, facts.vocab_size, texts.tokenizer, texts.chat_template,
                       texts.generation_defaults)
    return Serving(engine, model, Intake(config, model), Metrics(facts.model_name, facts.max_model_len),
                   int(time.time()))


def _show(loading: Loading, progress: LoadingProgress) -> None:
    if loading.unit == "B":
        progress.bytes_done(loading.stage, loading.done, loading.total)
    elif loading.unit:
        progress.pieces_done(loading.stage, loading.done, loading.total)
    else:
        progress.stage(loading.stage)


@dataclass
class _TimeSplit:
    """Where the time of a start went."""

    _parts: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part."""
        started_s = time.monotonic()
        yield
        self._parts[name] = time.monotonic() - started_s

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._parts.items())
        return f"{sum(self._parts.values()):.1f} s: {parts}"


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that the process does not wait for when it ends: a download may take minutes."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def settle(value: Result | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def target() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is gone if the server has ended meanwhile
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=target, daemon=True).start()
    return await result
