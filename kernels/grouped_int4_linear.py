"""Multiplication by a weight matrix of four-bit integers with a zero point for each group, as AWQ and GPTQ store it.

AWQ: Lin et al., 2023; GPTQ: Frantar et al., 2022. Both keep eight integers in one int32, in layouts of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.kernels.int4_linear import GROUP_SIZE as INT4_GROUP
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight

_PER_WORD = 8
_BITS = 4
_MOST = 15
_AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight columns lies in each nibble, the lowest first."""


@dataclass(frozen=True, slots=True)
class GroupedInt4Weight:
    """W[n, k] = (integers[n, k] - zeros[n, k // group]) * scales[n, k // group], for column `inputs[k]` of x."""

    integers: Tensor
    """[out, in] uint8, 0 to 15."""
    zeros: Tensor
    """[out, in / group] uint8, 0 to 16."""
    scales: Tensor
    """[out, in / group] in the checkpoint's format."""
    inputs: Tensor | None = None
    """[in] int64: the columns of x in the order of this matrix's columns; None: their own order."""


def from_awq(words: Tensor, zero_words: Tensor, scales: Tensor) -> GroupedInt4Weight:
    """From an AWQ checkpoint: [in, out / 8] and [in / group, out / 8] int32, and scales [in / group, out]."""
    return GroupedInt4Weight(_awq_integers(words).T.contiguous(), _awq_integers(zero_words).T.contiguous(),
                             scales.T.contiguous())


def from_gptq(words: Tensor, zero_words: Tensor, scales: Tensor, group_of_input: Tensor,
              zero_offset: int = 1) -> GroupedInt4Weight:
    """From a GPTQ checkpoint.

    Args:
        words: [in / 8, out] int32: integers of eight inputs, the first in the lowest bits.
        zero_words: [in / group, out / 8] int32: the zero points less `zero_offset`.
        scales: [in / group, out].
        group_of_input: [in]: where inputs were quantised in order of their importance, groups are scattered.
        zero_offset: 1 in the checkpoint format `gptq`, 0 in `gptq_v2`.

    Raises ValueError where groups have different sizes.
    """
    integers = _nibbles(words).permute(0, 2, 1).flatten(0, 1)
    zeros = _nibbles(zero_words).flatten(1) + zero_offset
    group_size = len(group_of_input) // len(scales)
    order = torch.argsort(group_of_input.long(), stable=True)
    expected = torch.arange(len(scales), device=order.device).repeat_interleave(group_size)
    if not torch.equal(group_of_input.long()[order], expected):
        raise ValueError(f"the {len(scales)} groups of {len(group_of_input)} inputs differ in size")
    is_in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return GroupedInt4Weight(integers[order].T.contiguous(), zeros.T.contiguous(), scales.T.contiguous(),
                             None if is_in_order else order)


def quantize(weight: Tensor, group_size: int) -> GroupedInt4Weight:
    """Round [out, in] to 16 evenly spaced values, 0 among them, that span each group of an output channel."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group_size, group_size)
    lowest, highest = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scales = ((highest - lowest) / _MOST).half()
    steps = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    zeros = (-lowest / steps).round_().clamp_(0, _MOST)
    integers = ((groups / steps.unsqueeze(-1)).round_() + zeros.unsqueeze(-1)).clamp_(0, _MOST)
    return GroupedInt4Weight(integers.view(rows, columns).to(torch.uint8), zeros.to(torch.uint8), scales)


def dequantize(weight: GroupedInt4Weight) -> Tensor:
    """[out, in] float32, its columns in the order of the integers."""
    rows, columns = weight.integers.shape
    groups = weight.integers.view(rows, weight.scales.shape[1], -1).float()
    shifted = groups - weight.zeros.float().unsqueeze(-1)
    return (shifted * weight.scales.float().unsqueeze(-1)).view(rows, columns)


def repacked(weight: GroupedInt4Weight) -> Int4Weight | Int8Weight:
    """The same matrix, exactly, in a form with more products; its columns in the order of the integers.

    With four bits where groups are whole ones of that form, and float16 holds the scales and what they make of the
    zero points (all of a symmetric checkpoint, whose zero points are 8); otherwise with eight.
    """
    columns_per_scale = weight.integers.shape[1] // weight.scales.shape[1]
    scales = weight.scales.float()
    minima = -(weight.zeros * scales)
    if columns_per_scale % INT4_GROUP == 0 and _are_halves(scales) and _are_halves(minima):
        parts = columns_per_scale // INT4_GROUP
        return Int4Weight(weight.integers, scales.half().repeat_interleave(parts, dim=1),
                          minima.half().repeat_interleave(parts, dim=1))
    shifted = weight.integers.view(torch.int8) - weight.zeros.view(torch.int8).repeat_interleave(columns_per_scale, 1)
    return Int8Weight(shifted, scales)


def _are_halves(values: Tensor) -> bool:
    """Whether float16 holds each exactly."""
    return torch.equal(values.half().float(), values)


def reference(x: Tensor, weight: GroupedInt4Weight) -> Tensor:
    """x @ W.T for x [..., in], in x's number format: activations are not rounded."""
    inputs = x if weight.inputs is None else x[..., weight.inputs]
    return inputs @ dequantize(weight).to(x.dtype).T


def _awq_integers(words: Tensor) -> Tensor:
    """[rows, columns / 8] int32 to [rows, columns] uint8."""
    column_of_nibble = torch.tensor(_AWQ_COLUMN_OF_NIBBLE, device=words.device)
    return _nibbles(words)[..., torch.argsort(column_of_nibble)].flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """[...] int32 to [..., 8] uint8, the lowest four bits first."""
    shifts = torch.arange(0, _PER_WORD * _BITS, _BITS, device=words.device)
    return (words.unsqueeze(-1) >> shifts & _MOST).to(torch.uint8)
