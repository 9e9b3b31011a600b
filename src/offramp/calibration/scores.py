"""Scores that hold on new rows: a setting that was chosen on some rows is scored on others.

A setting that was picked because it did well on the calibration rows does worse elsewhere, and the more freedom the
search had, the worse. Three remedies:

- `monotone_scores`: on a grid over one number no setting is credited with more than costlier ones reached, and lengths
  with no more than those that keep more tokens in every layer.
- `shrink_scores`: scores of many different settings are shrunken towards what others of their cost reach.
- `cross_fitted_gains`: a search over all exits is repeated on four fifths of the rows and scored on the fifth it did
  not see; its settings are used only where they clearly beat the grid at equal cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from offramp.calibration.loss_bounds import MeasuredPoint, RowLosses
from offramp.calibration.replay import ExitRecording
from offramp.inference.batching import full_macs
from offramp.inference.operating_points import OperatingPoint
from offramp.utils.progress import report_progress

if TYPE_CHECKING:
    from offramp.calibration.calibrate import CalibrationContext

FOLDS = 5
CLEAR_GAIN = 2.0  # standard errors over folds
SMALLEST_ERROR = 1e-3  # no score is known better than this
SELECTION_BIAS = 0.25  # standard errors by which the cheapest setting within a limit looks too good (by simulation)
Settings = dict[str, Any]
AtLeast = Callable[[OperatingPoint, OperatingPoint], bool]  # whether the second setting should reach the first's score
SearchResult = list[tuple[float, Settings]]  # (share of MACs, settings), cheapest first
Search = Callable[["CalibrationContext", ExitRecording], SearchResult]
Evaluator = Callable[["CalibrationContext", ExitRecording], Callable[[Settings], MeasuredPoint]]


def costs_at_least(point: OperatingPoint, other: OperatingPoint) -> bool:
    """Return whether `other` spends at least as much as `point`, and so should reach at least its score."""
    return other.mac_share >= point.mac_share


def keeps_at_least(name: str) -> AtLeast:
    """Return the same comparison for lengths, the setting `name`: as many tokens or more in every layer."""

    def at_least(point: OperatingPoint, other: OperatingPoint) -> bool:
        kept, other_kept = point.settings[name], other.settings[name]  # empty: all tokens
        return not other_kept or (bool(kept) and all(b >= a for a, b in zip(kept, other_kept, strict=True)))

    return at_least


def monotone_scores(
    points: Sequence[OperatingPoint], higher_is_better: bool, at_least: AtLeast = costs_at_least
) -> list[OperatingPoint]:
    """Return points, cheapest first, none with a better score than those that should reach at least as much.

    A little is subtracted from every score for the bias of choosing among them.
    """
    sign = 1.0 if higher_is_better else -1.0
    unbiased = [sign * point.score - SELECTION_BIAS * point.error for point in points]
    monotone = [
        replace(
            point,
            score=sign * min(score for score, other in zip(unbiased, points, strict=True) if at_least(point, other)),
        )
        for point in points
    ]
    return sorted(monotone, key=lambda point: point.mac_share)


def shrink_scores(points: Sequence[OperatingPoint], higher_is_better: bool) -> list[OperatingPoint]:
    """Return points whose scores are shrunken towards the isotonic fit of score over cost.

    The shrinkage is as strong as the differences from the fit are explained by the scores' errors. Without it, of many
    settings of one cost the luckiest would be on the front.
    """
    if len(points) < 2:
        return list(points)
    costs, scores, errors = (np.array([getattr(p, name) for p in points]) for name in ("mac_share", "score", "error"))
    weights = 1.0 / np.maximum(errors, SMALLEST_ERROR) ** 2
    expected = IsotonicRegression(increasing=higher_is_better).fit(costs, scores, sample_weight=weights).predict(costs)
    noise, observed = (np.average(values**2, weights=weights) for values in (errors, scores - expected))
    signal = max(0.0, 1.0 - noise / observed) if observed > 0.0 else 0.0  # the part of the differences that is real
    shrunken = expected + signal * (scores - expected)
    return [replace(point, score=float(score)) for point, score in zip(points, shrunken, strict=True)]


@dataclass(frozen=True)
class _FoldResult:
    """What one setting gives on held-out rows."""

    score: float
    mac_share: float
    predictions: list[Any] | None  # None where row losses are known
    row_losses: RowLosses | None


@dataclass(frozen=True)
class _Fold:
    """Rows that were held out, and the settings found on the others."""

    rows: NDArray[np.int64]
    context: CalibrationContext
    recording: ExitRecording
    found: SearchResult
    evaluate: Callable[[Settings], MeasuredPoint]
    results: dict[str, _FoldResult] = field(default_factory=dict)

    def settings_for(self, share: float) -> Settings:
        """Return the setting that the search on the other rows would use for this cost."""
        return ([s for cost, s in self.found if cost <= share] or [self.found[0][1]])[-1]

    def run(self, settings: Settings) -> _FoldResult:
        """Return the outcome of a setting on the held-out rows."""
        if repr(settings) not in self.results:
            self.results[repr(settings)] = self._run(settings)
        return self.results[repr(settings)]

    def _run(self, settings: Settings) -> _FoldResult:
        if self.recording.outcomes is not None:
            point = self.evaluate(settings)
            return _FoldResult(point.score, point.mac_share, None, point.row_losses)
        data, task = self.context.data, self.context.network.task
        output = self.context.run(settings, self.recording)
        predictions = task.predictions(data.rows, data.encoded, output.logits)
        score = task.metrics(data.rows, predictions)[task.metric]
        full = full_macs(self.context.network, data.encoded).sum()
        return _FoldResult(score, float(output.macs.sum() / full), predictions, None)


def _split_in_folds(
    context: CalibrationContext, recording: ExitRecording, search: Search, evaluator: Evaluator
) -> list[_Fold]:
    fold_of_row = np.random.default_rng(0).permutation(len(context.data.rows)) % FOLDS
    folds = []
    for number in range(FOLDS):
        held_out, own = context.select_rows(fold_of_row == number, recording)
        found = search(*context.select_rows(fold_of_row != number, recording))
        folds.append(_Fold(np.flatnonzero(fold_of_row == number), held_out, own, found, evaluator(held_out, own)))
        report_progress(number + 1, FOLDS)
    return folds


def cross_fitted_gains(
    context: CalibrationContext,
    recording: ExitRecording,
    grid: Sequence[OperatingPoint],
    search: Search,
    evaluator: Evaluator,
) -> list[OperatingPoint]:
    """Return the searched settings that beat the grid (cheapest first) at equal cost on rows they were not found on."""
    task, full = context.network.task, full_macs(context.network, context.data.encoded)
    folds, sign = _split_in_folds(context, recording, search, evaluator), 1 if task.higher_is_better else -1
    weights = [full[fold.rows].sum() / full.sum() for fold in folds]
    evaluate, kept = evaluator(context, recording), list[MeasuredPoint]()
    for share, settings in search(context, recording):
        searched = [fold.run(fold.settings_for(share)) for fold in folds]
        spent = max(share, sum(weight * one.mac_share for weight, one in zip(weights, searched, strict=True)))
        rival = ([p for p in grid if p.mac_share <= spent] or [grid[0]])[-1]
        baseline = [fold.run(rival.settings) for fold in folds]
        gains = sign * np.array([a.score - b.score for a, b in zip(searched, baseline, strict=True)])
        if gains.mean() > CLEAR_GAIN * gains.std(ddof=1) / FOLDS**0.5:
            score, losses = _joint_outcome(context, recording, folds, searched)
            kept.append(replace(evaluate(settings), score=score, row_losses=losses, family="searched"))
    return monotone_scores(kept, task.higher_is_better)


def _joint_outcome(
    context: CalibrationContext, recording: ExitRecording, folds: Sequence[_Fold], results: Sequence[_FoldResult]
) -> tuple[float, RowLosses | None]:
    """Return score and row losses on all rows, each answered with the setting that was found without it."""
    task, rows = context.network.task, context.data.rows
    if recording.outcomes is not None:
        losses = np.empty(len(rows))
        for fold, result in zip(folds, results, strict=True):
            losses[fold.rows] = result.row_losses
        return float(recording.outcomes.row_score[-1].mean() - losses.mean()), losses
    predictions = _joint_predictions(context, folds, [one.predictions or [] for one in results])
    full_scores = task.row_scores(rows, context.predictions(context.run({}, recording)))
    scores = task.row_scores(rows, predictions)
    joint = None if full_scores is None or scores is None else np.subtract(full_scores, scores)
    return task.metrics(rows, predictions)[task.metric], joint


def _joint_predictions(
    context: CalibrationContext, folds: Sequence[_Fold], predictions: Sequence[list[Any]]
) -> list[Any]:
    """Return the predictions for all rows, each with the setting that was found without it."""
    by_row: dict[int, Any] = {}
    for fold, part in zip(folds, predictions, strict=True):
        by_row.update(zip(fold.rows.tolist(), part, strict=True))
    return [by_row[i] for i in range(len(context.data.rows))]
