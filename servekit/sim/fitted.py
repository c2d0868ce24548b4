"""Step times learnt from an engine's step log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from servekit.config.errors import require
from servekit.sim.step_time import StepShape

_KNOTS_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Where the cost of another token through the layers may change."""

_FORMAT = 1


class TimedStep(NamedTuple):
    """One step of a real engine."""

    shape: StepShape
    duration_s: float


@dataclass(frozen=True)
class FittedStepTime:
    """A step's time as a sum of what its parts cost, each at least nothing.

    The layers cost a piecewise linear function of the step's tokens that never falls: reading the weights dominates a
    few tokens, arithmetic many; the first token bears what every step costs. To that come a cost for each key that a
    decode reads, for each key and each pair of a chunk, for each request, sampled row and swapped block. The
    coefficients are the non-negative least squares fit of relative errors (Lawson and Hanson, 1974), so that short
    steps count as much as long ones. Steps longer than any it was fitted to go on at the last slope.
    """

    knots_tokens: tuple[int, ...]
    """Where the slope may change."""
    coefficients: tuple[float, ...]
    """Seconds, in the order of `_features`."""
    num_steps: int
    """Steps it was fitted to."""
    median_error: float
    """Median over those steps of the relative error."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        return sum(map(float.__mul__, self.coefficients, _features(shape, self.knots_tokens)))

    @classmethod
    def fit(cls, steps: Sequence[TimedStep]) -> FittedStepTime:
        """Fit to at least one step."""
        if not steps:
            raise ValueError("a step-time model needs at least one step")
        longest_tokens = max(step.shape.num_tokens for step in steps)
        knots_tokens = tuple(knot for knot in _KNOTS_TOKENS if knot == 0 or knot < longest_tokens)
        rows = np.array([_features(step.shape, knots_tokens) for step in steps])
        times_s = np.array([step.duration_s for step in steps])
        coefficients, _ = nnls(rows / times_s[:, None], np.ones(len(steps)))
        errors: npt.NDArray[np.float64] = np.abs(rows @ coefficients / times_s - 1.0)
        return cls(knots_tokens, tuple(coefficients.tolist()), len(steps), float(np.median(errors)))

    def save(self, path: Path) -> None:
        """Write the model as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(_Document(_FORMAT, self))))

    @classmethod
    def load(cls, path: Path) -> FittedStepTime:
        """Read what `save` wrote. Raises ConfigError for anything else."""
        problem = ""
        try:
            document = msgspec.json.decode(path.read_bytes(), type=_Document)
        except OSError as error:
            problem = error.strerror or str(error)
        except msgspec.DecodeError as error:
            problem = str(error)
        require(not problem, "path", str(path), f"is not a fitted step-time model ({problem})", "fit one and save it")
        model = document.model
        require(document.format == _FORMAT
                and len(model.coefficients) == len(_features(StepShape(), model.knots_tokens)),
                "path", str(path), "was written by another version", "fit it again")
        return model


class _Document(msgspec.Struct, frozen=True):
    format: int
    model: FittedStepTime


def _features(shape: StepShape, knots_tokens: Sequence[int]) -> list[float]:
    """What a step's time is a sum of multiples of."""
    num_tokens = shape.num_tokens
    chunk_keys = chunk_pairs = 0.0
    for chunk_tokens, num_computed in shape.chunks:
        chunk_keys += num_computed + chunk_tokens
        chunk_pairs += chunk_tokens * num_computed + chunk_tokens * (chunk_tokens + 1) / 2
    return [*_between(num_tokens, knots_tokens), float(shape.num_decodes + len(shape.chunks)), float(shape.num_sampled),
            float(shape.decode_context_tokens), chunk_keys, chunk_pairs, float(shape.num_swapped_blocks)]


def _between(num_tokens: float, knots_tokens: Sequence[int]) -> list[float]:
    """How many of the tokens lie between each knot and the next, and beyond the last."""
    return [min(max(num_tokens - low, 0.0), high - low) for low, high in pairwise((*knots_tokens, inf))]
