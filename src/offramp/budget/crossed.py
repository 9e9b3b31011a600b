"""The front of many settings that were judged on the same rows, without the luck that brought them there.

Of some hundred settings that differ little, those on the front are the ones these rows happened to suit. So a point of
the front promises what choosing gave on rows the choice had not seen: in turn a fifth of the rows is left out, the best
setting for the same cost is chosen on the others, and its answers to the fifth are what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offramp.budget.folds import FOLDS
from offramp.budget.subject import Judged
from offramp.model.points import Point, pareto

Score = Callable[[Sequence[int], Sequence[Any]], float]  # which rows, and what was answered to them


def crossed(judged: Sequence[Judged], loosest: Point, score: Score, higher_is_better: bool) -> list[Point]:
    """The front, cheapest first, the loosest left out; `score` is the metric on some of the rows."""
    sign, order = 1.0 if higher_is_better else -1.0, sorted(judged, key=lambda one: one.point.mac_share)
    front = pareto([one.point for one in order], loosest, higher_is_better)[:-1]
    count = len(order[0].answers) if order else 0
    if count < FOLDS:
        return list(front)
    fold_of = np.random.default_rng(0).permutation(count) % FOLDS
    best = [_best_so_far(order, np.flatnonzero(fold_of != fold).tolist(), score, sign) for fold in range(FOLDS)]
    made = []
    for number, one in enumerate(order):
        if any(one.point is kept for kept in front):
            said = [order[best[fold][number]].answers[row] for row, fold in enumerate(fold_of)]
            met = sign * score(range(count), said)
            made.append(replace(one.point, score=sign * min(met, sign * one.point.score)))
    return made


def _best_so_far(order: Sequence[Judged], rows: Sequence[int], score: Score, sign: float) -> list[int]:
    """For each setting, cheapest first, which of those up to it does best on these rows."""
    best, most, made = 0, -np.inf, []
    for number, one in enumerate(order):
        found = sign * score(rows, [one.answers[row] for row in rows])
        if found > most:
            best, most = number, found
        made.append(best)
    return made
