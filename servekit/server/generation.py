"""A job while the engine works on it: events become pieces of text for each choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from servekit.core.request import FinishReason, RequestEvent, TokenLogprobs
from servekit.engine.client import EngineUnavailable
from servekit.engine.text import TextDelta, TextStream
from servekit.load.metrics import Timeline, spread_tokens, tpot_s, ttft_s
from servekit.server.errors import ApiError, ErrorCode, error_of_finish
from servekit.server.intake import Job
from servekit.server.metrics import ANSWERS, Outcome
from servekit.server.service import Service, Serving
from servekit.server.shapes import PromptTokensDetails, Usage

REFUSALS = (FinishReason.queue_full, FinishReason.too_long, FinishReason.queue_timeout, FinishReason.over_quota)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice has to say since its last piece."""

    index: int
    is_first: bool
    delta: TextDelta
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first piece, if the prompt was to be scored: one entry per prompt token, None for the first."""


class Choice:
    """One engine request on its way to its client."""

    def __init__(self, index: int, job: Job, serving: Serving) -> None:
        self.spec = job.specs[index]
        self.num_cached_tokens = 0
        self.finish: FinishReason | None = None
        self.timeline: Timeline | None = None
        """When its tokens came, once it has ended."""
        self.scheduled_s: float | None = None
        self._index = index
        self._scores_only = job.max_tokens == 0
        self._metrics = serving.metrics
        self._text = TextStream(
            serving.model.tokenizer, stop=job.stop, include_stop=job.include_stop,
            skip_special_tokens=job.skip_special_tokens, min_tokens=self.spec.sampling.min_tokens)
        self._event_times_s: list[float] = []
        self._event_tokens: list[int] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._has_spoken = False

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those after a stop string not counted."""
        return self._text.num_output_tokens

    def feed(self, event: RequestEvent) -> Piece | None:
        """Take an event; returns what there is to say, if anything. Raises ApiError if the request has failed."""
        if self.finish is not None:
            return None
        if self._scores_only:
            event = _without_output(event)
        self._note(event)
        if event.finish is not None and event.finish not in ANSWERS:
            self._end(event.finish)
            raise self._error(event)
        delta = self._text.push(event)
        if delta.finish is not None:
            self._end(delta.finish)
        if delta.is_empty:
            return None
        is_first, self._has_spoken = not self._has_spoken, True
        return Piece(self._index, is_first, delta, self._prompt_logprobs if is_first else None)

    def abandon(self) -> None:
        """Its client has gone."""
        self._end(FinishReason.abort)

    def _note(self, event: RequestEvent) -> None:
        """Keep the times and numbers that an event carries."""
        now_s = time.monotonic()
        if event.num_cached_tokens is not None:
            self.num_cached_tokens = event.num_cached_tokens
            self.scheduled_s = event.scheduled_s
            self._prompt_logprobs = event.prompt_logprobs
            self._metrics.first_token(now_s - self.spec.arrived_s, len(self.spec.prompt_token_ids),
                                      len(event.token_ids))
        elif event.token_ids:
            self._metrics.more_tokens(now_s - self._event_times_s[-1], len(event.token_ids))
        if event.token_ids:
            self._event_times_s.append(now_s)
            self._event_tokens.append(len(event.token_ids))

    def _end(self, reason: FinishReason) -> None:
        self.finish = reason
        if self._event_times_s:
            self.timeline = Timeline(self.spec.arrived_s, spread_tokens(self._event_times_s, self._event_tokens),
                                     time.monotonic())
        self._metrics.finished(Outcome(reason, self.timeline, self.scheduled_s, len(self.spec.prompt_token_ids),
                                       self.spec.sampling.max_tokens))

    def _error(self, event: RequestEvent) -> ApiError:
        assert event.finish is not None
        error = error_of_finish(event.finish, event.message, self.num_output_tokens, event.retry_after_s)
        if event.finish in REFUSALS:
            self._metrics.refused(error.code)
        return error


def _without_output(event: RequestEvent) -> RequestEvent:
    """An event of a request that only scores its prompt, without the one token that the engine samples for it."""
    finish = FinishReason.length if event.finish in ANSWERS else event.finish
    return event._replace(token_ids=(), logprobs=(), stop_token_id=None, finish=finish)


class Generation:
    """All choices of one job, from their submission to their end."""

    def __init__(self, job: Job, service: Service) -> None:
        self._job = job
        self._service = service
        self._engine = service.serving.engine
        self._choices = [Choice(index, job, service.serving) for index in range(len(job.specs))]

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What the choices say, as it comes; pieces that come together are given together.

        Raises ApiError as soon as one choice fails. However it ends, nothing goes on in the engine afterwards.
        """
        ids = [spec.request_id for spec in self._job.specs]
        try:
            streams = self._engine.submit(self._job.specs)
        except EngineUnavailable as error:
            self._service.refused(ErrorCode.engine_unavailable)
            raise ApiError(ErrorCode.engine_unavailable, f"the engine takes no requests: {error}") from None
        try:
            with self._service.active(self._job.ticket.request_id, ids):
                async with aclosing(_merged(streams)) as batches:
                    async for batch in batches:
                        pieces = [piece for index, event in batch if (piece := self._feed(index, event))]
                        if pieces:
                            yield pieces
                        if all(choice.finish for choice in self._choices):
                            return
        finally:
            self.abort()
            for choice in self._choices:
                if choice.finish is None:
                    choice.abandon()

    def abort(self) -> None:
        """End what has not ended; the pieces then end with an error."""
        unfinished = [choice.spec.request_id for choice in self._choices if choice.finish is None]
        if unfinished:
            self._engine.abort(unfinished)

    def usage(self) -> Usage:
        """Tokens until now: each prompt once, the output of every choice."""
        prompts = self._job.prompts
        num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        num_output = sum(choice.num_output_tokens for choice in self._choices)
        num_truncated = sum(prompt.num_truncated for prompt in prompts)
        num_cached = sum(choice.num_cached_tokens for choice in self._choices[::self._job.n])
        return Usage(prompt_tokens=num_prompt, completion_tokens=num_output, total_tokens=num_prompt + num_output,
                     prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached,
                                                               truncated_tokens=num_truncated or UNSET))

    def log_record(self) -> dict[str, object]:
        """What is worth keeping in the log: never the text."""
        usage, first = self.usage(), self._choices[0]
        record: dict[str, object] = {
            "n_in": usage.prompt_tokens, "n_out": usage.completion_tokens,
            "cached": usage.prompt_tokens_details.cached_tokens,
            "finish": ",".join(sorted({choice.finish.value for choice in self._choices if choice.finish}))}
        if first.spec.tenant:
            record["tenant"] = first.spec.tenant
        if first.spec.priority:
            record["priority"] = first.spec.priority
        if first.scheduled_s is not None:
            record["queue_ms"] = _ms(first.scheduled_s - first.spec.arrived_s)
        if first.timeline is not None:
            record["ttft_ms"] = _ms(ttft_s(first.timeline))
            tpot = tpot_s(first.timeline)
            record["tpot_ms"] = None if tpot is None else _ms(tpot)
        return record

    def _feed(self, index: int, event: RequestEvent) -> Piece | None:
        choice = self._choices[index]
        piece = choice.feed(event)
        if choice.finish is not None and event.finish is None:
            self._engine.abort([choice.spec.request_id])  # a stop string, of which the engine knows nothing
        return piece


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


Batch = list[tuple[int, RequestEvent]]
"""Events that came together, each with the index of its stream."""


async def _merged(streams: Sequence[AsyncIterator[RequestEvent]]) -> AsyncGenerator[Batch, None]:
    """The events of several streams in the order of their arrival."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield [(0, event)]
        return
    queue: asyncio.Queue[tuple[int, RequestEvent]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[RequestEvent]) -> None:
        async for event in stream:
            queue.put_nowait((index, event))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        while True:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            yield batch
    finally:
        for task in pumps:
            task.cancel()
