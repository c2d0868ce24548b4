"""What the scheduler counts for classes and tenants."""

from __future__ import annotations

import dataclasses

from core.helpers import Harness, make_scheduler, make_spec
from servekit.core.stats import MAX_GROUPS, OTHERS, Service, ServiceByGroup


def test_only_so_many_groups_are_told_apart() -> None:
    groups = ServiceByGroup()
    for number in range(2 * MAX_GROUPS):
        groups[f"tenant-{number}"].num_started += 1
    groups["tenant-0"].num_started += 1
    assert len(groups) == MAX_GROUPS + 1
    assert groups["tenant-0"].num_started == 2
    assert groups[OTHERS].num_started == MAX_GROUPS
    assert f"tenant-{MAX_GROUPS}" not in groups


def test_waiting_and_tokens_by_class_and_tenant() -> None:
    harness = Harness(make_scheduler(max_num_seqs=1, prefix_cache=False))
    harness.add(dataclasses.replace(make_spec("a", 10, 3), tenant="alice"),
                dataclasses.replace(make_spec("b", 4, 2), tenant="bob", priority=1))
    harness.drain()
    stats = harness.scheduler.stats
    # "a" computes its prompt in two chunks and then decodes: four steps of a second that "b" waits for.
    assert stats.tenants == {"alice": Service(1, 0.0, 10, 3), "bob": Service(1, 4.0, 4, 2)}
    assert stats.classes == {0: Service(1, 0.0, 10, 3), 1: Service(1, 4.0, 4, 2)}


def test_what_is_computed_again_is_not_counted_again() -> None:
    harness = Harness(make_scheduler(num_blocks=10, prefix_cache=False, max_num_seqs=4))
    for name in "abcd":
        harness.add(dataclasses.replace(make_spec(name, 6, 12), tenant=name))
    harness.drain()
    stats = harness.scheduler.stats
    assert stats.recomputed_tokens > 0, "nobody was preempted"
    assert {name: (s.num_started, s.prompt_tokens, s.generation_tokens) for name, s in stats.tenants.items()} == (
        dict.fromkeys("abcd", (1, 6, 12)))
