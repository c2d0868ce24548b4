"""The one place where an implementation of the operations is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from servekit.kernels import add_rms_norm, attention, copy_blocks, linear, rms_norm, rope_and_cache, silu_and_mul
from servekit.kernels.attention import AttentionBatch


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the `reference` of its file documents arguments and results."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    rope_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float, int | None], Tensor]
    copy_blocks: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def load_kernels(name: str) -> Kernels:
    """Build the kernels called `name`; called once, when the engine starts.

    Raises ValueError for a name that is not in `KERNEL_SETS`.
    """
    if name not in KERNEL_SETS:
        raise ValueError(f"no kernels are called {name!r}; there are: {', '.join(KERNEL_SETS)}")
    return KERNEL_SETS[name]()


def _reference() -> Kernels:
    return Kernels(
        name="reference",
        rms_norm=rms_norm.reference,
        add_rms_norm=add_rms_norm.reference,
        linear=linear.reference,
        silu_and_mul=silu_and_mul.reference,
        rope_and_cache=rope_and_cache.reference,
        paged_attention=attention.reference,
        copy_blocks=copy_blocks.reference,
    )


KERNEL_SETS: Mapping[str, Callable[[], Kernels]] = MappingProxyType({"reference": _reference})
"""Every implementation by the name that `engine.kernels` gives it. A further one is one more entry, whose builder
starts from `_reference()` and replaces (`dataclasses.replace`) the operations it has."""
