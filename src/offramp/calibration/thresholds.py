"""One threshold per exit, found by an evolutionary search over recorded exits.

Everything a setting needs is known beforehand: the uncertainty, the score and the cost of leaving at each exit, for
each row. A population of threshold vectors is evaluated as one array operation, and the Pareto front of a generation
provides the parents of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CHUNK = 250  # threshold vectors evaluated at once, to bound memory
CUTS = 60  # candidate values of one threshold
CLOSE_PROBABILITY = 0.15  # that a mutation closes an exit instead of moving its threshold
MUTATIONS = 1.5  # thresholds mutated per child, on average


@dataclass(frozen=True)
class ExitTable:
    """The uncertainty, score and cost of every exit for every row; the last exit is the full model's own."""

    uncertainty: Array  # [exits, rows]
    score: Array  # [exits + 1, rows]
    reach: Array  # [exits + 1, rows] MACs of embeddings and layers up to the exit (the last: with its head)
    ask: Array  # [exits, rows] MACs paid by every row that passes an open exit
    answer: Array  # [exits, rows] MACs paid only by rows that leave at the exit


@dataclass(frozen=True)
class EvaluatedThresholds:
    """Threshold vectors with their mean cost and score."""

    thresholds: Array  # [settings, exits]; 0 closes an exit
    cost: Array  # [settings] mean MACs of a row
    score: Array  # [settings]

    def join(self, other: EvaluatedThresholds) -> EvaluatedThresholds:
        """Return both sets of vectors as one."""
        columns = zip(vars(self).values(), vars(other).values(), strict=True)
        return EvaluatedThresholds(*(np.concatenate(pair) for pair in columns))

    def front(self) -> EvaluatedThresholds:
        """Return the vectors that no other beats on both cost and score, cheapest first."""
        order = np.lexsort((-self.score, self.cost))
        best_before = np.maximum.accumulate(np.concatenate(([-np.inf], self.score[order][:-1])))
        keep = order[self.score[order] > best_before]
        return EvaluatedThresholds(self.thresholds[keep], self.cost[keep], self.score[keep])


def threshold_cuts(values: Array) -> list[float]:
    """Return thresholds that divide these values evenly, each in the middle of a wide gap, and one above them all.

    No value equals a threshold, so rounding (another batch, another engine) moves no row to the other side. Between
    neighbours in single precision, in which thresholds are compared, there is none: it rounds to one of the two.
    """
    distinct = np.unique(values)
    gaps = np.diff(distinct)
    widest = [part[gaps[part].argmax()] for part in np.array_split(np.arange(len(gaps)), CUTS) if len(part)]
    middles = ((distinct[i] + distinct[i + 1]) / 2 for i in widest)
    return [float(cut) for cut in [*middles, distinct[-1] * 1.001 + 1e-6]]


def evaluate_thresholds(table: ExitTable, thresholds: Array) -> EvaluatedThresholds:
    """Evaluate every threshold vector on every row."""
    parts = [_evaluate_chunk(table, thresholds[i : i + CHUNK]) for i in range(0, len(thresholds), CHUNK)]
    cost, score = (np.concatenate(column) for column in zip(*parts, strict=True))
    return EvaluatedThresholds(thresholds, cost, score)


def _evaluate_chunk(table: ExitTable, thresholds: Array) -> tuple[Array, Array]:
    exits, rows = table.uncertainty.shape
    running = np.ones((len(thresholds), rows), dtype=bool)
    cost, score = np.zeros(len(thresholds)), np.zeros(len(thresholds))
    for index in range(exits):
        limit = thresholds[:, index, None]
        cost += (running @ table.ask[index]) * (limit[:, 0] > 0)
        leaving = running & (table.uncertainty[index] < limit.astype(np.float32))  # as a run compares
        cost += leaving @ (table.reach[index] + table.answer[index])
        score += leaving @ table.score[index]
        running &= ~leaving
    return (cost + running @ table.reach[-1]) / rows, (score + running @ table.score[-1]) / rows


def search_thresholds(
    table: ExitTable, start: Array, levels: Array, generations: int = 40, children: int = 400
) -> EvaluatedThresholds:
    """Return the Pareto front that an evolutionary search finds from `start` over values `levels` [exits, levels]."""
    rng = np.random.default_rng(0)
    front = evaluate_thresholds(table, start).front()
    for _ in range(generations):
        candidates = _children(front.thresholds, levels, children, rng)
        front = front.join(evaluate_thresholds(table, candidates)).front()
    return front


def _children(parents: Array, levels: Array, count: int, rng: np.random.Generator) -> Array:
    """Return mixtures of two parents each, some of whose thresholds are moved to another level or closed."""
    exits = parents.shape[1]
    first, second = (parents[rng.integers(len(parents), size=count)] for _ in range(2))
    mixed = np.where(rng.random((count, exits)) < 0.5, first, second)
    level = levels[np.arange(exits), rng.integers(levels.shape[1], size=(count, exits))]
    moved = np.where(rng.random((count, exits)) < CLOSE_PROBABILITY, 0.0, np.maximum(level, 0.0))
    return np.where(rng.random((count, exits)) < MUTATIONS / exits, moved, mixed)
