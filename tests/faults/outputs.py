"""What was generated, whole or in a stream, and what it must be equal to: the same request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from faults.serving import COMPLETIONS, Json, Reply, Served

VOCAB = 512
"""Of the tiny model; every id below is a token."""


@dataclass(frozen=True)
class Output:
    """One choice of a completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str | None

    def __eq__(self, other: object) -> bool:
        """Tokens, text and ending are exactly equal; log-probabilities to the rounding of float64."""
        assert isinstance(other, Output)
        return ((self.token_ids, self.text, self.finish) == (other.token_ids, other.text, other.finish)
                and self.logprobs == pytest.approx(other.logprobs, abs=1e-9))

    __hash__ = None  # type: ignore[assignment]


def greedy(prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> Json:
    """A request with one right answer; the penalty keeps a random model from repeating one token."""
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "repetition_penalty": 50, "ignore_eos": True, "return_token_ids": True, "logprobs": 0, **fields}


def random_ids(seed: int, count: int) -> list[int]:
    """A prompt of `count` tokens."""
    return random.Random(seed).choices(range(VOCAB), k=count)


def outputs(reply: Reply) -> list[Output]:
    """The choices of a whole answer."""
    assert reply.status == 200, reply.text
    return [_output([choice]) for choice in reply.json["choices"]]


def output(reply: Reply) -> Output:
    """The only choice of a whole answer."""
    (only,) = outputs(reply)
    return only


def streamed(events: Sequence[Json], index: int = 0) -> Output:
    """One choice of a stream."""
    return _output([choice for event in events for choice in event["choices"] if choice["index"] == index])


def _output(pieces: list[Json]) -> Output:
    assert all(piece["finish_reason"] is None for piece in pieces[:-1]), "an ending in the middle"
    scored = [piece["logprobs"] for piece in pieces if piece.get("logprobs")]
    return Output(tuple(token for piece in pieces for token in piece["token_ids"]),
                  tuple(logprob for lists in scored for logprob in lists["token_logprobs"]),
                  "".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"])


class Reference:
    """Answers of a server that computes whole prompts of one request at a time and shares nothing."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._known: dict[str, Output] = {}

    def one(self, body: Json) -> Output:
        return self.many([body])[0]

    def many(self, bodies: Sequence[Json]) -> list[Output]:
        """The right answer to each request."""
        new = {key: body for body in bodies if (key := json.dumps(body, sort_keys=True)) not in self._known}
        replies = self._server.together(list(new.values()), COMPLETIONS)
        self._known.update(zip(new, map(output, replies), strict=True))
        return [self._known[json.dumps(body, sort_keys=True)] for body in bodies]
