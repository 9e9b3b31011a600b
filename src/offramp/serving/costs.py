"""What steps cost on this machine and how deep rows go, both learned from what happened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

DECAY = 0.995  # weight of an observation after the next one
PRIOR_DECAY = 0.98  # the same for the first guess
FIRST = 10  # measurements that are taken as they are
SMALLEST = 1e-9  # seconds
PRIOR_ROWS = 20.0  # weight of the depth that calibration promised, in rows


class LinearCost:
    """Seconds as a constant and a price per token: least squares over recent observations and a few first ones."""

    def __init__(self, fixed: float, per_token: float, sizes: Iterable[int] = (8, 512)) -> None:
        self.fixed, self.per_token = fixed, per_token
        self.count = 0
        self._prior = np.zeros(5)
        self._sums = np.zeros(5)  # of 1, x, x², y, xy
        for tokens in sizes:
            self._prior += _moments(tokens, fixed + per_token * tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one measurement; one far above what was expected counts as four times that."""
        self.count += 1
        if self.count > FIRST:  # a pause of the machine, or a kernel that is compiled for a new size
            seconds = min(seconds, 4.0 * self(tokens))
        self._sums = DECAY * self._sums + _moments(tokens, seconds)
        self._prior *= PRIOR_DECAY
        n, x, xx, y, xy = (self._prior + self._sums).tolist()
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-3 * n * xx else self.per_token  # sizes must differ
        slope = max(slope, SMALLEST)
        fixed = (y - slope * x) / n
        if fixed < SMALLEST:  # a line through the origin explains the measurements best
            fixed, slope = SMALLEST, max(xy / xx, SMALLEST)
        self.fixed, self.per_token = fixed, slope

    def __call__(self, tokens: float) -> float:
        """Return the seconds of a step over so many tokens."""
        return self.fixed + self.per_token * tokens


def _moments(tokens: int, seconds: float) -> NDArray[np.float64]:
    return np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])


class StepCosts:
    """The costs of starting a batch (embeddings and exit 0), of one layer with its exit, and of a whole run.

    A whole run is one call of the engine that takes a batch from its token ids to all its answers; its size is in
    tokens × layers, where the embeddings count as `EMBEDDING` of a layer.
    """

    def __init__(
        self, start: LinearCost | None = None, layer: LinearCost | None = None, whole: LinearCost | None = None
    ) -> None:
        self.start = start or LinearCost(5e-4, 2e-6)
        self.layer = layer or LinearCost(5e-4, 2e-5)
        self.whole = whole or LinearCost(5e-4, 2e-5, (8, 2048))

    def by_steps(self, tokens: float, alive: Sequence[float]) -> tuple[float, float]:
        """Return when the average row has left and when the last one has, if a batch goes segment by segment.

        `alive` is the share of the rows that are alive after each layer, from the embeddings on.
        """
        now, mean = self.start(tokens), 0.0
        before = 1.0
        for layer, share in enumerate(alive):
            if layer:
                now += self.layer(tokens * before)
            mean += (before - share) * now
            before = share
        return mean, now


EMBEDDING = 0.25  # of a layer: embeddings, packing and exit 0


class DepthCounts:
    """How many rows left at each layer, recent ones counting more; begins with the mean that calibration promised."""

    def __init__(self, depth: int, mean: float | None = None) -> None:
        self.depth = depth
        self.counts = np.zeros(depth + 1)
        mean = float(depth) if mean is None else min(max(mean, 0.0), float(depth))
        below = math.floor(mean)
        self.counts[below] += PRIOR_ROWS * (1.0 - (mean - below))
        if below < depth:
            self.counts[below + 1] += PRIOR_ROWS * (mean - below)
        self._remaining: dict[int, float] = {}  # what `remaining` returned since the last observation
        self._alive: list[float] = []  # the same of `alive`

    def observe(self, layers: NDArray[np.float64]) -> None:
        """Count rows that left after these layers."""
        self.counts *= DECAY ** len(layers)
        self._remaining, self._alive = {}, []
        np.add.at(self.counts, np.clip(np.rint(layers).astype(int), 0, self.depth), 1.0)

    def surviving(self, layer: int, later: int) -> float:
        """Return the share of the rows alive after `layer` that are alive after `later`; -1: before the embeddings."""
        alive = float(self.counts[layer + 1 :].sum())
        if later >= self.depth:
            return 0.0
        return float(self.counts[later + 1 :].sum()) / alive if alive > 0.0 else 1.0

    @property
    def alive(self) -> list[float]:
        """The share of rows that are alive after each layer, from the embeddings to the last, which is 0."""
        known = self._alive
        if not known:
            left = self.counts.cumsum() / max(float(self.counts.sum()), 1e-12)
            known = self._alive = np.maximum(0.0, 1.0 - left).tolist()
        return known  # another thread may observe meanwhile, so nothing is read twice

    def remaining(self, layer: int) -> float:
        """Return how many further layers a row that is alive after `layer` is expected to go through."""
        known = self._remaining.get(layer)
        if known is None:
            known = self._remaining[layer] = self._count_remaining(layer)
        return known

    def _count_remaining(self, layer: int) -> float:
        if layer >= self.depth:
            return 0.0
        tail = self.counts[layer + 1 :]
        alive = float(tail.sum())
        if alive <= 0.0:
            return float(self.depth - max(layer, 0))
        layers = np.arange(layer + 1, self.depth + 1) - max(layer, 0)
        return float((tail * layers).sum()) / alive
