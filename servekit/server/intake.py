"""From a validated body to what the engine is asked: token ids, sampling parameters, one spec a choice."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from servekit.config.requests import honours_predictions, honours_priority, queue_timeout_s
from servekit.config.schema import Config, GenerationDefaults
from servekit.core.request import RequestId, RequestSpec, SamplingParams
from servekit.model.chat_template import ChatTemplate, ChatTemplateError
from servekit.model.tokenizer import Tokenizer
from servekit.server.errors import ApiError, ErrorCode
from servekit.server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TokenizeBody,
    TokenizeChatBody,
    show_value,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat may use what is left of the context."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles of a conversation, as chat templates know them."""
TEMPLATE_VARIABLES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
"""What a chat template gets from the server, not from chat_template_kwargs."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class ModelFacts:
    """What the model says about requests: its tokenizer, its template and its limits."""

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation_defaults: Mapping[str, float | int | bool]
    """Sampling defaults of the model's own generation_config.json."""


@dataclass(frozen=True)
class Prompt:
    """One prompt in tokens."""

    token_ids: tuple[int, ...]
    text: str
    num_truncated: int = 0
    """Tokens left out at its start, at the request of truncate_prompt_tokens."""


@dataclass(frozen=True)
class Ticket:
    """Who asks, and since when."""

    request_id: str
    """As the client knows it."""
    engine_id: str
    """As the engine knows it: unique, whatever ids clients choose."""
    arrived_s: float
    """On the monotonic clock."""
    tenant: str = ""
    """Whose request it is; empty if it does not say."""


@dataclass(frozen=True)
class Job:
    """A request of a client, ready for the engine: every prompt's `n` choices, prompt by prompt."""

    ticket: Ticket
    prompts: tuple[Prompt, ...]
    n: int
    specs: tuple[RequestSpec, ...]
    max_tokens: int
    """As asked for: zero means that only the prompt is scored, although the engine samples one token."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    echo: bool

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that choice `index` answers."""
        return self.prompts[index // self.n]


class Intake:
    """Turns bodies into jobs for one model. Raises ApiError (400) for what the model cannot do."""

    def __init__(self, config: Config, model: ModelFacts) -> None:
        self._config = config
        self._model = model

    def completion(self, body: CompletionBody, ticket: Ticket) -> Job:
        """A job for POST /v1/completions."""
        self._check(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(ErrorCode.unsupported_parameter, f"best_of={body.best_of}: only best_of equal to n is "
                           "implemented; leave it out", "best_of")
        given_prompts = self._given_prompts(body.prompt)
        self._check_choices(len(given_prompts), body)
        prompts = [self._prompt(given, body) for given in given_prompts]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise ApiError(ErrorCode.invalid_value, "max_tokens=0: asks for nothing unless echo is true; set it to 1 "
                           "or more", "max_tokens")
        logprobs = self._logprobs(body.logprobs, "logprobs")
        return self._job(body, prompts, max_tokens, logprobs, bool(body.echo), ticket)

    def chat(self, body: ChatBody, ticket: Ticket) -> Job:
        """A job for POST /v1/chat/completions."""
        self._check(body)
        self._check_choices(1, body)
        if body.max_tokens == 0:
            raise ApiError(ErrorCode.invalid_value, "max_tokens=0: must be at least 1; leave it out for what the "
                           "context has left", "max_tokens")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ApiError(ErrorCode.invalid_value, f"max_tokens={body.max_tokens}: contradicts "
                           f"max_completion_tokens={body.max_completion_tokens}; give one of them", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(ErrorCode.invalid_value, f"top_logprobs={body.top_logprobs}: needs logprobs=true",
                           "top_logprobs")
        logprobs = self._logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        text = self.render(body.messages, body.chat_template_kwargs, body.add_generation_prompt,
                           body.continue_final_message)
        prompt = self._encoded(text, bool(body.add_special_tokens), body)
        max_tokens = _first(body.max_completion_tokens, body.max_tokens, self._model.max_model_len)
        return self._job(body, [prompt], max_tokens, logprobs, False, ticket)

    def render(self, messages: Sequence[Message], kwargs: dict[str, Any] | None, add_generation_prompt: bool | None,
               continue_final_message: bool | None) -> str:
        """The text of a conversation, by the model's chat template."""
        template = self._model.chat_template
        if template is None:
            raise ApiError(ErrorCode.invalid_value, f"messages: the model {self._model.name} has no chat template; use "
                           "/v1/completions, or start the server with model.chat_template=<file>", "messages")
        if continue_final_message and add_generation_prompt:
            raise ApiError(ErrorCode.invalid_value, "continue_final_message=true: contradicts "
                           "add_generation_prompt=true; give one of them", "continue_final_message")
        reserved = TEMPLATE_VARIABLES & (kwargs or {}).keys()
        if reserved:
            raise ApiError(ErrorCode.invalid_value, f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be "
                           "set; leave it out", "chat_template_kwargs")
        add = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        turns = [_turn(index, message) for index, message in enumerate(messages)]
        tokenizer = self._model.tokenizer
        try:
            text = template.render(turns, add_generation_prompt=add, bos_token=tokenizer.bos.text if tokenizer.bos
                                   else "", eos_token=tokenizer.eos.text if tokenizer.eos else "", **(kwargs or {}))
        except ChatTemplateError as error:
            raise ApiError(ErrorCode.invalid_prompt, f"messages: the model's chat template refuses them: {error}",
                           "messages") from None
        return _left_open(text, turns[-1]["content"]) if continue_final_message else text

    def tokenize(self, body: TokenizeBody | TokenizeChatBody) -> list[int]:
        """Token ids for POST /tokenize."""
        if isinstance(body, TokenizeBody):
            return self.encode(body.prompt, body.add_special_tokens is not False)
        text = self.render(body.messages, body.chat_template_kwargs, body.add_generation_prompt,
                           body.continue_final_message)
        return self.encode(text, bool(body.add_special_tokens))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return self._model.tokenizer.encode(text, add_special_tokens)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; no name means this one."""
        if name is not None and name != self._model.name:
            raise ApiError(ErrorCode.model_not_found, f"model={show_value(name)}: this server has only "
                           f"{self._model.name}", "model")

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids that are no rows of the model's embedding."""
        if ids and not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            wrong = next(index for index in ids if not 0 <= index < self._model.vocab_size)
            raise ApiError(ErrorCode.invalid_value, f"{param}: token id {wrong} is outside the vocabulary, 0 to "
                           f"{self._model.vocab_size - 1}", param)

    def _given_prompts(self, given: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
        """The prompts of a body, each a text or token ids."""
        if isinstance(given, str):
            return [given]
        ids = [item for item in given if isinstance(item, int)]
        texts_or_lists = [item for item in given if not isinstance(item, int)]
        if not given or (ids and texts_or_lists):
            raise ApiError(ErrorCode.invalid_prompt, f"prompt={show_value(given)}: must be a text, token ids, or a "
                           "list of either that is not empty", "prompt")
        return [ids] if ids else texts_or_lists

    def _prompt(self, given: str | list[int], body: CompletionBody) -> Prompt:
        """One prompt of a completion."""
        if isinstance(given, str):
            return self._encoded(given, body.add_special_tokens is not False, body)
        self.check_token_ids(given, "prompt")
        text = self._model.tokenizer.decode(given, skip_special_tokens=False) if body.echo else ""
        return self._truncated(given, text, body)

    def _encoded(self, text: str, add_special_tokens: bool, body: GenerationBody) -> Prompt:
        """A prompt from its text; what cannot fit whatever its tokens are is refused before they are known."""
        num_tokens = self._model.tokenizer.min_tokens(text)
        if body.truncate_prompt_tokens is None and num_tokens >= self._model.max_model_len:
            raise self._too_long(f"at least {num_tokens}", body)
        return self._truncated(self.encode(text, add_special_tokens), text, body)

    def _truncated(self, ids: list[int], text: str, body: GenerationBody) -> Prompt:
        """A prompt's last truncate_prompt_tokens tokens, or all of it; refused if the context cannot hold it."""
        num_truncated = max(0, len(ids) - (body.truncate_prompt_tokens or len(ids)))
        if num_truncated:
            ids = ids[num_truncated:]
            text = self._model.tokenizer.decode(ids, skip_special_tokens=False)
        if not ids:
            raise ApiError(ErrorCode.invalid_prompt, "the prompt has no tokens; send some text", "prompt")
        if len(ids) >= self._model.max_model_len:
            raise self._too_long(str(len(ids)), body)
        return Prompt(tuple(ids), text, num_truncated)

    def _too_long(self, num_tokens: str, body: GenerationBody) -> ApiError:
        limit = self._model.max_model_len
        return ApiError(ErrorCode.context_length_exceeded, f"the model's context is {limit} tokens, prompt and output "
                        f"together, and the prompt has {num_tokens}: shorten it to at most {limit - 1}",
                        "messages" if isinstance(body, ChatBody) else "prompt")

    def _job(self, body: GenerationBody, prompts: list[Prompt], max_tokens: int, logprobs: int | None, echo: bool,
             ticket: Ticket) -> Job:
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise ApiError(ErrorCode.invalid_value, f"min_tokens={body.min_tokens}: must not exceed "
                           f"max_tokens={max_tokens}", "min_tokens")
        predicted = body.predicted_output_tokens
        if predicted is not None and predicted > max_tokens:
            raise ApiError(ErrorCode.invalid_value, f"predicted_output_tokens={predicted}: must not exceed "
                           f"max_tokens={max_tokens}", "predicted_output_tokens")
        n = body.n or 1
        params = self._sampling(body, logprobs, logprobs if echo else None)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        specs = tuple(
            RequestSpec(
                request_id=RequestId(f"{ticket.engine_id}-{number * n + choice}"),
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(
                    max_tokens=max(1, min(max_tokens, self._model.max_model_len - len(prompt.token_ids))),
                    seed=seed_of_choice(seed, choice), **params),
                arrived_s=ticket.arrived_s, tenant=ticket.tenant, priority=body.priority or 0,
                cache_salt=body.cache_salt or "", queue_timeout_s=body.queue_timeout_s,
                predicted_output_tokens=body.predicted_output_tokens)
            for number, prompt in enumerate(prompts) for choice in range(n))
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        return Job(ticket, tuple(prompts), n, specs, max_tokens, tuple(stop),
                   bool(body.include_stop_str_in_output), body.skip_special_tokens is not False,
                   bool(body.return_token_ids), echo)

    def _check(self, body: GenerationBody) -> None:
        """What can be refused before anything is tokenised."""
        self.check_model(body.model)
        self._check_scheduling(body)

    def _check_scheduling(self, body: GenerationBody) -> None:
        """Refuse what the chosen components would not honour."""
        scheduler, priority = self._config.scheduler, body.priority or 0
        if priority and not honours_priority(scheduler, priority):
            classes = ", ".join(map(str, sorted(scheduler.admission.classes)))
            raise ApiError(ErrorCode.unsupported_parameter, f"priority={priority}: scheduler.policy.kind="
                           f"{scheduler.policy.kind.value} ignores priorities; send 0 or leave it out"
                           + (f", or send a class of scheduler.admission.classes: {classes}" if classes else ""),
                           "priority")
        if body.predicted_output_tokens is not None and not honours_predictions(scheduler):
            raise ApiError(ErrorCode.unsupported_parameter, f"predicted_output_tokens={body.predicted_output_tokens}: "
                           f"neither scheduler.policy.kind={scheduler.policy.kind.value} nor scheduler.admission.kind="
                           f"{scheduler.admission.kind.value} uses it as they are set; leave it out",
                           "predicted_output_tokens")
        limit_s = queue_timeout_s(scheduler, priority)
        if body.queue_timeout_s is not None and limit_s is not None and body.queue_timeout_s > limit_s:
            raise ApiError(ErrorCode.invalid_value, f"queue_timeout_s={body.queue_timeout_s:g}: must not exceed the "
                           f"server's limit for requests of class {priority}, {limit_s:g} s", "queue_timeout_s")

    def _check_choices(self, num_prompts: int, body: GenerationBody) -> None:
        """Refuse more choices than the server ever takes at once; trying again could not help."""
        n = body.n or 1
        num_choices = num_prompts * n
        asked, param = (f"n={n}", "n") if n > 1 else (f"prompt: {num_prompts} prompts", "prompt")
        if n > 1 and num_prompts > 1:
            asked += f" for each of {num_prompts} prompts"
        limit = self._config.server.max_choices
        if num_choices > limit:
            raise ApiError(ErrorCode.invalid_value, f"{asked}: {num_choices} choices are more than "
                           f"server.max_choices={limit}; ask for them in several requests", param)
        num_running, num_waiting = (self._config.scheduler.max_num_seqs,
                                    self._config.scheduler.admission.max_queue_requests)
        if num_waiting is not None and num_choices > num_running + num_waiting:
            raise ApiError(ErrorCode.invalid_value, f"{asked}: {num_choices} choices are more than can run and wait "
                           f"(scheduler.max_num_seqs={num_running} and scheduler.admission.max_queue_requests="
                           f"{num_waiting}); ask for them in several requests", param)

    def _logprobs(self, asked: int | None, param: str) -> int | None:
        limit = self._config.server.max_logprobs
        if asked is not None and asked > limit:
            raise ApiError(ErrorCode.invalid_value, f"{param}={asked}: must be at most server.max_logprobs={limit}",
                           param)
        return asked

    def _sampling(self, body: GenerationBody, logprobs: int | None, prompt_logprobs: int | None) -> dict[str, Any]:
        """The sampling parameters that every choice shares."""
        defaults = (self._model.generation_defaults
                    if self._config.model.generation_defaults is GenerationDefaults.model else {})
        top_k = _first(body.top_k, defaults.get("top_k"), 0)
        for param in ("stop_token_ids", "allowed_token_ids"):
            self.check_token_ids(getattr(body, param) or (), param)
        eos = () if body.ignore_eos else self._model.tokenizer.eos_token_ids
        return {
            "temperature": _first(body.temperature, defaults.get("temperature"), 1.0),
            "top_k": int(top_k) if top_k > 0 else None,
            "top_p": _first(body.top_p, defaults.get("top_p"), 1.0),
            "min_p": _first(body.min_p, defaults.get("min_p"), 0.0),
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "repetition_penalty": _first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
            "logit_bias": self._logit_bias(body.logit_bias or {}),
            "allowed_token_ids": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            "min_tokens": body.min_tokens or 0,
            "stop_token_ids": tuple(sorted({*eos, *(body.stop_token_ids or ())})),
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        for key in given:
            if not re.fullmatch(r"-?[0-9]{1,20}", key):
                raise ApiError(ErrorCode.invalid_value, f"logit_bias: the key {show_value(key)} is not a token id",
                               "logit_bias")
        biases = {int(key): bias for key, bias in given.items()}
        self.check_token_ids(list(biases), "logit_bias")
        return biases


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of one of `n` choices: different for each, and the same whatever else is in the request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1


def _turn(index: int, message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: a known role, and its text in one piece."""
    param = f"messages[{index}]"
    if message.role not in ROLES:
        raise ApiError(ErrorCode.invalid_value, f"{param}.role={show_value(message.role)}: must be one of "
                       f"{', '.join(ROLES)}", f"{param}.role")
    if message.tool_calls:
        raise ApiError(ErrorCode.unsupported_parameter, f"{param}.tool_calls: not implemented by this server; leave "
                       "it out", f"{param}.tool_calls")
    if message.content is None:
        raise ApiError(ErrorCode.invalid_value, f"{param}.content: must be a text or a list of text parts",
                       f"{param}.content")
    optional = {name: getattr(message, name) for name in ("name", "tool_call_id", "reasoning_content")}
    return {"role": ROLES[message.role], "content": _text(message.content, param),
            **{name: value for name, value in optional.items() if value is not None}}


def _text(content: str | list[Any], param: str) -> str:
    """The text of a message's content; parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise ApiError(ErrorCode.unsupported_parameter, f"{param}.content[{number}].type={show_value(part.type)}: "
                           "only parts of type text, with their text, are implemented", f"{param}.content")
    return "\n".join(part.text for part in content)


def _left_open(text: str, final_content: str) -> str:
    """A rendered conversation cut after its final message's content, for the model to go on from there."""
    content = final_content.strip()
    start = text.rfind(content)
    if not content or start < 0:
        raise ApiError(ErrorCode.invalid_value, "continue_final_message=true: the final message has no text that the "
                       "chat template shows", "continue_final_message")
    unstripped = final_content.lstrip()
    return text[:start] + (unstripped if text.startswith(unstripped, start) else content)


def _first(*values: Value | None) -> Value:
    """The first value that is given; the last one always is."""
    return next(value for value in values if value is not None)
