"""Predicted lengths of answers, for policies that order by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from servekit.core.request import Request, RequestId

_WINDOW = 64
"""Answers that a learned mean remembers, roughly."""


class Predictor(Protocol):
    """Foretells how many tokens a request's answer will have."""

    def output_tokens(self, request: Request) -> float:
        """Expected length of the whole answer, in tokens."""

    def learn(self, request: Request) -> None:
        """The request has ended."""


class MaxTokensPredictor:
    """The most that the request allows and the model's length leaves room for."""

    def output_tokens(self, request: Request) -> float:
        return request.max_total_tokens - request.num_prompt

    def learn(self, request: Request) -> None:
        pass


class OraclePredictor:
    """What the request itself says (`predicted_output_tokens`); the most that it allows, if it says nothing."""

    def output_tokens(self, request: Request) -> float:
        predicted, limit = request.spec.predicted_output_tokens, request.max_total_tokens - request.num_prompt
        return limit if predicted is None else min(predicted, limit)

    def learn(self, request: Request) -> None:
        pass


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, observed: float) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.value += (observed - self.value) / self.count


class LearnedPredictor:
    """The mean of the latest answers to prompts of about the same length, within a factor of two.

    The most that the request allows, while there were no such answers. Deterministic: equal histories give equal
    predictions.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        """By the number of binary digits of the prompt's length."""

    def output_tokens(self, request: Request) -> float:
        limit = request.max_total_tokens - request.num_prompt
        mean = self._means.get(request.num_prompt.bit_length())
        return limit if mean is None else min(mean.value, limit)

    def learn(self, request: Request) -> None:
        if request.num_output:
            self._means.setdefault(request.num_prompt.bit_length(), _Mean()).add(request.num_output)


class Predictions:
    """The prediction for each request that is here, made once: what is learned later changes no place in the queue."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._output_tokens: dict[RequestId, float] = {}

    def output_tokens(self, request: Request) -> float:
        """Expected length of the whole answer, in tokens."""
        predicted = self._output_tokens.get(request.request_id)
        if predicted is None:
            predicted = self._output_tokens[request.request_id] = self._predictor.output_tokens(request)
        return predicted

    def finished(self, request: Request) -> None:
        """Forget the request, and learn from it."""
        self._output_tokens.pop(request.request_id, None)
        self._predictor.learn(request)
