"""What the first rank does about the others, without processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from engine.helpers import build, make_config
from servekit.config.schema import Device
from servekit.engine import build as engine_build
from servekit.runner.device import DeviceFacts
from servekit.runner.group import OneRank, ProcessGroup, RankLost
from servekit.runner.queue import AtOnce
from servekit.runner.workers import _close, _Losses, _watch, _WatchedQueue


def test_a_result_counts_only_if_every_rank_has_lived_until_it_was_there() -> None:
    """On a GPU a step that another rank left ends like any other, with numbers that mean nothing."""
    losses = _Losses()
    queue = _WatchedQueue(AtOnce(), losses.check)
    assert queue.submit(lambda: 7)() == 7
    wait: Callable[[], int] = queue.submit(lambda: 7)
    losses.add("rank 1 was killed by signal 9")
    with pytest.raises(RankLost, match=r"^rank 1 was killed by signal 9$"):
        wait()


class Waiting(OneRank):
    """Waits for a rank until it is aborted."""

    def __init__(self) -> None:
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


@pytest.mark.parametrize("is_expected", [False, True])
def test_those_that_wait_for_a_rank_that_has_ended_are_freed(is_expected: bool) -> None:
    """With gloo they notice by themselves, with NCCL they would not. Nobody waits for one that was let go."""
    losses, group = _Losses(), Waiting()
    losses.is_expected = is_expected
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"]) as process:
        _watch(1, process, losses, cast(ProcessGroup, group))
    assert group.aborts == (0 if is_expected else 1)
    if is_expected:
        losses.check()
    else:
        assert losses.explain() == "rank 1 ended with status 5; the engine ends with it"


def test_ranks_that_are_let_go_end_and_are_not_missed() -> None:
    losses, group = _Losses(), Waiting()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        _close([process], losses)
        _watch(1, process, losses, cast(ProcessGroup, group))
    losses.check()
    assert group.aborts == 0 and process.returncode == 0


class Fuller(OneRank):
    """Another rank's device has a gigabyte less of everything."""

    def smallest(self, number: int) -> int:
        return number - 10**9


def test_all_ranks_plan_with_what_the_fullest_device_has() -> None:
    device = DeviceFacts(Device.cuda, "a GPU", 8, total_bytes=80 * 10**9, free_bytes=70 * 10**9,
                         host_free_bytes=60 * 10**9)
    assert engine_build._agreed(device, OneRank()) == device
    assert engine_build._agreed(device, Fuller()) == replace(device, total_bytes=79 * 10**9, free_bytes=69 * 10**9,
                                                host_free_bytes=59 * 10**9)


def test_all_ranks_plan_with_the_largest_step_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(make_config())
    model = replace(built.model, group=Fuller(), device=replace(built.model.device, kind=Device.cuda))
    monkeypatch.setattr(engine_build, "measure_activation_bytes", lambda *_: 5)
    assert engine_build._profile(make_config(), model) == 5 + 10**9
    assert engine_build._profile(make_config(), built.model) is None, "on a processor nothing is measured"
