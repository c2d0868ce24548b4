"""Triton's interpreter, which runs kernels on a CPU, with the arithmetic that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch


def import_interpreted() -> None:
    """Import Triton, if it is installed, and the kernels so that they are interpreted.

    That is decided while they are imported, and transformers imports Triton too: so this comes before any test module.
    """
    if find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton

        import servekit.kernels.triton  # noqa: F401

        # It looks again later; in the environment, the setting would reach the servers that tests start.
        patch.setattr(triton.knobs, "propagate_env", False)
        triton.knobs.runtime.interpret = True
    _repair()


def _repair() -> None:
    """Let torch convert between floats and compute in bfloat16.

    The interpreter itself cuts off bits where a GPU rounds to nearest, and multiplies the bit patterns of bfloat16 as
    if they were integers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
             tl.float64: torch.float64, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    builder = interpreter.InterpreterBuilder

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        numbers = torch.from_numpy(np.array(data).reshape(-1)).view(kinds[source])
        bits = torch.from_numpy(np.empty(0, getattr(np, f"uint{target.primitive_bitwidth}"))).dtype
        return numbers.to(kinds[target]).view(bits).numpy().reshape(data.shape)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        wide = convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def computing(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *operands: Any) -> Any:
            result = original(self, *map(widened, operands))
            if operands[0].dtype.scalar is not tl.bfloat16 or result.dtype.scalar is not tl.float32:
                return result
            return interpreter.TensorHandle(convert(result.data, tl.float32, tl.bfloat16, None), tl.bfloat16)
        return compute

    original_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original_dot(self, widened(a), widened(b), *others)

    def to_float(self: Any, integers: Any, kind: Any) -> Any:
        numbers = interpreter.TensorHandle(integers.data.astype(np.float32), tl.float32)
        return self.create_fp_to_fp(numbers, kind, None)

    interpreter._convert_float = convert
    builder.create_si_to_fp = builder.create_ui_to_fp = to_float
    builder.create_dot = dot
    for operation in ("fadd", "fsub", "fmul", "fdiv"):
        setattr(builder, f"create_{operation}", computing(getattr(builder, f"create_{operation}")))
