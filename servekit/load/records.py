"""What is kept of each request: raw times and counts, from which every figure is computed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from servekit.load.metrics import Timeline, spread_tokens
from servekit.load.target import Failure, FailureKind, Observation
from servekit.load.workload import WorkloadRequest

GOOD_FINISH_REASONS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))
"""Those of the OpenAI API. Others, such as `abort`, say that the server gave up."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it went. Times in seconds since the start of the run."""

    index: int
    tenant: str
    is_warmup: bool
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    intended_s: float
    """When it was due; in a closed loop, when it was sent."""
    sent_s: float
    ended_s: float
    chunk_times_s: array[float]
    """When each piece of the answer that brought tokens was received."""
    chunk_tokens: array[int]
    """How many tokens each brought."""
    prompt_tokens: int | None
    """As the server counts; None if it does not say. So are the next two."""
    output_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    failure: Failure | None
    priority: int | None = None
    """Its class; None if none was sent."""
    predicted_output_tokens: int | None = None
    """What was sent as such."""

    @property
    def lag_s(self) -> float:
        """How late the load generator sent it."""
        return self.sent_s - self.intended_s

    @property
    def num_output_tokens(self) -> int:
        """Output tokens received, those of a failed request included."""
        return sum(self.chunk_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as the server counts them, or as many as were sent if it does not say."""
        return self.wanted_prompt_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def timeline(self) -> Timeline:
        """Its timeline from the intended send time. Only a request that did not fail has one."""
        if self.failure is not None:
            raise ValueError(f"request {self.index} failed ({self.failure.kind.value}) and has no timeline")
        return Timeline(self.intended_s, spread_tokens(self.chunk_times_s, self.chunk_tokens), self.ended_s)


class ObservationLog:
    """Collects the observations of one request while it runs."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._totals = array("q")
        """Output tokens after each chunk, as far as the server counts them in every chunk."""
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._finish_reason: str | None = None

    @property
    def missing(self) -> Failure | None:
        """What an answer that has ended lacks, if it lacks anything."""
        if self._finish_reason is None:
            return Failure(FailureKind.incomplete, "the answer ended without a finish reason")
        if self._finish_reason not in GOOD_FINISH_REASONS:
            return Failure(FailureKind.incomplete, f"the answer ended with the finish reason {self._finish_reason}")
        if not self._times_s:
            return Failure(FailureKind.incomplete, "the answer ended without a single token")
        return None

    def note(self, seen: Observation) -> None:
        """Take in one observation."""
        if self._brings_tokens(seen):
            self._times_s.append(seen.at_s)
            if seen.output_tokens is not None:
                self._totals.append(seen.output_tokens)
        if seen.output_tokens is not None:
            self._output_tokens = seen.output_tokens
        if seen.prompt_tokens is not None:
            self._prompt_tokens = seen.prompt_tokens
        if seen.cached_tokens is not None:
            self._cached_tokens = seen.cached_tokens
        if seen.finish_reason is not None:
            self._finish_reason = seen.finish_reason

    def _brings_tokens(self, seen: Observation) -> bool:
        """With a count in every chunk, the count decides: a token without text is a token, and text that was only
        held back is none. Without, each chunk of text is at least one, and a last total must not pass for a chunk.
        """
        if seen.output_tokens is not None and self._is_counted:
            return seen.output_tokens > (self._totals[-1] if self._totals else 0)
        return seen.has_text

    @property
    def _is_counted(self) -> bool:
        return len(self._totals) == len(self._times_s)

    def _chunk_tokens(self) -> array[int]:
        chunks = len(self._times_s)
        total = chunks if self._output_tokens is None else self._output_tokens
        totals = self._totals if self._is_counted else [max(1, total * (i + 1) // chunks) for i in range(chunks)]
        return array("q", (after - before for before, after in zip([0, *totals], totals, strict=False)))

    def record(self, request: WorkloadRequest, start_s: float, intended_s: float, sent_s: float, ended_s: float,
               is_warmup: bool, failure: Failure | None) -> RequestRecord:
        """The finished record; all times given on the clock of the observations, `start_s` being the run's start."""
        return RequestRecord(
            index=request.index, tenant=request.tenant, is_warmup=is_warmup,
            wanted_prompt_tokens=len(request.prompt_token_ids), wanted_output_tokens=request.output_tokens,
            intended_s=intended_s - start_s, sent_s=sent_s - start_s, ended_s=ended_s - start_s,
            chunk_times_s=array("d", (at_s - start_s for at_s in self._times_s)), chunk_tokens=self._chunk_tokens(),
            prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens, cached_tokens=self._cached_tokens,
            finish_reason=self._finish_reason, failure=failure, priority=request.priority,
            predicted_output_tokens=request.predicted_output_tokens)
