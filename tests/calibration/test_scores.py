"""Scores that keep: what calibration promises is what new rows give, on average; freedom must earn its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offramp.calibration.calibrate import (
    CalibrationContext,
    calibrate,
    candidate_settings,
    point_evaluator,
    search_exit_settings,
)
from offramp.calibration.replay import ExitRecording, record_exits
from offramp.calibration.scores import cross_fitted_gains, keeps_at_least, monotone_scores, shrink_scores
from offramp.calibration.thresholds import ExitTable, evaluate_thresholds
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, pack_rows
from tests import runs

RAMPS = 5
GRID = np.repeat(np.linspace(0.02, 1.0, 50)[:, None], RAMPS, axis=1)  # one threshold for all off-ramps


def point(share: float, score: float, error: float = 0.0) -> OperatingPoint:
    return OperatingPoint({}, share, score, 0.0, score, error)


def test_a_lucky_rung_is_trusted_no_more_than_dearer_ones() -> None:
    ladder = [point(0.5, 0.90), point(0.1, 0.80), point(0.3, 0.95), point(0.7, 0.91)]
    made = monotone_scores(ladder, higher_is_better=True)
    assert [(p.mac_share, p.score, p.seen) for p in made] == [
        (0.1, 0.80, 0.80), (0.3, 0.90, 0.95), (0.5, 0.90, 0.90), (0.7, 0.91, 0.91)]  # fmt: skip
    losses = monotone_scores([point(0.1, 3.0), point(0.3, 2.0), point(0.5, 2.5)], higher_is_better=False)
    assert [p.score for p in losses] == [3.0, 2.5, 2.5]
    assert monotone_scores([point(0.3, 0.9, 0.04)], higher_is_better=True)[0].score == pytest.approx(0.89)
    assert monotone_scores([point(0.3, 2.0, 0.04)], higher_is_better=False)[0].score == pytest.approx(2.01)


def test_lengths_are_held_to_those_that_keep_more_in_every_layer_not_to_dearer_ones() -> None:
    cliff = OperatingPoint({"lengths": (1.0, 0.2)}, 0.5, 0.90, 2.0, 0.90)
    even = OperatingPoint({"lengths": (0.8, 0.7)}, 0.7, 0.85, 2.0, 0.85)  # dearer, and worse
    less = OperatingPoint(
        {"lengths": (0.9, 0.2)}, 0.4, 0.95, 2.0, 0.95
    )  # lucky: it keeps less than the cliff everywhere
    made = monotone_scores([even, cliff, less], True, keeps_at_least("lengths"))
    assert [(p.mac_share, p.score) for p in made] == [(0.4, 0.90), (0.5, 0.90), (0.7, 0.85)]
    whole = OperatingPoint({"lengths": ()}, 1.0, 0.8, 2.0, 0.8)
    assert {p.score for p in monotone_scores([even, cliff, less, whole], True, keeps_at_least("lengths"))} == {0.8}


def many(seed: int, spread: float, slope: float) -> tuple[list[OperatingPoint], np.ndarray, OperatingPoint, float]:
    """Thirty settings on the same 400 rows, cheaper ones departing more; what each is really worth; the full model."""
    rng, costs = np.random.default_rng(seed), np.linspace(0.3, 0.95, 30)
    truths = 0.8 + slope * costs + rng.normal(0, spread, 30)
    shared, own = rng.random(400), rng.random((30, 400))
    luck = np.where(rng.random((30, 400)) < 0.35 * (1 - costs)[:, None], own, shared)
    right, full = luck < truths[:, None], shared < 0.8 + slope
    errors = np.sqrt((right != full).mean(1) / 400)
    told = enumerate(zip(costs, right.mean(1), errors, strict=True))
    points = [OperatingPoint({"i": i}, float(c), float(s), 0.0, float(s), float(e)) for i, (c, s, e) in told]
    return points, truths, OperatingPoint({"i": -1}, 1.0, float(full.mean()), 0.0), 0.8 + slope


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("slope", [0.02, 0.05, 0.15])
def test_of_many_settings_the_chosen_one_loses_what_was_allowed(spread: float, slope: float) -> None:
    """However much settings of one cost really differ; without shrinking up to twice as much is lost."""
    lost = []
    for seed in range(100):
        points, truths, loosest, worth = many(seed, spread, slope)
        kept = monotone_scores(pareto_front(shrink_scores(points, True), loosest, True)[:-1], True)
        chosen = OperatingPoints("accuracy", True, {}, (*kept, loosest)).choose(Budget.loss(0.01))
        lost.append(0.0 if chosen is loosest else worth - truths[chosen.settings["i"]])
    assert np.mean(lost) < 0.0105


def test_shrinking_leaves_alone_what_is_sure_and_joins_what_is_not() -> None:
    sure = [point(0.2, 0.8, 1e-4), point(0.4, 0.7, 1e-4), point(0.6, 0.9, 1e-4)]
    assert [p.score for p in shrink_scores(sure, True)] == pytest.approx([0.8, 0.7, 0.9], abs=1e-3)
    exit_unit = [point(0.2, 0.8, 0.2), point(0.4, 0.7, 0.2), point(0.6, 0.9, 0.2)]
    assert [p.score for p in shrink_scores(exit_unit, True)] == pytest.approx([0.75, 0.75, 0.9])
    assert [p.score for p in shrink_scores(exit_unit, False)] == pytest.approx([0.8, 0.8, 0.8])
    assert shrink_scores(sure[:1], True) == sure[:1] and shrink_scores([], True) == []


def source(rows: int, seed: int) -> ExitTable:
    """Rows of a source whose exits get better with depth and know something of their own mistakes."""
    rng = np.random.default_rng(seed)
    hard = rng.random(rows)
    noise = rng.normal(0, 0.15, (RAMPS, rows))
    uncertainty = np.clip(hard * np.linspace(1.1, 0.6, RAMPS)[:, None] + noise, 0.001, 1.0)
    luck = np.where(rng.random((RAMPS + 1, rows)) < 0.2, rng.random((RAMPS + 1, rows)), rng.random(rows))
    right = luck > (hard**3) * np.linspace(0.7, 0.3, RAMPS + 1)[:, None]  # exits mostly err on the same rows
    reach = np.repeat(np.arange(1.0, RAMPS + 2)[:, None], rows, axis=1)
    none = np.zeros((RAMPS, rows))
    return ExitTable(uncertainty, right.astype(float), reach, none + 0.01, none)


def ladder_of(rows: ExitTable) -> list[OperatingPoint]:
    """One threshold for all off-ramps, from tight to loose, on these rows."""
    tried, differs = evaluate_thresholds(rows, GRID), np.abs(rows.score - rows.score[-1])
    errors = np.sqrt(evaluate_thresholds(replace(rows, score=differs), GRID).score / rows.score.shape[1])
    told = zip(tried.cost / (RAMPS + 1), tried.score, errors, strict=True)
    return [OperatingPoint({"i": i}, cost, score, 0.0, score, error) for i, (cost, score, error) in enumerate(told)]


def test_max_loss_keeps_its_promise_on_average() -> None:
    """200 calibration sets of 1,000 rows; the truth is known from 50,000."""
    truth, lost, shares = source(50_000, seed=10**6), {0.005: [], 0.01: [], 0.02: []}, []  # type: ignore[var-annotated]
    real = [*ladder_of(truth), OperatingPoint({}, 1.0, float(truth.score[-1].mean()), 0.0)]
    for trial in range(200):
        rows = source(1000, trial)
        loosest = OperatingPoint({"i": -1}, 1.0, float(rows.score[-1].mean()), 0.0)
        points = OperatingPoints(
            "accuracy", True, {}, pareto_front(monotone_scores(ladder_of(rows), True), loosest, True)
        )
        for allowed, found in lost.items():
            chosen = real[points.choose(Budget.loss(allowed)).settings["i"]]
            found.append(real[-1].score - chosen.score)
            shares.append(chosen.mac_share)
    for allowed, found in lost.items():
        assert 0.8 * allowed < np.mean(found) < allowed + 0.0005, "not what was allowed is lost on average"
    assert np.mean(shares) < 0.7


def opened(trained: Path, logits: dict[int, Tensor]) -> tuple[CalibrationContext, ExitRecording]:
    """Rows of which the first half are good, and a recording that says what a test wants."""
    model, count = Predictor.load(trained), len(logits[3])
    rows = [{"text": "it", "label": "good" if i % 2 else "bad"} for i in range(count)]
    data = Data(rows, model.prepare(rows))
    return CalibrationContext(model.network, model.model.method, data), ExitRecording(
        logits, {}, pack_rows(model.task, data.encoded)
    )


def answers(right: Tensor, sure: Tensor | float) -> Tensor:
    """Logits of two labels for rows whose true labels alternate."""
    truth = torch.arange(len(right)) % 2
    said = torch.where(right, truth, 1 - truth)
    return torch.nn.functional.one_hot(said, 2) * torch.as_tensor(sure, dtype=torch.float32).reshape(-1, 1)


def searched(subject: CalibrationContext, tape: ExitRecording) -> tuple[list[OperatingPoint], list[OperatingPoint]]:
    tell = point_evaluator(subject, tape)
    ladder = monotone_scores([tell(s) for s in candidate_settings(subject.network, subject.method, tape)], True)
    return ladder, cross_fitted_gains(subject, tape, ladder, search_exit_settings, tell)


def test_a_search_that_only_found_noise_is_not_used(trained: Path) -> None:
    torch.manual_seed(0)
    n = 300
    logits = {layer: answers(torch.rand(n) < 0.9, torch.rand(n) * 4) for layer in range(4)}
    _, kept = searched(*opened(trained, logits))
    assert kept == []


def test_a_search_that_closes_a_misleading_off_ramp_is_used(trained: Path) -> None:
    torch.manual_seed(0)
    n, everyone = 300, torch.ones(300, dtype=torch.bool)
    logits = {0: answers(torch.rand(n) < 0.6, 9.0), 1: answers(everyone, 2.0), 2: answers(everyone, 2.0),
              3: answers(everyone, 2.0)}  # fmt: skip
    ladder, kept = searched(*opened(trained, logits))
    assert max(p.score for p in ladder if p.mac_share < 0.9) < 0.7  # whoever lets rows leave lets them leave at 0
    best = max(kept, key=lambda p: p.score)
    assert best.score == best.seen == 1.0 and best.mac_share < 0.5 and best.settings["thresholds"][0] == 0.0


@pytest.mark.parametrize("kind", ["classification", "tagging", "question_answering"])
def test_a_part_of_a_recording_is_the_recording_of_a_part(every_task: dict[str, Path], kind: str) -> None:
    model, rows = Predictor.load(every_task[kind]), runs.rows(kind, 20, 4)
    subject = CalibrationContext(model.network, model.model.method, Data(rows, model.prepare(rows)))
    chosen = np.arange(20) % 3 == 1
    some, tape = subject.select_rows(chosen, record_exits(model.network, subject.data))
    again = Data([row for row, wanted in zip(rows, chosen, strict=True) if wanted], [])
    again = Data(again.rows, model.prepare(again.rows))
    assert some.data == again
    fresh = record_exits(model.network, again)
    assert all(torch.allclose(tape.logits[layer], fresh.logits[layer], atol=1e-5) for layer in fresh.logits)
    for settings in ({}, {"threshold": 0.5}):
        ours, theirs = some.run(settings, tape), some.run(settings, fresh)
        assert np.array_equal(ours.exit_layer, theirs.exit_layer) and np.array_equal(ours.macs, theirs.macs)


def test_enough_rows_are_searched_and_few_are_not(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offramp.calibration import calibrate as module

    asked = []
    monkeypatch.setattr(module, "FEW_ROWS", 20)
    monkeypatch.setattr(module, "cross_fitted_gains", lambda subject, *_: asked.append(len(subject.data.rows)) or [])
    model = Predictor.load(trained)
    for count in (module.FEW_ROWS - 1, module.FEW_ROWS):
        rows = runs.rows("classification", count, 5)
        calibrate(model.network, model.model.method, Data(rows, model.prepare(rows)), "rows", "")
    assert asked == [module.FEW_ROWS]
