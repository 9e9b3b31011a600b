"""Upper confidence bounds on what settings lose against the full model, on new rows.

The cheapest setting whose estimated loss fits a limit loses more than the limit about every fourth time
(docs/promises.md): it was chosen because its estimate was lucky. Settings are therefore chosen by a bound that holds
with a stated confidence for the setting that is chosen for a limit fixed beforehand (all bounds together hold with
less):

- Paired: the loss of a row is the full model's score minus the setting's, so that what both do alike cancels out.
- One setting: Gaffke's bound on the mean of bounded values, the quantile of their randomly weighted mean with one more
  value, the largest possible. For losses of 0 and 1 it is the exact binomial bound of Clopper and Pearson; for other
  values its validity is known from simulations and not proven here.
- All settings of a family (one threshold at many values): tested from the costliest to the cheapest until the first
  that fails, which needs no correction. A setting's bound is therefore the largest of its own and those of costlier
  settings. Families share the error probability: the one of a single threshold, which proves nearly all points that
  are ever chosen, has nine tenths of it, and searched thresholds the rest; the lengths of a pair have equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from offramp.errors import OfframpError
from offramp.inference.operating_points import LossBounds, OperatingPoint

CONFIDENCE = 0.9  # that a bound holds
DRAWS, LARGEST_DRAW = 4000, 2_000_000  # random weightings, and numbers drawn at a time
DRAWS_BEYOND, MOST_DRAWS = 100, 200_000  # weightings beyond a quantile, so that it is known; weightings altogether
MOST_NUMBERS = 100_000_000  # drawn altogether: fewer weightings where rows are very many
LARGEST_LOSS = 1.0  # of a row
MAIN_FAMILY, MAIN_SHARE = "", 0.9  # settings with a single number, and their share of the error probability
RowLosses = NDArray[np.float64]  # [rows]


@dataclass(frozen=True)
class MeasuredPoint(OperatingPoint):
    """An operating point with what each calibration row lost against the full model."""

    row_losses: RowLosses | None = field(default=None, compare=False, repr=False)  # None: the metric is no mean of rows
    family: str = field(default="", compare=False)  # settings of one family are ordered by their cost
    error_share: float = field(default=1.0, compare=False)  # of the error probability, that the family was bounded with


def without_rows(point: OperatingPoint, **changes: Any) -> OperatingPoint:
    """Return a point as it is stored."""
    return OperatingPoint(**{**{one.name: getattr(point, one.name) for one in fields(OperatingPoint)}, **changes})


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that is no probability worth having."""
    if not 0.5 <= confidence < 1.0:
        raise OfframpError("a confidence of loss bounds", f"{confidence}", "give 0.5 or more and less than 1, e.g. 0.9")


def mean_upper_bounds(losses: NDArray[np.float64], confidences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an upper bound on the mean of each row of values in −1…1; losses [K, n], confidences [K]."""
    count, rows = losses.shape
    worse, better = (losses == 1.0).sum(1), (losses == -1.0).sum(1)
    if (losses == 0.0).sum() + worse.sum() + better.sum() == losses.size:  # a row is right or wrong
        counted = zip(worse.tolist(), better.tolist(), confidences.tolist(), strict=True)
        return np.array([_bound_of_counts(*one, rows) for one in counted])
    rng, totals = np.random.default_rng(0), []
    draws = int(max(500, min(_draws_for(float(confidences.max())), MOST_NUMBERS // (rows + 1))))
    size = max(1, LARGEST_DRAW // (rows + 1))
    for first in range(0, draws, size):
        weights = rng.standard_exponential((min(size, draws - first), rows + 1))
        sums = weights[:, :rows] @ losses.T + LARGEST_LOSS * weights[:, rows:]
        totals.append(sums / weights.sum(1, keepdims=True))
    drawn = np.concatenate(totals)  # [draws, K]
    return np.array([_drawn_quantile(drawn[:, k], float(confidences[k])) for k in range(count)])


@lru_cache(maxsize=100_000)
def _bound_of_counts(worse: int, better: int, confidence: float, rows: int) -> float:
    """Return the bound where `worse` rows lose 1, `better` rows gain 1 and the others nothing.

    The weights of equal values have a gamma distribution, so that three numbers are drawn instead of one a row.
    """
    if not better:
        return 1.0 if worse >= rows else float(beta.ppf(confidence, worse + 1, rows - worse))
    rng, draws = np.random.default_rng(0), _draws_for(confidence)
    lost = rng.standard_gamma(worse + 1, draws)  # with the one more value, which is a loss
    gained = rng.standard_gamma(better, draws)
    equal = rng.standard_gamma(rows - worse - better, draws) if rows > worse + better else np.zeros(draws)
    return _drawn_quantile((lost - gained) / (lost + gained + equal), confidence)


def _draws_for(confidence: float) -> int:
    """Return how many weightings tell a quantile so far out."""
    return int(min(MOST_DRAWS, max(DRAWS, DRAWS_BEYOND / (1.0 - confidence))))


def _drawn_quantile(values: NDArray[np.float64], confidence: float) -> float:
    """Return a quantile of drawn values: one of them, with at least this share of all at or below it."""
    place = min(len(values), math.ceil((len(values) + 1) * confidence)) - 1
    return float(np.partition(values, place)[place])


def bound_losses(
    tried: Sequence[OperatingPoint], confidence: float, searched: bool = False, more_families: int = 0
) -> list[OperatingPoint]:
    """Return the points with bounds on their losses; unchanged where the metric is not the mean of row scores.

    `searched`: thresholds of single exits were searched, so that a part of the error is theirs, even if none of them is
    among the points. `more_families`: which were bounded on the same rows before, and of which the best are here.
    """
    families: dict[tuple[str, int], list[int]] = {}
    losses: list[RowLosses] = []
    for number, point in enumerate(tried):
        if not isinstance(point, MeasuredPoint) or point.row_losses is None:
            return list(tried)
        families.setdefault((point.family, len(point.row_losses)), []).append(number)
        losses.append(point.row_losses)
    bounds, shares, names = np.empty(len(tried)), np.empty(len(tried)), [name for name, _ in families]
    for (name, _), numbers in families.items():
        share = MAIN_SHARE if searched and names == [MAIN_FAMILY] else _error_share(name, names, more_families)
        each, shares[numbers] = np.full(len(numbers), 1.0 - (1.0 - confidence) * share), share
        ordered = sorted(numbers, key=lambda number: -tried[number].mac_share)
        pointwise = mean_upper_bounds(np.stack([losses[number] for number in ordered]), each)
        bounds[ordered] = np.maximum.accumulate(pointwise)
    return [
        replace(point, loss_upper=float(max(0.0, bound)), error_share=float(share))  # type: ignore[call-arg]  # measured
        for point, bound, share in zip(tried, bounds, shares, strict=True)
    ]


def _error_share(family: str, families: Sequence[str], more: int = 0) -> float:
    """Return a family's share of the error probability; which it is never depends on what was measured."""
    if MAIN_FAMILY not in families or len(families) == 1:
        return 1.0 / (len(families) + more)
    return MAIN_SHARE if family == MAIN_FAMILY else (1.0 - MAIN_SHARE) / (len(families) - 1)


def loss_bounds(tried: Sequence[OperatingPoint], confidence: float, given: int | None = None) -> LossBounds:
    """Return how the losses of points were bounded; `given`: rows that were calibrated on, found on or measured."""
    measured = [point for point in tried if isinstance(point, MeasuredPoint) and point.row_losses is not None]
    if not measured or len(measured) < len(tried):
        return LossBounds(confidence, None)
    share = max(point.error_share for point in measured)
    rows = min(len(point.row_losses) for point in measured if point.row_losses is not None)
    return LossBounds(confidence, rows, 1.0 - (1.0 - confidence) * share, given)


def stored_points(front: Sequence[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Return the points of a front as they are stored; the full setting, the last, loses nothing."""
    return (*map(without_rows, front[:-1]), without_rows(front[-1], loss_upper=0.0))
