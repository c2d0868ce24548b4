"""How an engine executes its steps: one beside the next or not, as CUDA graphs or not."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.errors import require
from servekit.config.schema import Config, Device, KernelSet
from servekit.runner.device import DeviceFacts


@dataclass(frozen=True)
class Execution:
    """What the settings come to on a device."""

    overlap: bool
    """Whether a step is planned while the one before it runs."""
    graph_sizes: tuple[int, ...]
    """Batch sizes that decodes are captured for, ascending; empty: none."""
    notes: tuple[str, ...]
    """`key: requested -> resolved`, one line each."""


def resolve_execution(config: Config, device: DeviceFacts, kernels: KernelSet) -> Execution:
    """Settle what was left open. Raises ConfigError for graphs where there can be none."""
    engine, is_gpu = config.engine, device.kind is Device.cuda
    can_capture = is_gpu and kernels is KernelSet.triton
    wants_graphs = engine.cuda_graphs or engine.graph_batch_sizes is not None
    key, value = ("engine.cuda_graphs", True) if engine.cuda_graphs else (
        "engine.graph_batch_sizes", list(engine.graph_batch_sizes or ()))
    require(can_capture or not wants_graphs, key, value,
            f"CUDA graphs hold the Triton operations on a GPU, and this is {kernels.value} on {device.kind.value}",
            f"set {key}=null, or engine.device=cuda and engine.kernels=triton")
    notes = [] if engine.overlap is not None or not is_gpu else ["engine.overlap: null -> true"]
    sizes: tuple[int, ...] = ()
    if can_capture and engine.cuda_graphs is not False:
        sizes = engine.graph_batch_sizes or default_graph_sizes(config.scheduler.max_num_seqs)
        notes += [f"engine.cuda_graphs: null -> {', '.join(map(str, sizes))}"] if engine.cuda_graphs is None else []
    return Execution(is_gpu if engine.overlap is None else engine.overlap, sizes, tuple(notes))


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and `max_num_seqs` itself: a decode step is filled up to less than twice its size."""
    doublings = [1 << exponent for exponent in range((max_num_seqs - 1).bit_length())]
    return (*doublings, max_num_seqs)
