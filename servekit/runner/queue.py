"""Where the runner's work waits its turn: each piece is done after all that were given before it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class WorkQueue(Protocol):
    """Does work in the order in which it is given."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Take work; calling the answer waits until it is done, and gives its result."""


class AtOnce:
    """The caller does the work itself, before it goes on."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result


class WorkerThread:
    """A thread does the work while the caller goes on, on a CPU: torch releases the interpreter while it computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compute")

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self._thread.submit(work).result


class CudaStream:
    """The work tells a GPU what to do; the GPU does it while the caller goes on."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def wait() -> T:
            event.synchronize()
            return result

        return wait


def work_queue(device: torch.device, overlap: bool) -> WorkQueue:
    """The queue for a device; on a CPU there is a thread for it only if steps are to overlap."""
    if device.type == "cuda":
        return CudaStream()
    return WorkerThread() if overlap else AtOnce()


def to_host(values: Tensor) -> Tensor:
    """The values in host memory; from a GPU they are there when the work that asks for them is done."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device; a GPU fetches them in its own time."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """The values in memory that the device can fetch them from without the host's help."""
    return values.pin_memory() if device.type == "cuda" else values
