"""A threshold for every off-ramp, found by replaying thousands of settings at once.

All a setting needs is known beforehand: the doubt, the score and the cost of leaving at each off-ramp, for each row. A
population of threshold vectors is evaluated as one array; the Pareto front breeds the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CHUNK = 250


@dataclass(frozen=True)
class ExitTable:
    """What leaving at each exit means, for every row; the last exit is the full model's own."""

    uncertainty: Array  # [ramps, rows]
    score: Array  # [ramps + 1, rows]
    reach: Array  # [ramps + 1, rows] MACs of embeddings and layers up to there (the last: with its head)
    ask: Array  # [ramps, rows] MACs that everybody pays who passes an open off-ramp
    answer: Array  # [ramps, rows] MACs that only those pay who leave there


@dataclass(frozen=True)
class EvaluatedThresholds:
    """Threshold vectors and what each did on average."""

    thresholds: Array  # [settings, ramps]; 0 closes an off-ramp
    cost: Array  # [settings] mean MACs a row
    score: Array  # [settings]

    def join(self, other: EvaluatedThresholds) -> EvaluatedThresholds:
        """Both together."""
        parts = zip(vars(self).values(), vars(other).values(), strict=True)
        return EvaluatedThresholds(*(np.concatenate(pair) for pair in parts))

    def front(self) -> EvaluatedThresholds:
        """The settings that no other beats on both, cheapest first."""
        order = np.lexsort((-self.score, self.cost))
        best = np.maximum.accumulate(np.concatenate(([-np.inf], self.score[order][:-1])))
        keep = order[self.score[order] > best]
        return EvaluatedThresholds(self.thresholds[keep], self.cost[keep], self.score[keep])


def evaluate_thresholds(table: ExitTable, thresholds: Array) -> EvaluatedThresholds:
    """Every setting over every row."""
    parts = [_try(table, thresholds[i : i + CHUNK]) for i in range(0, len(thresholds), CHUNK)]
    cost, score = (np.concatenate(column) for column in zip(*parts, strict=True))
    return EvaluatedThresholds(thresholds, cost, score)


def _try(table: ExitTable, thresholds: Array) -> tuple[Array, Array]:
    exit_heads, rows = table.uncertainty.shape
    going = np.ones((len(thresholds), rows), dtype=bool)
    cost, score = np.zeros(len(thresholds)), np.zeros(len(thresholds))
    for exit_head in range(exit_heads):
        limit = thresholds[:, exit_head, None]
        cost += (going @ table.ask[exit_head]) * (limit[:, 0] > 0)
        leaving = going & (table.uncertainty[exit_head] < limit)
        cost += leaving @ (table.reach[exit_head] + table.answer[exit_head])
        score += leaving @ table.score[exit_head]
        going &= ~leaving
    return (cost + going @ table.reach[-1]) / rows, (score + going @ table.score[-1]) / rows


def search_thresholds(
    table: ExitTable, start: Array, levels: Array, generations: int = 40, children: int = 400
) -> EvaluatedThresholds:
    """Random and evolutionary search from given settings over given levels of doubt [ramps, levels]; the front."""
    rng = np.random.default_rng(0)
    best = evaluate_thresholds(table, start).front()
    for _ in range(generations):
        fresh = _children(best.thresholds, levels, children, rng)
        best = best.join(evaluate_thresholds(table, fresh)).front()
    return best


def _children(parents: Array, levels: Array, count: int, rng: np.random.Generator) -> Array:
    """Mixtures of two parents with some thresholds moved to another level of doubt, or closed."""
    exit_heads = parents.shape[1]
    mother, father = (parents[rng.integers(len(parents), size=count)] for _ in range(2))
    made = np.where(rng.random((count, exit_heads)) < 0.5, mother, father)
    level = levels[np.arange(exit_heads), rng.integers(levels.shape[1], size=(count, exit_heads))]
    moved = np.where(rng.random((count, exit_heads)) < 0.15, 0.0, np.maximum(level, 0.0))
    return np.where(rng.random((count, exit_heads)) < 1.5 / exit_heads, moved, made)
