"""Scores that hold on new rows: on average calibration promises what new rows give, and a search must earn its use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offramp.calibration.calibrate import (
    CalibrationContext,
    candidate_settings,
    point_evaluator,
    search_exit_settings,
)
from offramp.calibration.replay import ExitRecording
from offramp.calibration.scores import cross_fitted_gains, keeps_at_least, monotone_scores, shrink_scores
from offramp.calibration.thresholds import ExitTable, evaluate_thresholds
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, pack_rows

EXITS = 5
GRID = np.repeat(np.linspace(0.02, 1.0, 50)[:, None], EXITS, axis=1)  # one threshold for all exits


def point(share: float, score: float, error: float = 0.0) -> OperatingPoint:
    return OperatingPoint({}, share, score, 0.0, score, error)


def test_monotone_scores_credit_no_point_with_more_than_costlier_ones() -> None:
    grid = [point(0.5, 0.90), point(0.1, 0.80), point(0.3, 0.95), point(0.7, 0.91)]
    monotone = monotone_scores(grid, higher_is_better=True)
    assert [(p.mac_share, p.score, p.seen) for p in monotone] == [
        (0.1, 0.80, 0.80), (0.3, 0.90, 0.95), (0.5, 0.90, 0.90), (0.7, 0.91, 0.91)]  # fmt: skip
    losses = monotone_scores([point(0.1, 3.0), point(0.3, 2.0), point(0.5, 2.5)], higher_is_better=False)
    assert [p.score for p in losses] == [3.0, 2.5, 2.5]
    assert monotone_scores([point(0.3, 0.9, 0.04)], higher_is_better=True)[0].score == pytest.approx(0.89)
    assert monotone_scores([point(0.3, 2.0, 0.04)], higher_is_better=False)[0].score == pytest.approx(2.01)


def test_monotone_scores_compare_lengths_layer_by_layer_not_by_cost() -> None:
    cliff = OperatingPoint({"lengths": (1.0, 0.2)}, 0.5, 0.90, 2.0, 0.90)
    even = OperatingPoint({"lengths": (0.8, 0.7)}, 0.7, 0.85, 2.0, 0.85)  # costs more, and is worse
    less = OperatingPoint({"lengths": (0.9, 0.2)}, 0.4, 0.95, 2.0, 0.95)  # lucky: it keeps fewer tokens than the cliff
    monotone = monotone_scores([even, cliff, less], True, keeps_at_least("lengths"))
    assert [(p.mac_share, p.score) for p in monotone] == [(0.4, 0.90), (0.5, 0.90), (0.7, 0.85)]
    whole = OperatingPoint({"lengths": ()}, 1.0, 0.8, 2.0, 0.8)
    assert {p.score for p in monotone_scores([even, cliff, less, whole], True, keeps_at_least("lengths"))} == {0.8}


def simulate_settings(
    seed: int, spread: float, slope: float
) -> tuple[list[OperatingPoint], np.ndarray, OperatingPoint, float]:
    """Return thirty points on the same 400 rows and their true scores, the full point and its true score.

    Cheaper settings disagree more with the full model.
    """
    rng, costs = np.random.default_rng(seed), np.linspace(0.3, 0.95, 30)
    truths = 0.8 + slope * costs + rng.normal(0, spread, 30)
    shared, own = rng.random(400), rng.random((30, 400))
    luck = np.where(rng.random((30, 400)) < 0.35 * (1 - costs)[:, None], own, shared)
    right, full = luck < truths[:, None], shared < 0.8 + slope
    errors = np.sqrt((right != full).mean(1) / 400)
    numbered = enumerate(zip(costs, right.mean(1), errors, strict=True))
    points = [OperatingPoint({"i": i}, float(c), float(s), 0.0, float(s), float(e)) for i, (c, s, e) in numbered]
    return points, truths, OperatingPoint({"i": -1}, 1.0, float(full.mean()), 0.0), 0.8 + slope


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("slope", [0.02, 0.05, 0.15])
def test_shrunken_scores_choose_a_setting_that_loses_what_was_allowed(spread: float, slope: float) -> None:
    """Without shrinking up to twice as much is lost."""
    lost = []
    for seed in range(100):
        points, truths, full_point, worth = simulate_settings(seed, spread, slope)
        kept = monotone_scores(pareto_front(shrink_scores(points, True), full_point, True)[:-1], True)
        chosen = OperatingPoints("accuracy", True, {}, (*kept, full_point)).choose(Budget.loss(0.01))
        lost.append(0.0 if chosen is full_point else worth - truths[chosen.settings["i"]])
    assert np.mean(lost) < 0.0105


def test_shrink_scores_keeps_certain_scores_and_pools_uncertain_ones() -> None:
    certain = [point(0.2, 0.8, 1e-4), point(0.4, 0.7, 1e-4), point(0.6, 0.9, 1e-4)]
    assert [p.score for p in shrink_scores(certain, True)] == pytest.approx([0.8, 0.7, 0.9], abs=1e-3)
    uncertain = [point(0.2, 0.8, 0.2), point(0.4, 0.7, 0.2), point(0.6, 0.9, 0.2)]
    assert [p.score for p in shrink_scores(uncertain, True)] == pytest.approx([0.75, 0.75, 0.9])
    assert [p.score for p in shrink_scores(uncertain, False)] == pytest.approx([0.8, 0.8, 0.8])
    assert shrink_scores(certain[:1], True) == certain[:1] and shrink_scores([], True) == []


def simulate_rows(rows: int, seed: int) -> ExitTable:
    """Return rows whose exits get better with depth and whose uncertainty predicts their mistakes."""
    rng = np.random.default_rng(seed)
    hard = rng.random(rows)
    noise = rng.normal(0, 0.15, (EXITS, rows))
    uncertainty = np.clip(hard * np.linspace(1.1, 0.6, EXITS)[:, None] + noise, 0.001, 1.0)
    luck = np.where(rng.random((EXITS + 1, rows)) < 0.2, rng.random((EXITS + 1, rows)), rng.random(rows))
    right = luck > (hard**3) * np.linspace(0.7, 0.3, EXITS + 1)[:, None]  # exits mostly err on the same rows
    reach = np.repeat(np.arange(1.0, EXITS + 2)[:, None], rows, axis=1)
    none = np.zeros((EXITS, rows))
    return ExitTable(uncertainty, right.astype(float), reach, none + 0.01, none)


def grid_points(rows: ExitTable) -> list[OperatingPoint]:
    """Return the points of one threshold for all exits on these rows, from cheap to full."""
    tried, differs = evaluate_thresholds(rows, GRID), np.abs(rows.score - rows.score[-1])
    errors = np.sqrt(evaluate_thresholds(replace(rows, score=differs), GRID).score / rows.score.shape[1])
    columns = zip(tried.cost / (EXITS + 1), tried.score, errors, strict=True)
    return [OperatingPoint({"i": i}, cost, score, 0.0, score, error) for i, (cost, score, error) in enumerate(columns)]


def test_loss_budget_is_kept_on_average() -> None:
    """200 calibration sets of 1,000 rows; the truth is known from 50,000."""
    truth, lost, shares = simulate_rows(50_000, seed=10**6), {0.005: [], 0.01: [], 0.02: []}, []  # type: ignore[var-annotated]
    real = [*grid_points(truth), OperatingPoint({}, 1.0, float(truth.score[-1].mean()), 0.0)]
    for trial in range(200):
        rows = simulate_rows(1000, trial)
        full_point = OperatingPoint({"i": -1}, 1.0, float(rows.score[-1].mean()), 0.0)
        points = OperatingPoints(
            "accuracy", True, {}, pareto_front(monotone_scores(grid_points(rows), True), full_point, True)
        )
        for allowed, found in lost.items():
            chosen = real[points.choose(Budget.loss(allowed)).settings["i"]]
            found.append(real[-1].score - chosen.score)
            shares.append(chosen.mac_share)
    for allowed, found in lost.items():
        assert 0.8 * allowed < np.mean(found) < allowed + 0.0005, "the mean loss is not what was allowed"
    assert np.mean(shares) < 0.7


def context_with(trained: Path, logits: dict[int, Tensor]) -> tuple[CalibrationContext, ExitRecording]:
    """Return a context whose labels alternate, and a recording with these logits."""
    model, count = Predictor.load(trained), len(logits[3])
    rows = [{"text": "it", "label": "good" if i % 2 else "bad"} for i in range(count)]
    data = Data(rows, model.prepare(rows))
    recording = ExitRecording(logits, {}, pack_rows(model.task, data.encoded))
    return CalibrationContext(model.network, model.model.method, data), recording


def logits_of(correct: Tensor, confidence: Tensor | float) -> Tensor:
    """Return logits of two labels for rows whose true labels alternate."""
    labels = torch.arange(len(correct)) % 2
    predicted = torch.where(correct, labels, 1 - labels)
    return torch.nn.functional.one_hot(predicted, 2) * torch.as_tensor(confidence, dtype=torch.float32).reshape(-1, 1)


def grid_and_search(
    context: CalibrationContext, recording: ExitRecording
) -> tuple[list[OperatingPoint], list[OperatingPoint]]:
    """Return the points of the grid, and the points of the search that are used."""
    evaluate = point_evaluator(context, recording)
    candidates = candidate_settings(context.network, context.method, recording)
    grid = monotone_scores([evaluate(one) for one in candidates], True)
    return grid, cross_fitted_gains(context, recording, grid, search_exit_settings, point_evaluator)


def test_cross_fitted_gains_rejects_a_search_that_found_noise(trained: Path) -> None:
    torch.manual_seed(0)
    n = 300
    logits = {layer: logits_of(torch.rand(n) < 0.9, torch.rand(n) * 4) for layer in range(4)}
    _, kept = grid_and_search(*context_with(trained, logits))
    assert kept == []


def test_cross_fitted_gains_keeps_a_search_that_closes_a_misleading_exit(trained: Path) -> None:
    torch.manual_seed(0)
    n, all_rows = 300, torch.ones(300, dtype=torch.bool)
    logits = {0: logits_of(torch.rand(n) < 0.6, 9.0), 1: logits_of(all_rows, 2.0), 2: logits_of(all_rows, 2.0),
              3: logits_of(all_rows, 2.0)}  # fmt: skip
    grid, kept = grid_and_search(*context_with(trained, logits))
    assert max(p.score for p in grid if p.mac_share < 0.9) < 0.7  # one threshold for all opens the misleading exit too
    best = max(kept, key=lambda p: p.score)
    assert best.score == best.seen == 1.0 and best.mac_share < 0.5 and best.settings["thresholds"][0] == 0.0
