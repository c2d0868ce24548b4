"""How kernels are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

_OPTIONS = {"enable_fp_fusion": True}
"""Products and sums become one instruction; what Triton does by default depends on its version."""


def launch(kernel: Any, grid: Grid, *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Run a kernel with the one configuration that it has."""
    kernel[grid](*arguments, num_warps=num_warps, **constants, **_OPTIONS)


class Tuned:
    """A kernel whose fastest configuration Triton finds once for each key, and keeps in its cache on disk."""

    def __init__(self, kernel: Any, configs: Sequence[triton.Config], key: Sequence[str]) -> None:
        """Prepare `kernel`; `key` names the arguments whose values and number formats decide what is fast."""
        self.configs = tuple(configs)
        self._kernel = kernel
        self._timed = triton.autotune(configs=list(configs), key=list(key), cache_results=True)(kernel)

    def launch(self, grid: Grid, first: Tensor, *others: Any, **constants: Any) -> None:
        """Run on the GPU that holds the first argument.

        On a CPU, where Triton interprets the kernel, nothing can be timed: the first configuration serves there, as
        does a single one everywhere.
        """
        if first.is_cuda and len(self.configs) > 1:
            self._timed[grid](first, *others, **constants, **_OPTIONS)
        else:
            self._kernel[grid](first, *others, **constants, **self.configs[0].all_kwargs(), **_OPTIONS)
