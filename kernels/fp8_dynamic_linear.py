"""Multiplication of activations that are rounded to eight-bit floats, row by row, by a matrix of such floats."""

from __future__ import annotations

from torch import Tensor

from servekit.kernels.fp8_linear import Fp8Weight, quantize_rows


def reference(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format; each row of x is rounded with a scale of its own."""
    numbers, scales = quantize_rows(x)
    product = numbers.float() @ weight.numbers.float().T
    return (product * scales.unsqueeze(-1) * weight.scales).to(x.dtype)
