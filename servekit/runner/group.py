"""The ranks of a model that is divided among several processes, and what they tell each other while they compute."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from servekit.config.errors import require

_FIRST = 0
_LOOPBACK = "127.0.0.1"


class RankLost(Exception):
    """The ranks cannot go on together: one has ended or has failed. The engine ends with it."""


class Group(Protocol):
    """One rank's view of all of them. Every rank makes the same calls in the same order, or all wait for ever.

    Calls raise RankLost where another rank has ended. On a GPU they are part of the device's work: they return before
    they are done.
    """

    @property
    def rank(self) -> int:
        """0 for the first, which has the scheduler and samples."""

    @property
    def size(self) -> int:
        """Ranks in all."""

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values, in the place of this one's."""

    def from_first(self, values: Tensor) -> Tensor:
        """The first rank's values, in the place of this one's."""

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for the device."""

    def abort(self) -> None:
        """Let calls that wait for other ranks fail. From any thread."""


class OneRank:
    """A model that is not divided."""

    rank = _FIRST
    size = 1

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def from_first(self, values: Tensor) -> Tensor:
        return values

    def smallest(self, number: int) -> int:
        return number

    def abort(self) -> None:
        """Nobody waits."""


ONE_RANK = OneRank()


class ProcessGroup:
    """Ranks in processes of their own: NCCL between GPUs, gloo between CPUs.

    The group belongs to this object: torch's default group, of which a process has one at most, is left to others.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting_file: Path, timeout_s: float,
                 explain: Callable[[], str | None] = lambda: None) -> None:
        """Meet the other ranks.

        Args:
            rank: This one.
            size: Ranks in all.
            device: Where the tensors of all calls lie.
            meeting_file: Where the ranks of one machine find each other; the same path for all, and no file before.
            timeout_s: Longest wait for another rank, in seconds.
            explain: Says why the others are lost, if it can.

        Raises RankLost where one does not come.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._explain = explain
        try:
            self._backend = _backend(rank, size, device, meeting_file, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RankLost(f"rank {rank} has not met the others: {_one_line(error)}") from error

    def add_up(self, values: Tensor) -> Tensor:
        return self._reduced(values, distributed.ReduceOp.SUM)

    def from_first(self, values: Tensor) -> Tensor:
        try:
            self._backend.broadcast(values, _FIRST).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def smallest(self, number: int) -> int:
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        return int(self._reduced(numbers, distributed.ReduceOp.MIN))

    def abort(self) -> None:
        self._backend.abort()

    def _reduced(self, values: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
        try:
            self._backend.allreduce(values, operation).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(self._explain() or f"rank {self.rank} has lost the others: {_one_line(error)}")


def require_backend(device: torch.device, size: int) -> None:
    """Raise ConfigError where torch cannot connect ranks on such devices."""
    name, has = ("NCCL", distributed.is_nccl_available) if device.type == "cuda" else (
        "gloo", distributed.is_gloo_available)
    require(distributed.is_available() and has(), "engine.tensor_parallel", size,
            f"this build of torch has no {name}, which connects processes", "set engine.tensor_parallel=1, or install "
            "another build of torch")


def _backend(rank: int, size: int, device: torch.device, meeting_file: Path, timeout: timedelta) -> Any:
    torch_groups: Any = distributed  # Their types say little.
    store = torch_groups.FileStore(str(meeting_file), size)
    if device.type == "cuda":
        return torch_groups.ProcessGroupNCCL(store, rank, size, timeout)
    options = torch_groups.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [torch_groups.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return torch_groups.ProcessGroupGloo(store, rank, size, options)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
