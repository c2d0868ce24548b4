"""servekit.LLM: a model in this process, for scripts and notebooks.

    from servekit import LLM
    llm = LLM("smollm2-135m")
    print(llm.generate(["The capital of France is"], max_tokens=8)[0].text)
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError, require
from servekit.core.request import (
    FinishReason,
    RequestEvent,
    RequestId,
    RequestSpec,
    SamplingParams,
    TokenLogprobs,
)
from servekit.engine.build import OnProgress, build_engine
from servekit.engine.text import TextStream
from servekit.model.chat_template import load_chat_template
from servekit.model.source import default_cache_dir, fetch
from servekit.model.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model made of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One entry per token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    """One entry per prompt token, None for the first, if asked for."""
    finish_reason: FinishReason
    message: str
    """Why it ended, when `finish_reason` is neither stop nor length."""
    num_cached_tokens: int
    """Prompt tokens served from the prefix cache."""


class LLM:
    """An engine without a server. Not for several threads at once."""

    def __init__(self, model: str, overrides: Sequence[str] = (), on_progress: OnProgress | None = None) -> None:
        """Compose, fetch and load.

        Args:
            model: A model of conf/model (`smollm2-135m`), or a source: a folder, a .gguf file, `hf:org/name`, ...
            overrides: Settings as on the command line: `["scheduler.max_num_seqs=64", "+preset=batch"]`.
            on_progress: Told (stage, done, total, unit) while the model is fetched and loaded.

        Raises ConfigError for a setting that cannot be honoured, ModelFileError for the model's files.
        """
        report = on_progress or _silent
        is_source = any(mark in model for mark in "/.:")
        chosen = f'model.source="{model}"' if is_source else f"model={model}"
        self._config = compose_serve([chosen, *overrides], environ=os.environ).config
        cache_dir = default_cache_dir(os.environ)
        local = fetch(self._config.model, cache_dir,
                      lambda _, done, total: report("download", done, total or 0, "B"))
        self._tokenizer = load_tokenizer(local, self._config.model.tokenizer)
        self._template = load_chat_template(local, self._config.model.chat_template)
        built = build_engine(self._config, local, cache_dir, report)
        self._engine = built.engine
        self.facts = built.facts
        self._ids = itertools.count()

    def generate(self, prompts: Prompt | Sequence[Prompt], *, max_tokens: int = 16, stop: Sequence[str] = (),
                 ignore_eos: bool = False, **sampling: Any) -> list[Completion]:
        """Complete prompts, batched together, in the order given.

        Args:
            prompts: Texts or token ids, one or many.
            max_tokens: Most output tokens of each.
            stop: Strings that end an output; they are not part of it.
            ignore_eos: Go on past the model's end-of-sequence tokens.
            **sampling: Further fields of SamplingParams: `temperature=0`, `seed=7`, `logprobs=3`, ...

        Raises ValueError for a prompt or a value that cannot be honoured and TypeError for an unknown parameter;
        nothing is computed then.
        """
        jobs = [self._job(prompt, max_tokens, stop, ignore_eos, sampling) for prompt in _as_list(prompts)]
        job_of = {job.spec.request_id: job for job in jobs}
        waiting = list(jobs)
        while waiting or self._engine.has_work:
            waiting = self._feed(waiting)
            time.sleep(self._engine.idle_s() or 0.0)  # A batch may wait for its time.
            for event in self._engine.step().events:
                job = job_of[event.request_id]
                job.hear(event)
                if job.stream.is_finished and event.finish is None:
                    self._engine.abort([event.request_id])
        return [job.completion() for job in jobs]

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Answer a conversation; `options` are those of `generate`."""
        if self._template is None:
            raise ValueError("this model has no chat template; set model.chat_template to a Jinja file")
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        text = self._template.render(messages, add_generation_prompt=True, bos_token=bos.text if bos else "",
                                     eos_token=eos.text if eos else "")
        return self.generate([self._tokenizer.encode(text, add_special_tokens=False)], **options)[0]

    def _feed(self, waiting: list[_Job]) -> list[_Job]:
        """Hand over as many requests as the queue takes, so that its limit refuses none; returns the others."""
        limit = self._config.scheduler.admission.max_queue_requests
        room = len(waiting) if limit is None else limit - self._engine.stats().num_waiting
        for job in waiting[:room]:
            self._engine.add([job.arriving_now()])
        return waiting[max(0, room):]

    def _job(self, prompt: Prompt, max_tokens: int, stop: Sequence[str], ignore_eos: bool,
             sampling: Mapping[str, Any]) -> _Job:
        ids = self._tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        self._check(ids, max_tokens)
        eos = () if ignore_eos else self._tokenizer.eos_token_ids
        own = sampling.get("stop_token_ids", ())
        params = SamplingParams(**{**sampling, "max_tokens": max_tokens, "stop_token_ids": (*eos, *own)})
        spec = RequestSpec(RequestId(f"llm-{next(self._ids)}"), tuple(ids), params, 0.0)
        return _Job(spec, TextStream(self._tokenizer, stop=stop, min_tokens=params.min_tokens))

    def _check(self, ids: Sequence[int], max_tokens: int) -> None:
        require(max_tokens >= 1, "max_tokens", max_tokens, "must be at least 1", "leave it out for 16")
        require(len(ids) > 0, "prompt", "", "has no tokens", "give at least one")
        require(len(ids) < self.facts.max_model_len, "prompt", f"{len(ids)} tokens",
                f"must be shorter than the model's length, {self.facts.max_model_len}", "shorten it")
        wrong = next((token for token in ids if not 0 <= token < self.facts.vocab_size), None)
        if wrong is not None:
            raise ConfigError("prompt", wrong, f"token ids lie between 0 and {self.facts.vocab_size - 1}",
                              "encode the text with this model's tokenizer")


class _Job:
    """One prompt on its way."""

    def __init__(self, spec: RequestSpec, stream: TextStream) -> None:
        self.spec = spec
        self.stream = stream
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish = FinishReason.error
        self._message = ""
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def arriving_now(self) -> RequestSpec:
        spec = self.spec
        return RequestSpec(spec.request_id, spec.prompt_token_ids, spec.sampling, time.monotonic())

    def hear(self, event: RequestEvent) -> None:
        if event.num_cached_tokens is not None:
            self._num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if self.stream.is_finished:
            return
        delta = self.stream.push(event)
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        if delta.finish is not None:
            self._finish, self._message = delta.finish, event.message

    def completion(self) -> Completion:
        return Completion(self.spec.prompt_token_ids, "".join(self._text), tuple(self._token_ids),
                          tuple(self._logprobs), self._prompt_logprobs, self._finish, self._message,
                          self._num_cached_tokens)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _silent(stage: str, done: int, total: int, unit: str) -> None:
    """Nobody watches."""
