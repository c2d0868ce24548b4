"""Rotary position embedding: the table of cosines and sines for every position.

The formulas are those that transformers publishes (modeling_rope_utils.py), computed in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from servekit.kernels.precision import at_least_float32
from servekit.model.spec import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    YarnScaling,
)


def cos_sin_table(spec: ModelSpec, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[max_model_len, head_dim]: per position the head_dim / 2 cosines, then as many sines.

    In float32 where `dtype` has fewer bits.
    """
    frequencies = inverse_frequencies(spec, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float64), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * _magnitude(spec.rope)
    return table.to(device=device, dtype=at_least_float32(dtype))


def inverse_frequencies(spec: ModelSpec, max_model_len: int) -> Tensor:
    """[head_dim / 2] float64: radians per position of each pair of dimensions, scaled for `max_model_len` tokens."""
    theta, dim = spec.rope.theta, spec.head_dim
    plain = _unscaled(theta, dim)
    match spec.rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DynamicScaling(factor):
            return _unscaled(_dynamic_theta(theta, dim, factor, max_model_len, spec.max_position), dim)
        case YarnScaling() as yarn:
            return _yarn(plain, theta, yarn)
        case Llama3Scaling() as llama3:
            return _llama3(plain, llama3)
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float64)


def _magnitude(rope: RopeSpec) -> float:
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def _unscaled(theta: float, dim: int) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / -dim)


def _dynamic_theta(theta: float, dim: int, factor: float, max_model_len: int, max_position: int) -> float:
    longest = max(max_model_len, max_position)
    growth: float = (factor * longest / max_position - (factor - 1)) ** (dim / (dim - 2))
    return theta * growth


def _yarn(plain: Tensor, theta: float, yarn: YarnScaling) -> Tensor:
    dim = 2 * len(plain)

    def dimension_of(rotations: float) -> float:
        """The dimension whose angle makes so many rotations over the trained length."""
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, llama3: Llama3Scaling) -> Tensor:
    rotations = llama3.original_max_position * plain / (2 * math.pi)
    smooth = (rotations - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / llama3.factor + smooth * plain
