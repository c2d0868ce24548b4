"""An engine that says what a test wrote, and a real HTTP server in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from servekit.config.schema import Config, ModelConfig, ServerConfig
from servekit.core.request import FinishReason, RequestEvent, RequestId, RequestSpec, TokenLogprobs
from servekit.engine.client import EngineState, EngineUnavailable, StepObserver
from servekit.engine.messages import EngineFacts, EngineStats, StepRecord
from servekit.engine.streams import StreamTable
from servekit.model.chat_template import ChatTemplate, load_chat_template
from servekit.model.local import LocalModel, SourceKind
from servekit.model.tokenizer import SpecialToken, Tokenizer, build_dummy_tokenizer
from servekit.server.app import create_app
from servekit.server.intake import Intake, ModelFacts
from servekit.server.metrics import Metrics
from servekit.server.service import Service, Serving

VOCAB = 320
"""Rows of the fake model's embedding; the tokenizer knows fewer: one token a byte, two special ones, some words."""
TOKENIZER_VOCAB = 300
EOS = 257
MAX_MODEL_LEN = 256
MODEL = "fake"


def tokens(text: str) -> list[int]:
    """The fake model's tokens of a text: its bytes."""
    return list(text.encode())


@dataclass(frozen=True)
class Script:
    """How the fake engine answers a request."""

    output: Sequence[int] = tuple(tokens("hello world"))
    """Repeated when the request asks for more, unless EOS is in it."""
    tokens_per_event: int = 1
    delay_s: float = 0.0
    """Before every event."""
    first_delay_s: float = 0.0
    """Before the first event, in addition."""
    refusal: FinishReason | None = None
    """The only event."""
    retry_after_s: float | None = None
    """Of a refusal."""
    fail_after: int | None = None
    """Events until the request fails with `failure`."""
    failure: FinishReason = FinishReason.error
    message: str = ""
    num_cached: int = 0


class FakeEngine:
    """An EngineClient whose tokens come from `script`, a function of the request."""

    def __init__(self) -> None:
        self.script: Callable[[RequestSpec], Script] = lambda _: Script()
        self.state = EngineState.ready
        self.is_healthy = True
        self.facts = EngineFacts(MODEL, MAX_MODEL_LEN, VOCAB, 64, 16, "cpu", "float32", "none",
                                 "float32", "reference", 1, 1000, 2000, 0.1)
        self.stats = EngineStats()
        self.submitted: list[RequestSpec] = []
        self.aborted: list[RequestId] = []
        self.tokens_made = 0
        self.num_resets = 0
        self._streams = StreamTable()
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._observers: list[StepObserver] = []

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def observe(self, observer: StepObserver) -> None:
        self._observers.append(observer)

    def step(self, stats: EngineStats, step: StepRecord | None) -> None:
        """Report a step to the observers."""
        self.stats = stats
        for observer in self._observers:
            observer(stats, step)

    async def start(self) -> None:
        """It always runs."""

    def submit(self, specs: Sequence[RequestSpec]) -> Sequence[AsyncIterator[RequestEvent]]:
        if self.state is not EngineState.ready:
            raise EngineUnavailable(f"the engine is {self.state.value}")
        streams = self._streams.open(specs)
        self.submitted.extend(specs)
        for spec in specs:
            task = asyncio.create_task(self._answer(spec, self.script(spec)))
            self._tasks[spec.request_id] = task
            task.add_done_callback(lambda _, request_id=spec.request_id: self._tasks.pop(request_id, None))
        return streams

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        ended = self._streams.end(request_ids, FinishReason.abort, "")
        self.aborted.extend(ended)
        for request_id in ended:
            if request_id in self._tasks:
                self._tasks[request_id].cancel()

    async def reset_prefix_cache(self) -> int:
        self.num_resets += 1
        return 7

    async def shutdown(self) -> None:
        self.state = EngineState.dead
        for task in list(self._tasks.values()):
            task.cancel()
        self._streams.end_all(FinishReason.shutdown, "the server is shutting down")

    async def _answer(self, spec: RequestSpec, script: Script) -> None:
        """Send the events of one request."""
        await asyncio.sleep(script.first_delay_s)
        if script.refusal is not None:
            self._deliver(RequestEvent(spec.request_id, finish=script.refusal, message=script.message,
                                       retry_after_s=script.retry_after_s))
            return
        ids, finish = _output(spec, script)
        groups = [ids[start:start + script.tokens_per_event] for start in range(0, len(ids), script.tokens_per_event)]
        for number, group in enumerate(groups):
            if number == script.fail_after:
                self._deliver(RequestEvent(spec.request_id, finish=script.failure, message=script.message))
                return
            await asyncio.sleep(script.delay_s)
            self.tokens_made += len(group)
            is_last = number == len(groups) - 1
            event = RequestEvent(
                spec.request_id, tuple(group), _logprobs(group, spec.sampling.logprobs),
                finish=finish if is_last else None,
                stop_token_id=group[-1] if is_last and finish is FinishReason.stop else None)
            self._deliver(event if number else _with_first_facts(event, spec, script))

    def _deliver(self, event: RequestEvent) -> None:
        self._streams.deliver([event])


def _output(spec: RequestSpec, script: Script) -> tuple[list[int], FinishReason]:
    """The tokens up to the first stop token or to max_tokens, and which it was."""
    ids: list[int] = []
    while len(ids) < spec.sampling.max_tokens:
        ids.append(script.output[len(ids) % len(script.output)])
        if ids[-1] in spec.sampling.stop_token_ids and len(ids) > spec.sampling.min_tokens:
            return ids, FinishReason.stop
    return ids, FinishReason.length


def _with_first_facts(event: RequestEvent, spec: RequestSpec, script: Script) -> RequestEvent:
    asked = spec.sampling.prompt_logprobs
    scores = None if asked is None else (None, *_logprobs(spec.prompt_token_ids[1:], asked))
    return event._replace(num_cached_tokens=script.num_cached, prompt_logprobs=scores, scheduled_s=time.monotonic())


def _logprobs(ids: Sequence[int], asked: int | None) -> tuple[TokenLogprobs, ...]:
    """Every token is the likeliest at -0.5, followed by a, b, c, ... at -1, -2, -3, ..."""
    if asked is None:
        return ()
    others = [(ord("a") + rank, -1.0 - rank) for rank in range(asked)]
    return tuple(TokenLogprobs(token_id, -0.5, 1, tuple([(token_id, -0.5), *others][:asked])) for token_id in ids)


@dataclass
class LiveServer:
    """A server on a free port of this machine, in a thread of its own."""

    url: str
    engine: FakeEngine
    service: Service
    loop: asyncio.AbstractEventLoop

    def wait_until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Wait for something that happens in the server's thread."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, "it did not happen"
            time.sleep(0.005)

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` in the server's event loop and wait for it."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(10)


def fake_config(**server: object) -> Config:
    """A configuration for the fake model."""
    return Config(ModelConfig("dummy:tiny"), server=dataclasses.replace(ServerConfig(), **server))


def fake_tokenizer() -> Tokenizer:
    """One token a byte; the turn marker ends a sequence."""
    tokenizer = build_dummy_tokenizer(TOKENIZER_VOCAB)
    tokenizer.eos, tokenizer.eos_token_ids = SpecialToken(EOS, tokenizer.token_text(EOS)), (EOS,)
    return tokenizer


def fake_template() -> ChatTemplate:
    template = load_chat_template(LocalModel(SourceKind.dummy, MODEL, None, "tiny"))
    assert template is not None
    return template


def serving_of(engine: FakeEngine, config: Config, template: ChatTemplate | None,
               generation_defaults: dict[str, float] | None = None) -> Serving:
    model = ModelFacts(MODEL, MAX_MODEL_LEN, VOCAB, fake_tokenizer(), template, generation_defaults or {})
    return Serving(engine, model, Intake(config, model), Metrics(MODEL, MAX_MODEL_LEN), 1_700_000_000)


@contextlib.contextmanager
def live_server(config: Config | None = None, api_key: str | None = None, template: ChatTemplate | None = None,
                is_loaded: bool = True, has_template: bool = True) -> Iterator[LiveServer]:
    """Run a server around a fake engine until the end of the block."""
    config = config or fake_config()
    engine, service = FakeEngine(), Service(config, api_key)
    http = uvicorn.Server(uvicorn.Config(create_app(service), log_config=None, lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    started: list[LiveServer] = []
    ready = threading.Event()

    async def main() -> None:
        if is_loaded:
            service.serve(serving_of(engine, config, template or fake_template() if has_template else None))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started.append(LiveServer(url, engine, service, asyncio.get_running_loop()))
        ready.set()
        await http.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        http.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"
