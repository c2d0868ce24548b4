"""Scheduler settings that contradict each other are refused with the reason and the remedy."""

from __future__ import annotations

import pytest

from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError

REFUSED = {
    ("scheduler/batching=static", "scheduler/policy=srtf"): "scheduler.batching.kind=static: runs a batch to its end",
    ("scheduler/policy=mlfq", "scheduler.preemption.victim=newest"): "scheduler.preemption.victim=newest: may stop",
    ("scheduler/policy=mlfq", "scheduler/preemption=none", "scheduler/admission=worst_case"):
        "scheduler.preemption.kind=none: lets nobody give way",
    ("scheduler/preemption=none",): "scheduler.preemption.kind=none: needs room for every request",
    ("scheduler/policy=lpm", "scheduler/prefix_cache=none"): "scheduler.policy.kind=lpm: orders by cached prefixes",
    ("scheduler/policy=sjf", "scheduler.admission.on_timeout=delay"): "scheduler.admission.on_timeout=delay: puts late",
    ("scheduler/policy=priority", "scheduler.policy.ageing_s=30", "scheduler.admission.on_timeout=delay"):
        "scheduler.policy.ageing_s=30.0: lets a request come forward",
    ("scheduler/policy=priority", "scheduler.policy.class_slots={0:2,1:2}", "scheduler.max_num_seqs=4"):
        "keeps 4 slots for single classes, all that scheduler.max_num_seqs=4 has",
    ("scheduler/policy=priority", "scheduler.policy.own_batches=true"):
        "scheduler.policy.own_batches=true: is about batches that are formed as a whole",
    ("scheduler.tenants.weights.alice=2",): "scheduler.tenants.weights={alice: 2.0}: are shares in the policies fair",
    ("scheduler/batching=dynamic", "scheduler.batching.batches_in_flight=3", "scheduler.max_num_seqs=4"):
        "scheduler.batching.batches_in_flight=3: must divide scheduler.max_num_seqs=4",
}
TOGETHER = [
    ("scheduler/policy=priority", "scheduler.policy.class_slots={0:2,1:1}", "scheduler.max_num_seqs=4"),
    ("scheduler/policy=priority", "scheduler.policy.own_batches=true", "scheduler.policy.preempt=false",
     "scheduler/batching=static"),
    ("scheduler/policy=priority", "scheduler.admission.on_timeout=delay"),
    ("scheduler/policy=vtc", "scheduler.tenants.weights.alice=2"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED.items(), ids=lambda value: "")
def test_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_serve(list(overrides))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", TOGETHER, ids=lambda value: "")
def test_what_goes_together(overrides: tuple[str, ...]) -> None:
    compose_serve(list(overrides))
