"""A request's events as text: pieces that are certain, and stop strings wherever they fall between tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servekit.core.request import FinishReason, RequestEvent, TokenLogprobs
from servekit.model.detokenizer import IncrementalDetokenizer
from servekit.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What became certain about a request's output. The last one has a `finish`."""

    text: str = ""
    """New text. Only the last delta may have none: then there is nothing to send but its `finish`."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose text has now been given as a whole. All deltas together have every output token, those of a
    stop string, which has no text, included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token in `token_ids`, if asked for."""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the client's stop token that ended the output; None for an end-of-sequence token."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.text and self.finish is None


class TextStream:
    """Turns the events of one request into deltas; joined, they are the text of the whole output.

    Text that may be the beginning of a stop string is held until that is decided. When a stop string completes, the
    delta says so (FinishReason.stop) and the rest of the output is dropped: the caller then aborts the request, whose
    remaining events give empty deltas.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), include_stop: bool = False,
                 skip_special_tokens: bool = True, min_tokens: int = 0) -> None:
        """Fix how one request's text is made.

        Args:
            tokenizer: The model's.
            stop: Strings that end the output, none of them empty.
            include_stop: Whether the stop string, or the text of the stop token, is part of the text.
            skip_special_tokens: Whether special tokens have no text.
            min_tokens: The first so many tokens complete no stop string.
        """
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._includes_stop = include_stop
        self._stops = _StopStrings(stop, include_stop)
        self._min_tokens = min_tokens
        self._uncovered: deque[_Token] = deque()
        self._num_chars = 0
        """Characters decoded."""
        self._num_released = 0
        """Characters given to the client."""
        self._finish: FinishReason | None = None
        self.num_output_tokens = 0
        """Tokens up to the end of the output, for usage; what came after a stop string does not count."""

    @property
    def is_finished(self) -> bool:
        """Whether the last delta has been returned."""
        return self._finish is not None

    def push(self, event: RequestEvent) -> TextDelta:
        """What `event` makes certain; empty once the output has ended."""
        if self.is_finished:
            return TextDelta()
        pieces = []
        for index, token_id in enumerate(event.token_ids):
            logprobs = event.logprobs[index] if event.logprobs else None
            is_stop_token = event.stop_token_id is not None and index == len(event.token_ids) - 1
            match = self._take(token_id, logprobs, has_text=self._includes_stop or not is_stop_token)
            pieces.append(match.released)
            if match.stop is not None:
                return self._last("".join(pieces), FinishReason.stop, match.stop)
        if event.finish is None:
            return self._next("".join(pieces))
        match = self._decoded(self._detokenizer.flush())
        pieces.append(match.released)
        if match.stop is not None:
            return self._last("".join(pieces), FinishReason.stop, match.stop)
        pieces.append(self._stops.flush())
        return self._last("".join(pieces), event.finish, self._reason(event.stop_token_id))

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, has_text: bool) -> _Match:
        """Decode one more token."""
        self.num_output_tokens += 1
        match = self._decoded(self._detokenizer.push(token_id) if has_text else "")
        unfinished = 1 if self._detokenizer.is_inside_character else 0
        self._uncovered.append(_Token(token_id, logprobs, self._num_chars + unfinished))
        return match

    def _decoded(self, text: str) -> _Match:
        self._num_chars += len(text)
        return self._stops.push(text, may_stop=self.num_output_tokens > self._min_tokens)

    def _reason(self, stop_token_id: int | None) -> int | None:
        return None if stop_token_id in self._eos_token_ids else stop_token_id

    def _next(self, text: str) -> TextDelta:
        if not text:
            return TextDelta()
        self._num_released += len(text)
        covered = []
        while self._uncovered and self._uncovered[0].end_char <= self._num_released:
            covered.append(self._uncovered.popleft())
        return _delta(text, covered)

    def _last(self, text: str, finish: FinishReason, stop_reason: str | int | None) -> TextDelta:
        self._finish = finish
        return _delta(text, [*self._uncovered], finish, stop_reason)


class _Token(NamedTuple):
    """A token whose text has not been given as a whole."""

    token_id: int
    logprobs: TokenLogprobs | None
    end_char: int
    """Where its text ends, in characters of the output."""


def _delta(text: str, tokens: list[_Token], finish: FinishReason | None = None,
           stop_reason: str | int | None = None) -> TextDelta:
    return TextDelta(text, tuple(token.token_id for token in tokens),
                     tuple(token.logprobs for token in tokens if token.logprobs is not None), finish, stop_reason)


class _Match(NamedTuple):
    """What a piece of text came to."""

    released: str
    """Text that is certain to be part of the output."""
    stop: str | None = None
    """The stop string that it completed."""


class _StopStrings:
    """Finds the first stop string to be completed in a text that comes in pieces.

    Where two are completed by the same character, the longer one counts. The result depends on the text alone, not
    on how it is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], is_included: bool) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._is_included = is_included
        self._open = ""
        """The end of the text so far that may be the beginning of a stop string."""

    def push(self, piece: str, may_stop: bool) -> _Match:
        """Add `piece`; unless `may_stop`, it completes no stop string."""
        if not self._stops:
            return _Match(piece)
        text, num_open = self._open + piece, len(self._open)
        stop, end = self._first_completed(text, num_open) if may_stop else (None, -1)
        if stop is not None:
            return _Match(text[num_open:end] if self._is_included else text[:end - len(stop)], stop)
        closed = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._open = text[closed:]
        return _Match(piece if self._is_included else text[:closed])

    def flush(self) -> str:
        """The text that was held, now that nothing follows it."""
        return "" if self._is_included else self._open

    def _first_completed(self, text: str, start: int) -> tuple[str | None, int]:
        """The stop string that ends first after position `start` of `text`, and where it ends."""
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops
                 if (at := text.find(stop, max(0, start - len(stop) + 1))) >= 0]
        if not found:
            return None, -1
        end, _, stop = min(found)
        return stop, end


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
