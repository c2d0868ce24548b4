"""What every step of a run computed and what each request did meanwhile: for Perfetto and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from servekit.core.plan import Plan
from servekit.core.request import RequestId


class Activity(Enum):
    """What a request does."""

    waiting = "waiting"
    """In the queue, new or preempted."""
    prompt = "prompt"
    """Prompt tokens are computed, or computed again."""
    decode = "decode"
    """One token a step."""
    idle = "idle"
    """Running, and not part of the step."""


class Span(NamedTuple):
    """A stretch of one request's time."""

    activity: Activity
    start_s: float
    end_s: float


class StepSpan(NamedTuple):
    """One step."""

    start_s: float
    end_s: float
    num_decodes: int
    num_prompt_tokens: int
    bound: str
    num_preempted: int
    kv_blocks_used: int


@dataclass(slots=True)
class _Track:
    """One request so far."""

    arrived_s: float | None
    spans: list[Span]

    @property
    def end_s(self) -> float | None:
        return self.spans[-1].end_s if self.spans else self.arrived_s

    def add(self, activity: Activity, start_s: float, end_s: float) -> None:
        """Go on with the last span if it is of the same kind and touches this one."""
        if self.spans and self.spans[-1].activity is activity and self.spans[-1].end_s == start_s:
            start_s = self.spans.pop().start_s
        if end_s > start_s:
            self.spans.append(Span(activity, start_s, end_s))


class Timeline:
    """Collects the steps and the requests of the first `until_s` seconds of a run."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.steps: list[StepSpan] = []
        self._tracks: dict[RequestId, _Track] = {}
        self._preempted: set[RequestId] = set()

    def step(self, plan: Plan, start_s: float, end_s: float, kv_blocks_used: int) -> None:
        """Take in one step."""
        if start_s > self.until_s:
            return
        num_decodes = sum(item.is_decode for item in plan.items)
        self.steps.append(StepSpan(start_s, end_s, num_decodes, plan.num_tokens - num_decodes, plan.bound.value,
                                   len(plan.preempted), kv_blocks_used))
        self._preempted |= {request.request_id for request, _ in plan.preempted}
        for item in plan.items:
            track = self._tracks.setdefault(item.request.request_id, _Track(item.request.arrived_s, []))
            before_s = track.end_s
            if before_s is not None and before_s < start_s:
                was_waiting = not track.spans or item.request.request_id in self._preempted
                track.add(Activity.waiting if was_waiting else Activity.idle, before_s, start_s)
            self._preempted.discard(item.request.request_id)
            track.add(Activity.decode if item.is_decode else Activity.prompt, start_s, end_s)

    def requests(self) -> Iterator[tuple[RequestId, list[Span]]]:
        """Each request that was part of a step, in order of its first one."""
        for request_id, track in self._tracks.items():
            yield request_id, track.spans


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write the trace-event JSON that ui.perfetto.dev opens: steps, counters, one track a request."""
    path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": list(_events(timeline))}))


_ENGINE, _REQUESTS = 1, 2
"""Process numbers of the two groups of tracks."""


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for pid, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for step in timeline.steps:
        yield {"ph": "X", "pid": _ENGINE, "tid": 1, "ts": _us(step.start_s), "dur": _us(step.end_s - step.start_s),
               "name": f"{step.num_decodes} decodes, {step.num_prompt_tokens} prompt tokens",
               "args": {"bound": step.bound, "preempted": step.num_preempted}}
        yield {"ph": "C", "pid": _ENGINE, "tid": 1, "ts": _us(step.start_s), "name": "tokens of the step",
               "args": {"decode": step.num_decodes, "prompt": step.num_prompt_tokens}}
        yield {"ph": "C", "pid": _ENGINE, "tid": 1, "ts": _us(step.start_s), "name": "KV blocks used",
               "args": {"blocks": step.kv_blocks_used}}
    for number, (request_id, spans) in enumerate(timeline.requests(), start=1):
        yield {"ph": "M", "name": "thread_name", "pid": _REQUESTS, "tid": number,
               "args": {"name": f"request {request_id}"}}
        for span in spans:
            yield {"ph": "X", "pid": _REQUESTS, "tid": number, "ts": _us(span.start_s),
                   "dur": _us(span.end_s - span.start_s), "name": span.activity.value}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def write_page(timeline: Timeline, path: Path) -> None:
    """Write a page that draws the timeline, with everything it needs in it."""
    requests = [[request_id, [[span.activity.value, span.start_s, span.end_s] for span in spans]]
                for request_id, spans in timeline.requests()]
    data = msgspec.json.encode({"steps": timeline.steps, "requests": requests}).decode().replace("</", "<\\/")
    template = files("servekit.sim").joinpath("timeline.html").read_text(encoding="utf-8")
    path.write_text(template.replace("@DATA@", data), encoding="utf-8")
