"""What a client gets: the answer of a job in the style of its endpoint, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.core.request import TokenLogprobs
from servekit.engine.text import TextDelta
from servekit.model.tokenizer import Tokenizer
from servekit.server.errors import ApiError, ErrorCode
from servekit.server.generation import Generation, Piece
from servekit.server.intake import Job, ModelFacts
from servekit.server.protocol import StreamOptions
from servekit.server.service import Service
from servekit.server.shapes import (
    Answer,
    AnyChoice,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    Usage,
    event_of,
)

log = logging.getLogger(__name__)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""
DONE = b"data: [DONE]\n\n"


class Style(Protocol):
    """How one endpoint shows the pieces of its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def whole(self, piece: Piece) -> AnyChoice:
        """A choice that has ended, all of it in one piece."""

    def chunks(self, piece: Piece) -> list[AnyChoice]:
        """A piece of a choice, one entry for each event that it takes."""

    def prompt_token_ids(self) -> list[int] | UnsetType:
        """The prompt's tokens, where the response as a whole shows them."""


class ChatStyle:
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, model: ModelFacts) -> None:
        self._job = job
        self._tokenizer = model.tokenizer

    def whole(self, piece: Piece) -> AnyChoice:
        """A choice with the whole message."""
        return ChatChoice(index=piece.index, message=ChatMessage(content=piece.delta.text), **self._common(piece.delta))

    def chunks(self, piece: Piece) -> list[AnyChoice]:
        """The role once, then what was said."""
        chunks: list[AnyChoice] = []
        if piece.is_first:
            chunks.append(ChatChunkChoice(index=piece.index, finish_reason=None,
                                          delta=ChatDelta(role="assistant", content="")))
        delta = ChatDelta(content=piece.delta.text or UNSET)
        chunks.append(ChatChunkChoice(index=piece.index, delta=delta, **self._common(piece.delta)))
        return chunks

    def prompt_token_ids(self) -> list[int] | UnsetType:
        """The one prompt's, if asked for."""
        return list(self._job.prompts[0].token_ids) if self._job.return_token_ids else UNSET

    def _common(self, delta: TextDelta) -> dict[str, Any]:
        return {**_common(delta, self._job),
                "logprobs": ChatLogprobs(content=[self._scored(entry) for entry in delta.logprobs])
                if delta.logprobs else None}

    def _scored(self, entry: TokenLogprobs) -> ChatTokenLogprob:
        return ChatTokenLogprob(**self._token(entry.token_id, entry.logprob),
                                top_logprobs=[TokenLogprob(**self._token(*other)) for other in entry.top])

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._tokenizer.token_text(token_id), "logprob": max(logprob, LOWEST_LOGPROB),
                "bytes": list(self._tokenizer.token_bytes(token_id))}


class CompletionStyle:
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, model: ModelFacts) -> None:
        self._job = job
        self._tokenizer = model.tokenizer
        self._logprobs = [_LogprobLists(model.tokenizer, job.skip_special_tokens) for _ in job.specs]

    def whole(self, piece: Piece) -> AnyChoice:
        """A choice with its text, after the prompt's if `echo` asks for it."""
        prompt, delta = self._job.prompt_of(piece.index), piece.delta
        echoed = piece.is_first and self._job.echo
        scored: list[tuple[int, TokenLogprobs | None]] = [(entry.token_id, entry) for entry in delta.logprobs]
        if piece.prompt_logprobs is not None:
            scored = [*zip(prompt.token_ids, piece.prompt_logprobs, strict=True), *scored]
        return CompletionChoice(
            index=piece.index, text=(prompt.text if echoed else "") + delta.text,
            logprobs=self._logprobs[piece.index].take(scored) if scored else None,
            prompt_token_ids=list(prompt.token_ids) if piece.is_first and self._job.return_token_ids else UNSET,
            **_common(delta, self._job))

    def chunks(self, piece: Piece) -> list[AnyChoice]:
        """The same for a piece of the text."""
        return [self.whole(piece)]

    def prompt_token_ids(self) -> list[int] | UnsetType:
        """Each choice has its own."""
        return UNSET


def _common(delta: TextDelta, job: Job) -> dict[str, Any]:
    """What both styles say of a piece."""
    return {"finish_reason": None if delta.finish is None else delta.finish.value,
            "stop_reason": UNSET if delta.stop_reason is None else delta.stop_reason,
            "token_ids": list(delta.token_ids) if job.return_token_ids else UNSET}


class _LogprobLists:
    """Builds the parallel lists of the completions style, counting characters from piece to piece."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def take(self, scored: Sequence[tuple[int, TokenLogprobs | None]]) -> CompletionLogprobs:
        """Lists for the next tokens; a token without a score is the first of a prompt."""
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id, _ in scored],
            token_logprobs=[entry and max(entry.logprob, LOWEST_LOGPROB) for _, entry in scored],
            top_logprobs=[entry and self._top(entry) for _, entry in scored],
            text_offset=[self._offset(token_id) for token_id, _ in scored])

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives and the token itself by their text; of those with equal text, the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), max(logprob, LOWEST_LOGPROB))
        return top

    def _offset(self, token_id: int) -> int:
        """Where a token begins, in characters; moves on to its end."""
        begin = self._num_chars
        if token_id not in self._silent:
            self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return begin


class Responder:
    """Answers one request with a job's results."""

    def __init__(self, job: Job, style: Style, service: Service) -> None:
        self._style = style
        self._model = service.serving.model
        self._job = job
        self._created_s = int(time.time())
        self.generation = Generation(job, service)

    async def whole(self) -> Response:
        """The response with every choice. Raises ApiError if one fails."""
        collected: list[list[Piece]] = [[] for _ in self._job.specs]
        async with aclosing(self.generation.pieces()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    collected[piece.index].append(piece)
        answer = self._answer(self._style.object, [self._style.whole(_joined(pieces)) for pieces in collected],
                              self.generation.usage())
        answer.prompt_token_ids = self._style.prompt_token_ids()
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def events(self, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events, those of one step together. Raises ApiError if a choice fails."""
        prompt_token_ids = self._style.prompt_token_ids()
        async with aclosing(self.generation.pieces()) as batches:
            async for pieces in batches:
                usage = (self.generation.usage() if options.continuous_usage_stats
                         else None if options.include_usage else UNSET)
                answers = [self._answer(self._style.chunk_object, [choice], usage)
                           for piece in pieces for choice in self._style.chunks(piece)]
                answers[0].prompt_token_ids, prompt_token_ids = prompt_token_ids, UNSET
                yield b"".join([event_of(answer) for answer in answers])
        if options.include_usage:
            yield event_of(self._answer(self._style.chunk_object, [], self.generation.usage()))
        yield DONE

    def _answer(self, kind: str, choices: list[AnyChoice], usage: Usage | UnsetType | None) -> Answer:
        return Answer(id=self._style.id_prefix + self._job.ticket.request_id, object=kind, created=self._created_s,
                      model=self._model.name, choices=choices, usage=usage)


def _joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    first, last = pieces[0], pieces[-1]
    delta = TextDelta("".join([piece.delta.text for piece in pieces]),
                      tuple(token_id for piece in pieces for token_id in piece.delta.token_ids),
                      tuple(entry for piece in pieces for entry in piece.delta.logprobs),
                      last.delta.finish, last.delta.stop_reason)
    return Piece(first.index, True, delta, first.prompt_logprobs)


class EventStream(Response):
    """A response of server-sent events whose first event is known: errors from here on are events too."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], watch: Watch) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
                         media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the last one is always [DONE]."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_body(self._first))
            try:
                async for event in self._rest:
                    await send(_body(event))
            except ApiError as error:
                await send(_body(_error_event(error)))
            except Exception:
                log.exception("unexpected error in a stream")
                await send(_body(_error_event(ApiError(ErrorCode.internal_error, "the server failed to go on"))))
            self._watch.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.stop()
            await self._rest.aclose()


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.body + b"\n\n" + DONE


class Watch:
    """Aborts a generation when its client leaves, also while it waits or is in prefill."""

    def __init__(self, request: Request, generation: Generation) -> None:
        self._task = asyncio.create_task(self._run(request, generation))

    async def _run(self, request: Request, generation: Generation) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue
        generation.abort()

    def stop(self) -> None:
        """The client no longer matters."""
        self._task.cancel()


async def respond(request: Request, job: Job, style: Style, stream: StreamOptions | None, service: Service) -> Response:
    """Answer a request whose body has been read, as events if `stream` is given.

    Raises ApiError for a job that fails before there is anything to say, so that it gets a status of its own.
    """
    responder = Responder(job, style, service)
    request.state.generation = responder.generation
    watch = Watch(request, responder.generation)
    try:
        if stream is None:
            answer = await responder.whole()
            watch.stop()
            return answer
        events = responder.events(stream)
        return EventStream(await anext(events), events, watch)
    except BaseException:
        watch.stop()
        raise
