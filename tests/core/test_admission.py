"""Worst-case and predicted admission: how much memory must be free before a request starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.helpers import Harness, expected_tokens, make_scheduler, make_spec
from servekit.config.admission import (
    AdmissionConfig,
    OnDemandAdmissionConfig,
    PredictedAdmissionConfig,
    Reserve,
    WorstCaseAdmissionConfig,
)
from servekit.config.errors import ConfigError
from servekit.config.preemption import NoPreemptionConfig, PreemptionConfig
from servekit.core.admission.predicted import PredictedAdmission
from servekit.core.kv import KVManager
from servekit.core.plan import Bound, PlanItem
from servekit.core.prefix.none import NoPrefixIndex
from servekit.core.request import Request, RequestSpec
from servekit.core.scheduler import Scheduler

MAX_MODEL_LEN = 64
NO_LIMITS = {"max_queue_requests": None, "queue_timeout_s": None, "request_timeout_s": None}


def worst_case(reserve: Reserve) -> WorstCaseAdmissionConfig:
    return WorstCaseAdmissionConfig(reserve=reserve, **NO_LIMITS)  # type: ignore[arg-type]


def scheduler(admission: AdmissionConfig, *, num_blocks: int = 64, preemption: PreemptionConfig | None = None,
              prefix_cache: bool = False) -> Scheduler:
    return make_scheduler(admission=admission, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, chunk_tokens=None,
                          max_step_tokens=256, preemption=preemption, prefix_cache=prefix_cache)


def random_load(data: st.DataObject, h: Harness) -> None:
    """Requests of any length, some of which stop before their limit; all are served as if each were alone."""
    specs: list[RequestSpec] = []
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            name, prompt = f"r{len(specs)}", data.draw(st.integers(1, 40))
            limit = data.draw(st.integers(1, 60))
            free_run = expected_tokens(make_spec(name, prompt, max_tokens=limit), MAX_MODEL_LEN)
            stop = (free_run[data.draw(st.integers(0, len(free_run) - 1))],) if data.draw(st.booleans()) else ()
            specs.append(make_spec(name, prompt, max_tokens=limit, stop=stop, arrived_s=h.now,
                                   predicted=data.draw(st.sampled_from([None, 1, 7, 100]))))
            h.add(specs[-1])
        h.step()
    h.drain()
    for spec in specs:
        assert h.tokens(spec.request_id) == expected_tokens(spec, MAX_MODEL_LEN)
    assert h.scheduler.kv.pool.num_used == 0


# Worst case.

@pytest.mark.parametrize(("reserve", "max_tokens", "predicted", "num_blocks"), [
    (Reserve.max_tokens, 20, 5, 8),  # 30 tokens.
    (Reserve.max_tokens, 100, 5, 16),  # No longer than the model.
    (Reserve.max_model_len, 2, 1, 16),
    (Reserve.power_of_two, 20, 5, 5),  # 10 and 8.
    (Reserve.power_of_two, 20, 8, 5),
    (Reserve.power_of_two, 20, 9, 7),
    (Reserve.power_of_two, 20, 17, 8),  # Not 32: its own limit is 20.
    (Reserve.power_of_two, 20, 1, 3),
    (Reserve.power_of_two, 20, None, 8),
    (Reserve.oracle, 20, 5, 4),
    (Reserve.oracle, 20, 100, 8),
    (Reserve.oracle, 20, None, 8),
])
def test_what_is_reserved(reserve: Reserve, max_tokens: int, predicted: int | None, num_blocks: int) -> None:
    h = Harness(scheduler(worst_case(reserve)))
    h.add(make_spec("a", 10, max_tokens=max_tokens, predicted=predicted))
    h.step()
    assert h.scheduler.kv.pool.num_used == num_blocks


def test_the_next_request_waits_until_its_worst_case_fits() -> None:
    h = Harness(scheduler(worst_case(Reserve.max_tokens), num_blocks=16))
    h.add(make_spec("a", 10, max_tokens=22), make_spec("b", 10, max_tokens=23), make_spec("c", 1, max_tokens=1))
    plan = h.step()
    assert [item.request.request_id for item in plan.items] == ["a"] and plan.bound is Bound.kv_blocks
    for _ in range(21):
        assert len(h.step().items) == 1, "c is not let past b"
    assert [item.request.request_id for item in h.step().items] == ["b", "c"]


def test_a_cached_prefix_counts_as_reserved() -> None:
    h = Harness(scheduler(worst_case(Reserve.max_tokens), num_blocks=24, prefix_cache=True))
    prompt = list(range(33))
    h.add(make_spec("a", prompt, max_tokens=31))
    h.step()
    h.add(make_spec("b", prompt, max_tokens=31))
    h.step()
    assert h.scheduler.num_running == 2 and h.scheduler.kv.pool.num_used == 16 + 8


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([Reserve.max_tokens, Reserve.max_model_len]), st.booleans())
def test_who_is_admitted_never_gives_way(data: st.DataObject, reserve: Reserve, prefix_cache: bool) -> None:
    h = Harness(scheduler(worst_case(reserve), num_blocks=data.draw(st.integers(16, 40)),
                          preemption=NoPreemptionConfig(), prefix_cache=prefix_cache))
    random_load(data, h)
    assert h.scheduler.stats.preemptions == 0
    assert all(not plan.preempted for plan in h.plans)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([Reserve.power_of_two, Reserve.oracle]))
def test_a_wrong_prediction_costs_a_preemption_at_most(data: st.DataObject, reserve: Reserve) -> None:
    random_load(data, Harness(scheduler(worst_case(reserve), num_blocks=data.draw(st.integers(16, 40)))))


def test_the_better_the_reserve_the_more_run_at_once() -> None:
    """The ladder of the paged-attention paper: model length, max_tokens, power of two, oracle, on demand."""
    most = []
    for admission in [*map(worst_case, (Reserve.max_model_len, Reserve.max_tokens, Reserve.power_of_two,
                                        Reserve.oracle)), OnDemandAdmissionConfig()]:
        h = Harness(scheduler(admission, num_blocks=64))
        h.add(*(make_spec(f"r{i}", 8, max_tokens=40, predicted=9) for i in range(16)))
        h.step()
        most.append(h.scheduler.num_running)
    assert most == [4, 5, 8, 8, 8]


# Predicted.

class Memory:
    """A pool and a predicted admission, without a scheduler."""

    def __init__(self, num_blocks: int, **options: float) -> None:
        config = PredictedAdmissionConfig(**options)  # type: ignore[arg-type]
        self.kv = KVManager(num_blocks, 4, NoPrefixIndex())
        self.admission = PredictedAdmission(config.start_ratio, config.min_ratio, config.decay_steps,
                                            config.max_output_tokens, config.margin_tokens)
        self.running: list[Request] = []

    def start(self, name: str, prompt: int, max_tokens: int, num_output: int = 0) -> bool:
        request = Request(make_spec(name, prompt, max_tokens=max_tokens), 1000)
        request.token_ids += [0] * num_output
        copies = self.admission.try_start(request, self.kv, self.running)
        if copies is not None:
            self.running.append(request)
        return copies is not None

    def step(self, *, decodes: bool = True) -> None:
        """A step that computes a token, or the prompt, of each running request."""
        items = []
        for request in self.running:
            request.token_ids += [0] * decodes
            items.append(PlanItem(request, request.num_tokens - 1, 1, True) if decodes
                         else PlanItem(request, 0, request.num_tokens, True))
        self.admission.stepped(items)


def test_the_ratio_falls_by_the_step_of_decodes() -> None:
    memory = Memory(100, start_ratio=0.7, min_ratio=0.2, decay_steps=10)
    memory.start("a", 10, 50)
    memory.step(decodes=False)
    memory.admission.stepped([])
    assert memory.admission.ratio == 0.7
    ratios = []
    for _ in range(12):
        memory.step()
        ratios.append(memory.admission.ratio)
    assert ratios == pytest.approx([0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2])


def test_sglangs_defaults() -> None:
    memory = Memory(100)
    memory.start("a", 10, 2000)
    for _ in range(300):
        memory.step()
    assert memory.admission.ratio == pytest.approx((0.7 + 0.7 * 0.14) / 2)
    for _ in range(400):
        memory.step()
    assert memory.admission.ratio == pytest.approx(0.7 * 0.14)


def test_the_ratio_rises_when_memory_ran_out_and_falls_again_from_there() -> None:
    memory = Memory(100, start_ratio=0.7, min_ratio=0.1, decay_steps=10, margin_tokens=20)
    memory.start("a", 10, 100)
    memory.running += [Request(make_spec("b", 10, max_tokens=50), 1000)]
    for _ in range(10):
        memory.step()
    assert memory.admission.ratio == pytest.approx(0.1)
    memory.admission.preempted(memory.running)
    assert memory.admission.ratio == pytest.approx((10 + 10 + 20 * 2) / (100 + 50))
    memory.step()
    assert memory.admission.ratio == pytest.approx(0.4), "the step in which memory ran out does not count"
    memory.step()
    assert memory.admission.ratio == pytest.approx(0.34)
    memory.admission.preempted(memory.running[1:])
    assert memory.admission.ratio == pytest.approx((12 + 20) / 50)
    for request in memory.running:
        request.token_ids += [0] * 40
    memory.admission.preempted(memory.running[1:])
    assert memory.admission.ratio == 1.0, "never more than everything"


def test_the_ratio_begins_again_when_nothing_runs() -> None:
    memory = Memory(100, start_ratio=0.7, min_ratio=0.2, decay_steps=5)
    memory.start("a", 10, 50)
    for _ in range(5):
        memory.step()
    assert memory.admission.ratio == pytest.approx(0.2)
    memory.running.clear()
    memory.start("b", 10, 50)
    assert memory.admission.ratio == 0.7


@pytest.mark.parametrize(("num_blocks", "starts"), [(16, True), (15, False)])
def test_a_share_of_the_running_ones_output_must_fit(num_blocks: int, starts: bool) -> None:
    """a holds 3 blocks and b needs 3; 19 * 0.7 of a's output, 20 of b's and a block of 4 are 37.3 tokens, which is less
    than 10 blocks and more than 9."""
    memory = Memory(num_blocks, start_ratio=0.7, min_ratio=0.7)
    assert memory.start("a", 10, 20)
    memory.step()
    assert memory.start("b", 10, 20) is starts


@pytest.mark.parametrize(("num_blocks", "starts"), [(18, True), (17, False)])
def test_those_of_the_same_step_count_in_full(num_blocks: int, starts: bool) -> None:
    """20 of a's output, 20 of b's and a block are 44 tokens: more than 11 blocks must be free beside the two prompts.
    """
    memory = Memory(num_blocks, start_ratio=0.7, min_ratio=0.7)
    assert memory.start("a", 10, 20)
    assert memory.start("b", 10, 20) is starts


@pytest.mark.parametrize(("num_blocks", "starts"), [(13, True), (12, False)])
def test_a_generous_limit_counts_as_no_more_than_the_greatest_output(num_blocks: int, starts: bool) -> None:
    """10 * 0.7 of a's, 10 of b's and a block: 21 tokens, more than 5 blocks beside two prompts of 3 and 4."""
    memory = Memory(num_blocks, start_ratio=0.7, min_ratio=0.7, max_output_tokens=10)
    assert memory.start("a", 10, 900)
    memory.step()
    assert memory.start("b", 13, 900) is starts


def test_an_empty_engine_needs_no_room_beyond_the_prompt() -> None:
    assert Memory(16).start("a", 64, 900)
    assert not Memory(16).start("b", 65, 900)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(0, 1), st.floats(0, 1), st.integers(1, 20))
def test_any_ratio_serves_everybody(data: st.DataObject, ratio: float, other: float, decay_steps: int) -> None:
    config = PredictedAdmissionConfig(start_ratio=max(ratio, other), min_ratio=min(ratio, other),
                                      decay_steps=decay_steps, **NO_LIMITS)  # type: ignore[arg-type]
    random_load(data, Harness(scheduler(config, num_blocks=data.draw(st.integers(16, 40)))))


# Refused settings.

@pytest.mark.parametrize("make", [
    lambda: PredictedAdmissionConfig(start_ratio=1.1), lambda: PredictedAdmissionConfig(min_ratio=-0.1),
    lambda: PredictedAdmissionConfig(start_ratio=0.3, min_ratio=0.4), lambda: PredictedAdmissionConfig(decay_steps=0),
    lambda: PredictedAdmissionConfig(max_output_tokens=0), lambda: PredictedAdmissionConfig(margin_tokens=-1),
    lambda: WorstCaseAdmissionConfig(max_queue_requests=0)])
def test_values_without_a_meaning_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.admission"):
        make()  # type: ignore[operator]
