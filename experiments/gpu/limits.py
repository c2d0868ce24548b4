"""What the device can do: bytes copied and products of matrices, by torch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench import Bench, Row
from torch import Tensor


def limits(bench: Bench) -> Iterator[Row]:
    """The copy bandwidth, and the rate of square products in each format that the device multiplies."""
    source = torch.empty(bench.sizes.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds_per_call([partial(target.copy_, source)])
    yield {"name": "copy", "bytes_per_s": 2 * source.numel() / seconds}
    width = bench.sizes.matrix_width
    for numbers, product in products(width, bench.device).items():
        try:
            seconds = bench.seconds_per_call([product])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            yield {"name": f"matrices {numbers}", "absent": str(error).splitlines()[0]}
        else:
            yield {"name": f"matrices {numbers}", "numbers": numbers, "flops_per_s": 2 * width ** 3 / seconds}


def products(width: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """A square product in each format, rows times rows as in a layer."""
    x = torch.randn(width, width, device=device)
    wide, integers = x.to(torch.bfloat16), x.clamp(-1, 1).mul(127).to(torch.int8)
    floats, scale = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
    return {
        "bfloat16": lambda: wide @ wide.T,
        "int8": lambda: torch._int_mm(integers, integers.T),
        "fp8": lambda: torch._scaled_mm(floats, floats.T, scale, scale, out_dtype=torch.bfloat16),
    }
