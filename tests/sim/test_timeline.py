"""What the timeline says a run did, and the two forms in which it is written."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import NoPrefixCacheConfig
from servekit.config.schema import SchedulerConfig
from servekit.core.build import build_scheduler
from servekit.core.plan import Plan, PlanItem, Preempted, PreemptionKind
from servekit.core.request import Request, RequestId, RequestSpec, SamplingParams
from servekit.load.driver import Limits
from servekit.load.records import RequestRecord
from servekit.load.workload import WorkloadRequest
from servekit.sim.simulation import Simulation
from servekit.sim.step_time import StepShape
from servekit.sim.timeline import Activity, Span, Timeline, write_page, write_perfetto


class TenMilliseconds:
    """Every step takes as long."""

    def step_s(self, shape: StepShape) -> float:
        return 0.01


def observed(requests: Iterable[WorkloadRequest], *, until_s: float = 60.0, num_blocks: int = 64,
             max_num_seqs: int = 4, max_step_tokens: int = 32) -> tuple[Timeline, list[RequestRecord]]:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens,
                             prefix_cache=NoPrefixCacheConfig(), prefill=ChunkedPrefillConfig(chunk_tokens=None))
    scheduler = build_scheduler(config, num_blocks, 4, 200)
    timeline = Timeline(until_s)

    def watch(plan: Plan, start_s: float, end_s: float) -> None:
        timeline.step(plan, start_s, end_s, scheduler.kv.pool.num_used)

    return timeline, list(Simulation(requests, scheduler, TenMilliseconds(), Limits(), watch).run())


def request(index: int, prompt: int, output: int, arrival_s: float = 0.0) -> WorkloadRequest:
    return WorkloadRequest(index, range(prompt), output, arrival_s)


def spans_of(timeline: Timeline, name: str) -> list[tuple[Activity, float, float]]:
    return [(span.activity, round(span.start_s, 6), round(span.end_s, 6))
            for span in dict(timeline.requests())[name]]  # type: ignore[index]


def test_the_spans_of_two_requests() -> None:
    """50 prompt tokens are two steps of 32 and 18; the second request waits for a slot until the first has ended."""
    timeline, _ = observed([request(0, 50, 4), request(1, 10, 2, arrival_s=0.005)], max_num_seqs=1)
    assert spans_of(timeline, "0") == [(Activity.prompt, 0.0, 0.02), (Activity.decode, 0.02, 0.05)]
    assert spans_of(timeline, "1") == [(Activity.waiting, 0.005, 0.05), (Activity.prompt, 0.05, 0.06),
                                       (Activity.decode, 0.06, 0.07)]


def test_the_numbers_of_the_steps() -> None:
    timeline, _ = observed([request(0, 8, 3), request(1, 40, 2)])
    assert [(step.num_decodes, step.num_prompt_tokens) for step in timeline.steps] == [(0, 32), (1, 16), (2, 0)]
    assert [step.start_s for step in timeline.steps] == pytest.approx([0.0, 0.01, 0.02])


def test_what_bound_the_steps() -> None:
    timeline, _ = observed([request(0, 40, 3), request(1, 40, 4), request(2, 40, 1)], max_num_seqs=2)
    bounds = [step.bound for step in timeline.steps]
    assert bounds[:4] == ["token_budget", "token_budget", "sequences", "sequences"]
    assert bounds[-1] == "nothing_waiting"


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """33 prompt tokens are steps of 32 and 1."""
    timeline, _ = observed([request(0, 33, 2)])
    assert [(step.num_decodes, step.num_prompt_tokens) for step in timeline.steps] == [(0, 32), (0, 1), (1, 0)]
    assert spans_of(timeline, "0") == [(Activity.prompt, 0.0, 0.02), (Activity.decode, 0.02, 0.03)]


def test_a_preempted_request_waits_again() -> None:
    """Two requests of 40 tokens and more in 20 blocks of 4: one has to give way and is computed again."""
    timeline, _ = observed([request(0, 24, 30), request(1, 24, 30)], num_blocks=20, max_step_tokens=64)
    assert sum(step.num_preempted for step in timeline.steps) >= 1
    activities = [span.activity for _, spans in timeline.requests() for span in spans]
    assert activities.count(Activity.waiting) == 1
    victim = next(spans for _, spans in timeline.requests() if any(s.activity is Activity.waiting for s in spans))
    assert [span.activity for span in victim] == [Activity.prompt, Activity.decode, Activity.waiting, Activity.prompt,
                                                  Activity.decode]


def test_what_is_left_out_of_a_step_is_idle_while_it_runs_and_waits_after_a_preemption() -> None:
    spec = RequestSpec(RequestId("a"), tuple(range(8)), SamplingParams(max_tokens=9), arrived_s=0.0)
    mine = Request(spec, max_model_len=64)
    whole, again = PlanItem(mine, 0, 8, samples=True), PlanItem(mine, 0, 9, samples=True)
    plans = [Plan((whole,), 8), Plan((), 0, preempted=(Preempted(mine, PreemptionKind.recompute),)), Plan((again,), 9),
             Plan((), 0), Plan((PlanItem(mine, 9, 1, samples=True),), 1)]
    timeline = Timeline(60.0)
    for number, plan in enumerate(plans):
        timeline.step(plan, number, number + 1, 0)
    assert spans_of(timeline, "a") == [(Activity.prompt, 0, 1), (Activity.waiting, 1, 2), (Activity.prompt, 2, 3),
                                       (Activity.idle, 3, 4), (Activity.decode, 4, 5)]


def random_requests() -> Sequence[WorkloadRequest]:
    return [request(i, 5 + 7 * i % 60, 1 + 11 * i % 40, arrival_s=0.013 * i) for i in range(30)]


def test_spans_cover_a_request_from_arrival_to_end_without_gaps() -> None:
    timeline, records = observed(random_requests(), num_blocks=40)
    assert any(step.num_preempted for step in timeline.steps)
    tracks = dict(timeline.requests())
    assert len(tracks) == len(records) == 30
    for record in records:
        spans = tracks[str(record.index)]  # type: ignore[index]
        assert spans[0].start_s == pytest.approx(record.intended_s) and spans[-1].end_s == record.ended_s
        assert all(before.end_s == after.start_s for before, after in itertools.pairwise(spans))
        assert all(before.activity is not after.activity for before, after in itertools.pairwise(spans))


def test_only_the_beginning_is_kept() -> None:
    whole, records = observed(random_requests())
    beginning, same_records = observed(random_requests(), until_s=0.1)
    assert records == same_records
    assert beginning.steps == [step for step in whole.steps if step.start_s <= 0.1]


# --- files ------------------------------------------------------------------------------------------------------------

def perfetto_events(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    write_perfetto(timeline, path)
    document = json.loads(path.read_text())
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_perfetto_events_say_what_the_spans_say(tmp_path: Path) -> None:
    timeline, _ = observed(random_requests(), num_blocks=40)
    events = perfetto_events(timeline, tmp_path / "trace.json")
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert event.keys() >= {"ph", "pid", "tid", "name"}
        if event["ph"] != "M":
            assert event["ts"] >= 0
    names = {event["tid"]: event["args"]["name"] for event in events
             if event["name"] == "thread_name" and event["pid"] == 2}
    drawn: dict[str, list[Span]] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 2:
            span = Span(Activity(event["name"]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            drawn.setdefault(names[event["tid"]].removeprefix("request "), []).append(span)
    assert drawn.keys() == dict(timeline.requests()).keys()
    for name, spans in timeline.requests():
        for ours, theirs in zip(spans, drawn[name], strict=True):
            assert theirs.activity is ours.activity
            assert (theirs.start_s, theirs.end_s) == pytest.approx((ours.start_s, ours.end_s), abs=1e-8)


def test_perfetto_has_each_step_once_and_its_counters(tmp_path: Path) -> None:
    timeline, _ = observed(random_requests())
    events = perfetto_events(timeline, tmp_path / "trace.json")
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert len(steps) == len(timeline.steps)
    assert all(before["ts"] + before["dur"] <= after["ts"] + 0.002
               for before, after in itertools.pairwise(steps))
    blocks = [event["args"]["blocks"] for event in events if event["name"] == "KV blocks used"]
    assert blocks == [step.kv_blocks_used for step in timeline.steps]
    assert max(blocks) > 0


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_carries_its_data_and_needs_nothing_else(tmp_path: Path) -> None:
    timeline, _ = observed(random_requests())
    write_page(timeline, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = data_of(page)
    assert len(data["steps"]) == len(timeline.steps)
    assert [name for name, _ in data["requests"]] == [name for name, _ in timeline.requests()]
    assert not re.search(r"https?://|src=|@import", page)


def test_a_request_id_cannot_end_the_data(tmp_path: Path) -> None:
    timeline, _ = observed([request(0, 5, 2)])
    track = timeline._tracks.pop("0")  # type: ignore[call-overload]
    timeline._tracks["</script><script>alert(1)</script>"] = track  # type: ignore[index]
    write_page(timeline, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2
    assert data_of(page)["requests"][0][0] == "</script><script>alert(1)</script>"
