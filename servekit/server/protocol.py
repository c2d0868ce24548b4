"""The bodies that clients send: which fields exist, their types and bounds, and what becomes of all others.

A field is honoured, or refused in one line that names it; the few that clients send by habit and that change
nothing are accepted. `null` always means the same as leaving a field out.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from servekit.config.schema import UnknownFields
from servekit.server.errors import ApiError, ErrorCode

log = logging.getLogger(__name__)

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    """A last chunk without choices that carries the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far on every chunk."""


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: PositiveCount | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=64)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Int32 | None = None
    predicted_output_tokens: PositiveCount | None = None
    queue_timeout_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: PositiveCount | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1)]


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(msgspec.Struct, kw_only=True):
    """POST /tokenize of a conversation."""

    messages: Messages
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    request_id: str


WITHOUT_EFFECT = frozenset({
    "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention"})
"""Fields that clients send and that change nothing here, whatever their value."""


@dataclass(frozen=True)
class Refused:
    """A field that exists elsewhere and is not implemented here."""

    neutral: tuple[object, ...] = ()
    """Values that ask for nothing, and so are accepted like null."""
    advice: str = "leave it out"


REFUSED = {
    "tools": Refused(([],)),
    "tool_choice": Refused(("none", "auto")),
    "functions": Refused(([],)),
    "function_call": Refused(("none", "auto")),
    "response_format": Refused(({"type": "text"},), 'only {"type": "text"} is implemented'),
    "structured_outputs": Refused(({},)),
    "guided_json": Refused(),
    "guided_regex": Refused(),
    "guided_choice": Refused(),
    "guided_grammar": Refused(),
    "modalities": Refused((["text"],), 'only ["text"] is implemented'),
    "audio": Refused(),
    "prediction": Refused(),
    "web_search_options": Refused(),
    "verbosity": Refused(("medium",)),
    "reasoning_effort": Refused(("none",), "models that reason take it through chat_template_kwargs"),
    "suffix": Refused(("",)),
    "use_beam_search": Refused((False,)),
    "length_penalty": Refused((1, 1.0)),
    "bad_words": Refused(([],), "use logit_bias"),
    "prompt_logprobs": Refused((), "use echo and logprobs of /v1/completions"),
    "return_tokens_as_token_ids": Refused((False,), "use return_token_ids"),
    "spaces_between_special_tokens": Refused((True,)),
    "chat_template": Refused((), "the server's is set by model.chat_template"),
    "documents": Refused(([],)),
    "truncation_side": Refused(("left",), "truncate_prompt_tokens keeps the end of the prompt"),
}
"""Fields of OpenAI, vLLM and others that would change the answer if they were honoured."""

STREAM_OPTIONS_WITHOUT_EFFECT = frozenset({"include_obfuscation"})
"""OpenAI pads events by default; here none is padded, asked for or not."""

MESSAGE_FIELDS_WITHOUT_EFFECT = frozenset({"refusal", "annotations"})
"""What clients send back with an assistant's earlier turn, as they got it."""

OF_GENERATION = frozenset(CompletionBody.__struct_fields__ + ChatBody.__struct_fields__)
"""Fields of one endpoint: honoured there, refused at the other."""

Body = TypeVar("Body", bound=msgspec.Struct)


def parse(kind: type[Body], data: dict[str, Any], unknown: UnknownFields) -> Body:
    """A body as its type. Raises ApiError (400) naming the field for anything that cannot be honoured."""
    known = set(kind.__struct_fields__)
    for name in data.keys() - known:
        _check_other(name, data[name], known, unknown)
    if issubclass(kind, GenerationBody):
        _check_stream_options(data, unknown)
        _check_messages(data, unknown)
    given = {name: value for name, value in data.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), data) from None


def _check_other(name: str, value: object, known: set[str], unknown: UnknownFields) -> None:
    """Refuse or accept a field that the body's type does not have."""
    if name in WITHOUT_EFFECT or value is None:
        return
    if name in REFUSED:
        rule = REFUSED[name]
        if not any(type(value) is type(neutral) and value == neutral for neutral in rule.neutral):
            raise ApiError(ErrorCode.unsupported_parameter,
                           f"{name}={show_value(value)}: not implemented by this server; {rule.advice}", name)
        return
    if name in OF_GENERATION:
        raise ApiError(ErrorCode.unsupported_parameter,
                       f"{name}={show_value(value)}: not a field of this endpoint; leave it out", name)
    _tell_unknown(name, "", known, unknown)


def _check_stream_options(data: dict[str, Any], unknown: UnknownFields) -> None:
    """Refuse the options of a stream that is not asked for; look for options that do not exist."""
    options = data.get("stream_options")
    if not options or not isinstance(options, dict):
        return
    if not data.get("stream"):
        raise ApiError(ErrorCode.invalid_value, f"stream_options={show_value(options)}: only a stream has options; "
                       "set stream=true or leave it out", "stream_options")
    known = set(StreamOptions.__struct_fields__)
    for name in options.keys() - known - STREAM_OPTIONS_WITHOUT_EFFECT:
        _tell_unknown(name, "stream_options.", known, unknown)


def _check_messages(data: dict[str, Any], unknown: UnknownFields) -> None:
    """Look for fields of a turn that do not exist; what is not a list of turns is refused with the types."""
    messages = data.get("messages")
    known = set(Message.__struct_fields__)
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        given = {name for name, value in message.items() if value is not None} if isinstance(message, dict) else set()
        for name in given - known - MESSAGE_FIELDS_WITHOUT_EFFECT:
            _tell_unknown(name, f"messages[{index}].", known, unknown)


def _tell_unknown(name: str, place: str, known: set[str], unknown: UnknownFields) -> None:
    """Warn of a field that does not exist, or refuse it; `place` is what it was found in."""
    message = f"{place}{ascii(name)[1:-1][:80]}: no such field"
    close = difflib.get_close_matches(name[:80], known, n=1)
    if close:
        message += f"; did you mean {close[0]}?"
    if unknown is UnknownFields.refuse:
        raise ApiError(ErrorCode.unknown_parameter, message, place + name[:80])
    log.warning("request field without effect: %s", message)


def _explained(message: str, data: dict[str, Any]) -> ApiError:
    """A validation error of msgspec as a line with the field, its value and what it must be."""
    reason, _, path = message.partition(" - at ")
    path = path.strip("`").removeprefix("$").removeprefix(".")
    reason = reason.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    reason = reason[:1].lower() + reason[1:]
    missing = re.match(r"object missing required field (\w+)", reason)
    if missing:
        path = f"{path}.{missing[1]}".removeprefix(".")
        return ApiError(ErrorCode.invalid_value, f"{path}: this field is required", path)
    name = re.split(r"[.\[]", path)[0]
    shown = f"={show_value(data[name])}" if name in data and path == name else ""
    return ApiError(ErrorCode.invalid_value, f"{path or 'body'}{shown}: {reason}", path or None)


def show_value(value: object) -> str:
    """A value as JSON, cut to a length that fits a line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
