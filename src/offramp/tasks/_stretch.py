"""The best stretches of one window: every start with every end up to 30 tokens on, at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from offramp.data.tokenization import Encoded

LONGEST = 30  # tokens of an answer
BEST = 20  # stretches kept per window


class Stretch(NamedTuple):
    """Characters start…end of the context; score: sum of the start and end logits."""

    score: float
    start: int
    end: int


def stretches(encoded: Encoded, logits: np.ndarray) -> list[Stretch]:
    """The best stretches within the context by logits [tokens, 2]; exact, so any token at all gives one."""
    inside = np.flatnonzero(np.array(encoded.words) >= 0)
    if not len(inside):
        return []
    ends = np.append(logits[inside, 1], np.full(LONGEST - 1, -np.inf))
    sums = logits[inside, 0][:, None] + sliding_window_view(ends, LONGEST)  # [starts, LONGEST]
    count = min(BEST, len(inside))  # so many starts are possible, at the least
    flat = sums.ravel()
    found = []
    for place in np.argpartition(-flat, count - 1)[:count]:
        first, further = divmod(int(place), LONGEST)
        start, end = encoded.offsets[inside[first]][0], encoded.offsets[inside[first + further]][1]
        found.append(Stretch(float(flat[place]), start, end))
    return found
