"""The JSON that is sent back: structures that msgspec encodes directly, for both styles of the API."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where a prompt's tokens came from."""

    cached_tokens: int = 0
    """Served from the prefix cache."""
    truncated_tokens: int | UnsetType = UNSET
    """Left out at the request of truncate_prompt_tokens; absent when nothing was."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request: each prompt once, the output of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct, kw_only=True):
    """One token in the chat style."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    """One output token and its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a choice, one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities in the style of completions: parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of a prompt, which nothing precedes."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """What the model said since the last chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    """What every choice has, in every style."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET
    """The client's stop string or stop token that ended the choice, if one did."""


class ChatChoice(Choice, kw_only=True):
    """One answer of POST /v1/chat/completions."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Choice, kw_only=True):
    """A piece of one answer in a stream of POST /v1/chat/completions."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Choice, kw_only=True):
    """One answer of POST /v1/completions, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


AnyChoice = ChatChoice | ChatChunkChoice | CompletionChoice


class Answer(msgspec.Struct, kw_only=True):
    """A response, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnyChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def event_of(answer: Answer) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + _encoder.encode(answer) + b"\n\n"
