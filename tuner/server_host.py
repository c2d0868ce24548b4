"""Another server under measurement: every trial is a fresh process, and only what it answers is known of it."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from platform import machine
from urllib.parse import urlsplit

import aiohttp
import msgspec

from servekit.config.errors import ConfigError, require
from servekit.load.openai import open_session
from servekit.load.target import FailureKind, RequestFailed
from servekit.load.workload import WorkloadRequest
from servekit.sim.fitted import TimedStep
from servekit.tuner.executor import Description, EngineFailed, Warm
from servekit.tuner.launch import Configuration, LaunchConfig, program_of
from servekit.tuner.server_process import ServerProcess
from servekit.tuner.server_settings import ServerSettings
from servekit.tuner.server_target import PromptRule, ServerTarget, find_rule
from servekit.tuner.trial import Ending

_LOOK_EVERY_S = 0.1
_SAY_EVERY_S = 15.0
_ANSWER_TIMEOUT_S = 5.0
"""For questions that a server answers without a model."""
_READY, _NO_SUCH_PATH = 200, 404


class _Meta(msgspec.Struct):
    n_vocab: int | None = None


class _Model(msgspec.Struct):
    """What is of use in an entry of /v1/models; only the name is in every server's."""

    id: str
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Up:
    """A server that is up."""

    def __init__(self, config: LaunchConfig, process: ServerProcess, session: aiohttp.ClientSession, model: _Model,
                 rule: PromptRule) -> None:
        self.config = config
        self.process = process
        self.model = model
        self.rule = rule
        self.session = session
        self.target = ServerTarget(session, model.id, rule)


class ServerHost:
    """A `Host` over processes of another server."""

    is_live = False
    steps: Sequence[TimedStep] = ()
    """A server tells nothing of its steps."""
    bounds: Mapping[str, int] = {}

    def __init__(self, server: ServerSettings, folder: Path, timeout_s: float, say: Callable[[str], None]) -> None:
        """`folder`: for the output of the processes; `timeout_s`: longest time for one request; `say`: progress."""
        self._server = server
        self._folder = folder
        self._timeout_s = timeout_s
        self._say = say
        self._process: ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._ready: _Up | None = None
        self._num_starts = 0

    @property
    def description(self) -> Description:
        """Of the server that is up."""
        model, rule = self._up.model, self._up.rule
        return Description(
            f"{model.id}, served by {program_of(self._server.start_command)}",
            f"{machine()} with {len(os.sched_getaffinity(0))} cores", model.max_model_len,
            None if model.meta is None else model.meta.n_vocab,
            {"server": shlex.join(self._server.start_command), "url": self._server.url, "model": model.id,
             "prompts": rule.form.value, "machine": machine(), "cores": len(os.sched_getaffinity(0))})

    @property
    def target(self) -> ServerTarget:
        """Over HTTP."""
        return self._up.target

    def processes(self) -> Sequence[int]:
        """All that the server has started."""
        return [] if self._process is None else self._process.members

    async def prepare(self, config: Configuration, *, cold: bool) -> Warm:
        """Start a server of this configuration, unless it is up and need not be cold. Raises EngineFailed.

        Raises ConfigError if that cannot be tried: its program cannot be run, somebody else answers at its address, or
        it lacks the model.
        """
        assert isinstance(config, LaunchConfig)
        is_up = self._ready is not None and self._ready.config == config and self._up.process.exit_status is None
        if is_up and not cold:
            return Warm.hot
        await self.stop()
        try:
            await self._start(config)
        except BaseException:
            await self.stop()
            raise
        return Warm.cold

    def begin_run(self) -> None:
        """Nothing to forget."""

    async def end_run(self, is_disturbed: bool) -> None:
        """Check that it did what it was asked to, and still answers. Raises EngineFailed."""
        up = self._up
        if up.target.complaint is not None:
            raise EngineFailed(Ending.crashed, up.target.complaint)
        try:
            async with asyncio.timeout(self._timeout_s):
                await _answer_once(up.target)
        except TimeoutError:
            await self.stop()
            raise EngineFailed(Ending.hung, f"the server did not answer within {self._timeout_s:g} s after a run; "
                               f"{_last_lines(up.process)}") from None
        except RequestFailed as failed:
            if failed.failure.kind is not FailureKind.status:
                raise EngineFailed(Ending.crashed, f"the server does not answer after a run: {failed}; "
                                   f"{_last_lines(up.process)}") from None

    async def stop(self) -> None:
        """End the server, and all that it has started."""
        session, process = self._session, self._process
        self._ready = self._session = self._process = None
        if session is not None:
            await session.close()
        if process is not None:
            process.end()

    @property
    def _up(self) -> _Up:
        assert self._ready is not None
        return self._ready

    # --- starting one ---

    async def _start(self, config: LaunchConfig) -> None:
        await self._require_free()
        self._process = process = self._launched(config)
        self._session = session = open_session(self._server.url)
        limit_s = self._server.options.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._until_ready(process, session)
                model = await self._model(session)
                rule = await find_rule(session, model.id)
        except TimeoutError:
            raise EngineFailed(Ending.hung, f"the server was not ready at {self._server.url} after {limit_s:g} s; "
                               f"{_last_lines(process)}") from None
        except RequestFailed as failed:
            raise EngineFailed(Ending.crashed, f"the server does not answer a short prompt: {failed}; "
                               f"{_last_lines(process)}") from None
        self._ready = _Up(config, process, session, model, rule)

    def _launched(self, config: LaunchConfig) -> ServerProcess:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_starts += 1
        log = self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{self._num_starts:04}.log"
        words = config.words(self._folder)
        try:
            return ServerProcess(words, log)
        except OSError as error:
            raise ConfigError("start_command", shlex.join(words), f"cannot be run: {error.strerror}",
                              "give the path of a program, or install it") from None

    async def _require_free(self) -> None:
        """Whoever answers there already would be measured instead."""
        address = urlsplit(self._server.url)
        port = address.port or (443 if address.scheme == "https" else 80)
        with suppress(OSError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address.hostname, port)
            writer.close()
            raise ConfigError("url", self._server.url, "something answers there before the server is started",
                              "end it, or choose another port in url and start_command")

    async def _until_ready(self, process: ServerProcess, session: aiohttp.ClientSession) -> None:
        started_s = said_s = time.monotonic()
        while not await _is_ready(session):
            if process.exit_status is not None:
                raise EngineFailed(Ending.crashed, f"the server ended with status {process.exit_status} before it was "
                                   f"ready; {_last_lines(process)}")
            if time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                self._say(f"starting the server since {said_s - started_s:.0f} s: {process.tail(1) or 'no output yet'}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _model(self, session: aiohttp.ClientSession) -> _Model:
        _, answer = await _get(session, "v1/models")
        try:
            listed = {model.id: model for model in msgspec.json.decode(answer, type=_Models).data}
        except msgspec.MsgspecError as error:
            raise ConfigError("url", self._server.url, f"its /v1/models is not that of an OpenAI-compatible server "
                              f"({error})", "give the address of one") from None
        wanted = self._server.options.model or next(iter(listed), None)
        require(wanted in listed, "launch.model", wanted, f"the server lists {', '.join(listed) or 'no model'}",
                "give one of these, or leave launch.model out")
        return listed[str(wanted)]


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    """By /health, where there is one, and by /v1/models in any case."""
    return (await _get(session, "health"))[0] in (_READY, _NO_SUCH_PATH) \
        and (await _get(session, "v1/models"))[0] == _READY


async def _get(session: aiohttp.ClientSession, path: str) -> tuple[int, bytes]:
    """Status and body; a status of 0: nobody answers."""
    try:
        async with session.get(path, timeout=aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, ValueError):
        return 0, b""


async def _answer_once(target: ServerTarget) -> None:
    request = WorkloadRequest(0, tuple(range(1000, 1032)), 1)
    async with aclosing(target.send(request)) as observations:
        async for _ in observations:
            pass


def _last_lines(process: ServerProcess) -> str:
    return f"its last lines: {process.tail() or 'none'}"
