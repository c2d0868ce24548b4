"""An OpenAI-compatible server under measurement: prompts of exact length, and every piece of an answer counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import aiohttp

from servekit.config.bench import Endpoint
from servekit.load.openai import OpenAITarget, RequestOptions, as_text
from servekit.load.target import Failure, FailureKind, Observation, RequestFailed
from servekit.load.workload import WorkloadRequest

_PROBE_TOKENS = (24, 96)
_PROBE_ANSWER_TOKENS = 4
_FIRST_TOKEN = 1000
"""Ids from here on are ordinary tokens of any model."""


class PromptForm(Enum):
    """How prompts are sent."""

    token_ids = "token ids"
    text = "text"
    """Common words, one token each."""


@dataclass(frozen=True)
class PromptRule:
    """What a server was found to take."""

    form: PromptForm
    extra_tokens: int = 0
    """That the server adds to every prompt, and that are therefore left out of it."""

    def options(self, model: str) -> RequestOptions:
        """What every request body has in common."""
        return _TextOptions(Endpoint.completions, model) if self.form is PromptForm.text \
            else RequestOptions(Endpoint.completions, model)

    def shortened(self, request: WorkloadRequest) -> WorkloadRequest:
        """A request for as many tokens as it takes to make the wanted number of them."""
        if self.extra_tokens == 0:
            return request
        return replace(request, prompt_token_ids=request.prompt_token_ids[self.extra_tokens:])


class _TextOptions(RequestOptions):
    """Prompts as text."""

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """The JSON body of one request."""
        return {**super().body(request), "prompt": as_text(request.prompt_token_ids)}


class ServerTarget:
    """Sends a workload's requests to a server, and counts what comes back.

    A server that does not count the tokens of each piece has sent one with each: what it says at the end corrects that.
    """

    def __init__(self, session: aiohttp.ClientSession, model: str, rule: PromptRule) -> None:
        self._target = OpenAITarget(session, rule.options(model))
        self._rule = rule
        self.complaint: str | None = None
        """What it does otherwise than it was asked to, so that it cannot be measured; None: nothing so far."""

    async def send(self, request: WorkloadRequest) -> AsyncGenerator[Observation, None]:
        """Yield what the server says of a request; raises RequestFailed, also if one of the lengths is not as asked."""
        num_pieces, num_tokens, is_over = 0, 0, False
        async with aclosing(self._target.send(self._rule.shortened(request))) as observations:
            async for seen in observations:
                self._check(seen.prompt_tokens in (None, len(request.prompt_token_ids)),
                            f"counts {seen.prompt_tokens} tokens in a prompt of {len(request.prompt_token_ids)}")
                num_pieces += seen.has_text
                if seen.has_text and seen.output_tokens is None:
                    seen = seen._replace(output_tokens=max(num_tokens, num_pieces))
                num_tokens = max(num_tokens, seen.output_tokens or 0)
                if self._rule.form is PromptForm.text:
                    # Prompts of common words may begin alike, which is no sign of a prompt that was sent before.
                    seen = seen._replace(cached_tokens=None)
                is_over = is_over or seen.finish_reason is not None
                yield seen
        self._check(not is_over or num_tokens >= request.output_tokens,
                    f"ended an answer after {num_tokens} of {request.output_tokens} tokens in spite of ignore_eos")

    def _check(self, is_as_asked: bool, complaint: str) -> None:
        if not is_as_asked:
            self.complaint = f"the server {complaint}"
            raise RequestFailed(Failure(FailureKind.protocol, self.complaint))


async def find_rule(session: aiohttp.ClientSession, model: str) -> PromptRule:
    """How a server takes prompts: as token ids if it can, or else as words whose number makes that of the tokens.

    Raises RequestFailed if neither gives prompts of known length.
    """
    try:
        await _count(session, model, PromptRule(PromptForm.token_ids), _PROBE_TOKENS[0])
        return PromptRule(PromptForm.token_ids)
    except RequestFailed as refusal:
        if refusal.failure.kind is not FailureKind.status:
            raise
    extras = {await _count(session, model, PromptRule(PromptForm.text), num) - num for num in _PROBE_TOKENS}
    if len(extras) > 1 or min(extras) < 0:
        raise RequestFailed(Failure(FailureKind.protocol, "the server takes no token ids, and common words are not one "
                                    "token each for it, so that prompts of a known length cannot be made"))
    return PromptRule(PromptForm.text, extras.pop())


async def _count(session: aiohttp.ClientSession, model: str, rule: PromptRule, num_tokens: int) -> int:
    """How many tokens a server counts in a prompt of so many ids, or words."""
    counted: int | None = num_tokens if rule.form is PromptForm.token_ids else None
    request = WorkloadRequest(0, tuple(range(_FIRST_TOKEN, _FIRST_TOKEN + num_tokens)), _PROBE_ANSWER_TOKENS)
    async with aclosing(OpenAITarget(session, rule.options(model)).send(request)) as observations:
        async for seen in observations:
            counted = counted if seen.prompt_tokens is None else seen.prompt_tokens
    if counted is None:
        raise RequestFailed(Failure(FailureKind.protocol, "the server takes no token ids, and does not say how many "
                                    "tokens a prompt has"))
    return counted
