"""Records made by hand."""

from __future__ import annotations

from array import array
from typing import Any

from servekit.load.records import RequestRecord
from servekit.load.target import Failure, FailureKind


def record(index: int, intended_s: float, tokens_s: list[float], **fields: Any) -> RequestRecord:
    """A request of 10 prompt tokens that ended with its last token."""
    return RequestRecord(**{
        "index": index, "tenant": "", "is_warmup": False, "wanted_prompt_tokens": 10,
        "wanted_output_tokens": len(tokens_s), "intended_s": intended_s, "sent_s": intended_s,
        "ended_s": tokens_s[-1] if tokens_s else intended_s, "chunk_times_s": array("d", tokens_s),
        "chunk_tokens": array("q", [1] * len(tokens_s)), "prompt_tokens": 10, "output_tokens": len(tokens_s),
        "cached_tokens": None, "finish_reason": "length", "failure": None, **fields})


def failed(index: int, intended_s: float, ended_s: float, kind: FailureKind = FailureKind.status) -> RequestRecord:
    return record(index, intended_s, [], ended_s=ended_s, wanted_output_tokens=5, failure=Failure(kind, "no", 503))
