"""Scores that keep: what was found on some rows is scored on others.

A setting that was picked because it did well on the calibration rows does worse elsewhere, and the more freedom the
search had the worse. Three remedies. A ladder of settings with one number to turn hardly flatters itself once a lucky
rung is trusted no more than the dearer ones, or lengths no more than those that keep more in every layer
(`dependable`). Settings of many kinds are drawn towards others of their cost (`shrunk`). A search over all off-ramps
flatters itself a lot, so its settings are scored by cross-fitting (the same search on four fifths of the rows, scored
on the fifth it did not see) and must then beat the ladder clearly at equal cost, or they are not used (`earned`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from offramp.calibration.replay import ExitRecording
from offramp.inference.batching import full_macs
from offramp.inference.operating_points import OperatingPoint
from offramp.utils.progress import report_progress

if TYPE_CHECKING:
    from offramp.calibration.subject import CalibrationContext

FOLDS = 5
CLEARLY = 2.0  # standard errors over folds
SMALL = 1e-3  # no score is known better
CHOOSING = 0.25  # standard errors that the cheapest rung within a limit flatters itself by (found by simulation)
Settings = dict[str, Any]
Above = Callable[[OperatingPoint, OperatingPoint], bool]  # whether the second setting should know as much as the first
Search = Callable[
    ["CalibrationContext", ExitRecording], list[tuple[float, Settings]]
]  # (share of MACs, settings), cheapest first


def costs_at_least(one: OperatingPoint, other: OperatingPoint) -> bool:
    """Whether `other` spends as much as `one`: on a ladder with one number to turn it should know as much."""
    return other.mac_share >= one.mac_share


def keeps_at_least(name: str) -> Above:
    """The same for lengths, the setting `name`: only who keeps as many tokens in every layer should know as much."""

    def above(one: OperatingPoint, other: OperatingPoint) -> bool:
        mine, theirs = one.settings[name], other.settings[name]  # none given: all tokens
        return not theirs or (bool(mine) and all(b >= a for a, b in zip(mine, theirs, strict=True)))

    return above


def monotone_scores(
    points: Sequence[OperatingPoint], higher_is_better: bool, above: Above = costs_at_least
) -> list[OperatingPoint]:
    """Settings, cheapest first: a little is taken off for choosing among them, and none is promised more than those
    above it."""
    sign = 1.0 if higher_is_better else -1.0
    plain = [sign * point.score - CHOOSING * point.error for point in points]
    made = [
        replace(one, score=sign * min(score for score, other in zip(plain, points, strict=True) if above(one, other)))
        for one in points
    ]
    return sorted(made, key=lambda point: point.mac_share)


def shrink_scores(points: Sequence[OperatingPoint], higher_is_better: bool) -> list[OperatingPoint]:
    """Settings of many kinds, judged on the same rows, their scores drawn towards what others of their cost do, as far
    as they differ no more than luck does: of those that share a cost the luckiest would be on the front."""
    if len(points) < 2:
        return list(points)
    costs, scores, errors = (np.array([getattr(p, name) for p in points]) for name in ("mac_share", "score", "error"))
    sure = 1.0 / np.maximum(errors, SMALL) ** 2
    usual = IsotonicRegression(increasing=higher_is_better).fit(costs, scores, sample_weight=sure).predict(costs)
    luck, seen = (np.average(one**2, weights=sure) for one in (errors, scores - usual))
    real = max(0.0, 1.0 - luck / seen) if seen > 0.0 else 0.0  # the part of the differences that is none
    made = usual + real * (scores - usual)
    return [replace(point, score=float(score)) for point, score in zip(points, made, strict=True)]


def select_rows(
    subject: CalibrationContext, recording: ExitRecording, chosen: NDArray[np.bool_]
) -> tuple[CalibrationContext, ExitRecording]:
    """Some of the rows, as if the others had never been there."""
    keep = torch.tensor([bool(chosen[e.example]) for e in subject.data.encoded])
    kept = recording.keep(keep, subject.network.per_token)
    return subject.subset(chosen), kept


def even_rows(subject: CalibrationContext) -> NDArray[np.bool_]:
    """The rows to find settings on; the others are there to score them."""
    return np.arange(len(subject.data.rows)) % 2 == 0


@dataclass(frozen=True)
class _Fold:
    """Rows that were held out, and the settings found on the others."""

    rows: NDArray[np.int64]
    subject: CalibrationContext
    tape: ExitRecording
    found: list[tuple[float, Settings]]
    known: dict[str, tuple[list[Any], float, float]] = field(default_factory=dict)

    def of(self, share: float) -> Settings:
        """What the search on the other rows would use for this cost."""
        return ([s for cost, s in self.found if cost <= share] or [self.found[0][1]])[-1]

    def run(self, settings: Settings) -> tuple[list[Any], float, float]:
        """Predictions for the held-out rows, their score and their MACs."""
        if repr(settings) not in self.known:
            data, task = self.subject.data, self.subject.network.task
            outcome = self.subject.run(settings, self.tape)
            said = task.predictions(data.rows, data.encoded, outcome.logits)
            self.known[repr(settings)] = said, task.metrics(data.rows, said)[task.metric], float(outcome.macs.sum())
        return self.known[repr(settings)]


def _folds(subject: CalibrationContext, recording: ExitRecording, search: Search) -> list[_Fold]:
    place = np.random.default_rng(0).permutation(len(subject.data.rows)) % FOLDS
    made = []
    for fold in range(FOLDS):
        held, tape = select_rows(subject, recording, place == fold)
        found = search(*select_rows(subject, recording, place != fold))
        made.append(_Fold(np.flatnonzero(place == fold), held, tape, found))
        report_progress(fold + 1, FOLDS)
    return made


def cross_fitted_gains(
    subject: CalibrationContext,
    recording: ExitRecording,
    ladder: Sequence[OperatingPoint],
    search: Search,
    point: Callable[[Settings], OperatingPoint],
) -> list[OperatingPoint]:
    """The searched settings that beat the ladder (cheapest first) at equal cost, on rows they were not found on."""
    task, full = subject.network.task, float(full_macs(subject.network, subject.data.encoded).sum())
    folds, sign, kept = _folds(subject, recording, search), 1 if task.higher_is_better else -1, []
    for share, settings in search(subject, recording):
        ours = [fold.run(fold.of(share)) for fold in folds]
        spent = max(share, sum(macs for _, _, macs in ours) / full)
        rival = ([p for p in ladder if p.mac_share <= spent] or [ladder[0]])[-1]
        theirs = [fold.run(rival.settings) for fold in folds]
        gains = sign * np.array([a[1] - b[1] for a, b in zip(ours, theirs, strict=True)])
        if gains.mean() > CLEARLY * gains.std(ddof=1) / FOLDS**0.5:
            kept.append(replace(point(settings), score=_joint_score(subject, folds, [said for said, _, _ in ours])))
    return monotone_scores(kept, task.higher_is_better)


def _joint_score(subject: CalibrationContext, folds: Sequence[_Fold], said: Sequence[list[Any]]) -> float:
    """The metric of all rows, each answered by what was found without it."""
    answers: dict[int, Any] = {}
    for fold, parts in zip(folds, said, strict=True):
        answers.update(zip(fold.rows.tolist(), parts, strict=True))
    task, rows = subject.network.task, subject.data.rows
    return task.metrics(rows, [answers[i] for i in range(len(rows))])[task.metric]
