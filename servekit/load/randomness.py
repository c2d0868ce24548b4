"""Random streams of a run: independent of each other and of the order in which they are used."""

from __future__ import annotations

from enum import Enum

import numpy as np


class Stream(Enum):
    """What is drawn. Each has its own generator, so that one more draw of one never changes another."""

    arrivals = 0
    lengths = 1
    tenants = 2
    prefix_choice = 3
    prompt = 4
    prefix = 5
    classes = 6
    predictions = 7


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """The generator of one stream; `index` tells apart, for example, the prompts of different requests."""
    return np.random.default_rng((seed, stream.value, index))
