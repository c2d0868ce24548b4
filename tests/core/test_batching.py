"""Static and dynamic batching: when a batch starts, who is in it, and that nobody joins it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import Harness, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import ClassLimitsConfig, OnDemandAdmissionConfig, TimeoutAction
from servekit.config.batching import BatchingConfig, DynamicBatchingConfig, StaticBatchingConfig
from servekit.config.errors import ConfigError
from servekit.core.batching.dynamic import DynamicBatching
from servekit.core.batching.static import StaticBatching
from servekit.core.plan import Bound, Plan
from servekit.core.policy.base import PolicyDefaults
from servekit.core.request import Request, RequestSpec
from servekit.core.scheduler import Scheduler


def names(plan: Plan) -> list[str]:
    return [item.request.request_id for item in plan.items]


def scheduler(batching: BatchingConfig, *, max_num_seqs: int = 4, num_blocks: int = 400,
              admission: OnDemandAdmissionConfig | None = None) -> Scheduler:
    """Nothing but batching holds a request back, as long as there are enough blocks."""
    return make_scheduler(
        batching=batching, max_num_seqs=max_num_seqs, num_blocks=num_blocks, max_model_len=256, max_step_tokens=512,
        chunk_tokens=None, prefix_cache=False,
        admission=admission or OnDemandAdmissionConfig(max_queue_requests=None, queue_timeout_s=None,
                                                       request_timeout_s=None))


class Line(PolicyDefaults):
    """Waiting requests in a given order, each with the kind of batch that it may be in."""

    def __init__(self, kinds: str, arrived_s: Sequence[float] | None = None) -> None:
        times_s = [0.0] * len(kinds) if arrived_s is None else arrived_s
        specs = [make_spec(f"{kind}{i}", 4, arrived_s=at_s, tenant=kind)
                 for i, (kind, at_s) in enumerate(zip(kinds, times_s, strict=True))]
        self.requests = [Request(spec, 64) for spec in specs]

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    def push(self, request: Request, now: float) -> None:
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)

    def in_order(self, now: float) -> Iterator[Request]:
        return iter(self.requests)

    def batch_of(self, request: Request) -> str:
        return request.tenant

    def check(self) -> None:
        pass


# Static.

def test_seven_of_eight_slots_are_idle_while_the_longest_request_runs() -> None:
    h = Harness(scheduler(StaticBatchingConfig(), max_num_seqs=8))
    h.add(*(make_spec(f"short{i}", 4, max_tokens=50) for i in range(7)), make_spec("long", 4, max_tokens=200))
    h.add(make_spec("next", 4))
    plans = [h.step() for _ in range(201)]
    assert all(len(plan.items) == 8 for plan in plans[:50])
    assert all(names(plan) == ["long"] and plan.bound is Bound.batching for plan in plans[50:200])
    assert 1 - len(plans[50].items) / 8 == 0.875
    assert names(plans[200]) == ["next"]


def test_a_static_batch_waits_to_be_full_but_not_for_ever() -> None:
    h = Harness(scheduler(StaticBatchingConfig(max_batch_delay_ms=2500)))
    h.add(make_spec("a", 4), make_spec("b", 4))
    waiting = [h.step() for _ in range(3)]
    assert [(names(plan), plan.bound, plan.wake_s) for plan in waiting] == [([], Bound.batching, 2.5)] * 3
    assert names(h.step()) == ["a", "b"]
    h.drain()
    h.add(*(make_spec(name, 4, arrived_s=h.now) for name in "cdefg"))
    plan = h.step()
    assert names(plan) == ["c", "d", "e", "f"] and plan.bound is Bound.sequences, "a full one need not wait"


@pytest.mark.parametrize("early_return", [True, False])
def test_answers_come_early_or_with_the_batch(early_return: bool) -> None:
    h = Harness(scheduler(StaticBatchingConfig(early_return=early_return), max_num_seqs=2))
    short, long = make_spec("short", 4, max_tokens=2), make_spec("long", 4, max_tokens=6)
    h.add(short, long)
    for _ in range(5):
        h.step()
    assert (h.finish("short") is not None) == early_return
    assert len(h.tokens("long")) == (5 if early_return else 0)
    h.drain()
    assert {event.at_s for event in h.heard["short"]} == ({1.0, 2.0} if early_return else {6.0})
    for spec in (short, long):
        assert h.tokens(spec.request_id) == expected_tokens(spec, 256)


def test_a_request_that_leaves_the_queue_does_not_end_the_batch() -> None:
    h = Harness(scheduler(StaticBatchingConfig(), max_num_seqs=2))
    h.add(*(make_spec(name, 4, max_tokens=6) for name in "abcd"))
    h.step()
    h.abort("c")
    h.abort("a")
    assert names(h.step()) == ["b"]
    h.abort("b")
    assert names(h.step()) == ["d"], "the batch has ended, and d has waited long enough"


# Dynamic.

@pytest.mark.parametrize(("kinds", "preferred", "delay_s", "now", "expected"), [
    ("aaa", (4,), 0, 0, 3),  # No delay: what is there goes.
    ("aaaaaa", (4,), 0, 0, 4),  # A preferred size comes before a larger batch.
    ("aaaaaa", (2, 4), 0, 0, 4),  # The largest preferred one that is there.
    ("aaa", (2, 4), 0, 0, 2),
    ("aaa", (4,), 5, 2, 0),
    ("aaa", (4,), 5, 5, 3),  # Overdue: all of them.
    ("aaaaaa", (4,), 5, 4, 4),
    ("aaaaaa", (4,), 5, 5, 6),  # Overdue: all of them, be four preferred.
    ("aaaaaaaaa", (4,), 5, 4, 4),
    ("aaaaaaaaa", (4,), 5, 5, 8),  # Never more than a batch holds.
    ("aaaaaaa", (), 5, 4, 0),  # Nothing preferred: a full batch is.
    ("aaaaaaaa", (), 5, 0, 8),
    ("aaba", (4,), 5, 0, 2),  # The third needs a batch of its own, so nobody else can join.
    ("aaab", (2,), 5, 0, 2),
    ("abbb", (2,), 5, 0, 1),
    ("", (4,), 5, 9, 0),
])
def test_tritons_rules(kinds: str, preferred: tuple[int, ...], delay_s: float, now: float, expected: int) -> None:
    line = Line(kinds)
    openings = DynamicBatching(8, 1, preferred, delay_s).openings(line, [], now)
    assert openings.slots == expected
    assert [request for request in line.requests if openings.admit(request)][:expected] == line.requests[:expected]
    assert openings.wake_s == (delay_s if kinds and expected == 0 else None)


def tritons_batch(kinds: str, arrived_s: Sequence[float], batch_size: int, preferred: tuple[int, ...], delay_s: float,
                  now: float) -> int:
    """The size of the next batch by Triton's loop over its queue, step by step; 0: it waits."""
    size, best, send_now = 0, 0, False
    for kind in kinds:
        if size and size + 1 > max(preferred) and best == 0:
            best = size
        if size and (size + 1 > batch_size or kind != kinds[0]):
            send_now = True
            break
        size += 1
        if size in preferred:
            best = size
    exceeded = delay_s > 0 and size > 0 and now >= min(arrived_s[:size]) + delay_s
    if best and not exceeded:
        return best
    return size if send_now or size >= max(preferred) or exceeded or delay_s == 0 else 0


@given(st.data())
def test_batches_are_those_of_tritons_loop(data: st.DataObject) -> None:
    kinds = data.draw(st.text("ab", max_size=12))
    arrived_s = data.draw(st.lists(st.integers(0, 6), min_size=len(kinds), max_size=len(kinds)))
    batch_size = data.draw(st.integers(1, 8))
    preferred = tuple(data.draw(st.lists(st.integers(1, batch_size), max_size=3)))
    delay_s, now = data.draw(st.sampled_from([0, 1, 3])), data.draw(st.integers(6, 10))
    slots = DynamicBatching(batch_size, 1, preferred, delay_s).openings(Line(kinds, arrived_s), [], now).slots
    assert slots == tritons_batch(kinds, arrived_s, batch_size, preferred or (batch_size,), delay_s, now)


def test_the_wait_ends_early_when_a_preferred_size_is_reached() -> None:
    h = Harness(scheduler(DynamicBatchingConfig(preferred_batch_sizes=(3,), max_batch_delay_ms=10_000)))
    h.add(make_spec("a", 4), make_spec("b", 4))
    plan = h.step()
    assert names(plan) == [] and plan.wake_s == 10.0 and plan.bound is Bound.batching
    h.add(make_spec("c", 4, arrived_s=h.now))
    assert names(h.step()) == ["a", "b", "c"]


def test_several_batches_are_in_flight_and_each_keeps_its_empty_slots() -> None:
    h = Harness(scheduler(DynamicBatchingConfig(batches_in_flight=2)))
    h.add(make_spec("a", 4, max_tokens=2), make_spec("b", 4, max_tokens=5), make_spec("c", 4, max_tokens=9),
          make_spec("d", 4, max_tokens=9), make_spec("e", 4, max_tokens=2), make_spec("f", 4, max_tokens=2))
    steps = [names(h.step()) for _ in range(6)]
    assert steps == [["a", "b"], ["a", "b", "c", "d"], ["b", "c", "d"], ["b", "c", "d"], ["b", "c", "d"],
                     ["c", "d", "e", "f"]]


def test_requests_share_batches_with_their_own_kind_only() -> None:
    line = Line("aabba")
    running: list[Request] = []
    batching = DynamicBatching(2, 3, (), 0)
    for expected in (["a0", "a1"], ["b2", "b3"], ["a4"]):
        openings = batching.openings(line, running, 0.0)
        batch = [request for request in line.requests if openings.admit(request)]
        assert [request.request_id for request in batch] == expected and openings.slots == len(expected)
        batching.started(batch)
        running += batch
        for request in batch:
            line.remove(request)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nobody_joins_a_batch(data: st.DataObject) -> None:
    """Under memory pressure, too: who is preempted comes back to its batch before anybody new starts."""
    batching = data.draw(st.sampled_from([
        StaticBatchingConfig(max_batch_delay_ms=2000, early_return=True),
        DynamicBatchingConfig(preferred_batch_sizes=(2,), max_batch_delay_ms=3000),
        DynamicBatchingConfig(batches_in_flight=2, max_batch_delay_ms=1000)]))
    h = Harness(scheduler(batching, num_blocks=data.draw(st.sampled_from([64, 400]))))
    batch_size = 4 // getattr(batching, "batches_in_flight", 1)
    batches: dict[float, set[str]] = {}
    specs: list[RequestSpec] = []
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 3))):
            specs.append(make_spec(f"r{len(specs)}", data.draw(st.integers(1, 60)),
                                   max_tokens=data.draw(st.integers(1, 90)), arrived_s=h.now))
            h.add(specs[-1])
        h.step()
    h.drain()
    for plan in h.plans:
        for item in plan.items:
            assert item.request.scheduled_s is not None
            batches.setdefault(item.request.scheduled_s, set()).add(item.request.request_id)
    ends = {spec.request_id: h.heard[spec.request_id][-1].at_s for spec in specs}
    for start_s, members in batches.items():
        assert len(members) <= batch_size
        in_flight = [other for other in batches if other < start_s and max(ends[name] for name in batches[other])
                     > start_s]
        assert len(in_flight) < 4 // batch_size, "a batch started before there was a place for it"
    for spec in specs:
        assert h.tokens(spec.request_id) == expected_tokens(spec, 256)


def test_the_preempted_come_back_before_the_next_batch() -> None:
    h = Harness(scheduler(StaticBatchingConfig(early_return=True), max_num_seqs=3, num_blocks=64))
    h.add(*(make_spec(name, 60, max_tokens=60) for name in "abc"), make_spec("next", 4))
    h.drain()
    assert h.scheduler.stats.preemptions > 0, "memory was not short"
    started_s = next(item.request.scheduled_s for plan in h.plans for item in plan.items
                     if item.request.request_id == "next")
    assert started_s == max(h.heard[name][-1].at_s for name in "abc")


@pytest.mark.parametrize(("batching", "free", "running"), [
    (StaticBatching(4, 1.0, True), 4, 0), (DynamicBatching(2, 2, (), 0.0), 4, 0)])
def test_free_slots_count_what_could_start(batching: DynamicBatching, free: int, running: int) -> None:
    assert batching.free_slots(running) == free
    batch = Line("aa").requests
    batching.started(batch)
    assert batching.free_slots(2) == free - (4 if isinstance(batching, StaticBatching) else 2)
    assert batching.free_slots(1) == batching.free_slots(2) + 1, "a preempted one has its place"
    batching.started(batch[:1])
    assert batching.free_slots(2) == free - (4 if isinstance(batching, StaticBatching) else 2), "no new batch"


# Triton's queue policies, which are limits of the scheduler's admission.

def queue_policies(**of_class_1: object) -> OnDemandAdmissionConfig:
    return OnDemandAdmissionConfig(max_queue_requests=None, queue_timeout_s=None, request_timeout_s=None,
                                   classes={1: ClassLimitsConfig(**of_class_1)})  # type: ignore[arg-type]


def test_a_class_has_a_queue_of_its_own_size() -> None:
    h = Harness(scheduler(DynamicBatchingConfig(), max_num_seqs=1, admission=queue_policies(max_queue_requests=2)))
    h.add(make_spec("running", 4))
    h.step()
    for name in ("b", "c", "d"):
        h.add(make_spec(name, 4, priority=1))
    h.add(*(make_spec(f"other{i}", 4) for i in range(5)))
    assert [h.finish(name) for name in ("b", "c", "d", "other4")] == [None, None, "queue_full", None]
    assert "classes.1.max_queue_requests=2" in h.heard["d"][0].message
    h.drain()


def test_a_class_rejects_what_waits_too_long() -> None:
    limits = queue_policies(queue_timeout_s=3.0)
    h = Harness(scheduler(DynamicBatchingConfig(), max_num_seqs=1, admission=limits))
    h.add(make_spec("running", 4, max_tokens=6))
    h.step()
    h.add(make_spec("hasty", 4, priority=1, arrived_s=1.0), make_spec("patient", 4, arrived_s=1.0))
    h.drain()
    assert h.finish("hasty") == "queue_timeout" and h.heard["hasty"][-1].at_s == pytest.approx(5.0)
    assert h.finish("patient") == "length"


def test_a_class_delays_what_waits_too_long_behind_those_in_time() -> None:
    limits = queue_policies(queue_timeout_s=3.0, on_timeout=TimeoutAction.delay)
    h = Harness(scheduler(DynamicBatchingConfig(), max_num_seqs=2, admission=limits))
    h.add(make_spec("running", 4, max_tokens=6))
    h.step()
    h.add(make_spec("late", 4, priority=1, max_tokens=1, arrived_s=1.0))
    for name in "xyz":
        h.add(make_spec(name, 4, max_tokens=1, arrived_s=1.0))
    h.drain()
    starts = [names(plan) for plan in h.plans if plan.items and plan.items[0].start == 0]
    assert starts == [["running"], ["x", "y"], ["z", "late"]]
    assert h.finish("late") == "length"


def test_a_timeout_wakes_a_batch_that_waits_longer() -> None:
    limits = queue_policies(queue_timeout_s=2.0)
    h = Harness(scheduler(DynamicBatchingConfig(max_batch_delay_ms=9000), admission=limits))
    h.add(make_spec("a", 4, priority=1))
    assert h.step().wake_s == 2.0
    h.now = 2.0
    h.step()
    assert h.finish("a") == "queue_timeout"


# Refused settings.

def test_batches_share_the_slots_evenly_or_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batches_in_flight=3: must divide scheduler.max_num_seqs=4.*"
                                          r"set scheduler.max_num_seqs=6"):
        scheduler(DynamicBatchingConfig(batches_in_flight=3))
    with pytest.raises(ConfigError, match=r"preferred_batch_sizes=\[1, 3\]: must not exceed 2"):
        scheduler(DynamicBatchingConfig(batches_in_flight=2, preferred_batch_sizes=(1, 3)))


@pytest.mark.parametrize("make", [
    lambda: DynamicBatchingConfig(batches_in_flight=0), lambda: DynamicBatchingConfig(preferred_batch_sizes=(0,)),
    lambda: DynamicBatchingConfig(max_batch_delay_ms=-1), lambda: StaticBatchingConfig(max_batch_delay_ms=-1)])
def test_values_without_a_meaning_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.batching"):
        make()  # type: ignore[operator]
