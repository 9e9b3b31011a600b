"""Settings evaluated by looking up the outcomes of every exit: the same points as by replaying them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from offramp import methods
from offramp.calibration.calibrate import CalibrationContext, candidate_settings, point_evaluator
from offramp.calibration.loss_bounds import mean_upper_bounds
from offramp.calibration.replay import record_exits, with_outcomes
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from offramp.training.schedule import Schedule
from tests import factories

FAST = Schedule(epochs=1, batch_size=16, lr=0.01)
REPLAYED = [name for name in methods.names() if methods.get(name).replays]


def recorded(run: Path, count: int) -> tuple[CalibrationContext, object]:
    model = Predictor.load(run)
    rows = factories.labelled_rows(model.task.name, count, 5)
    data = Data(rows, model.prepare(rows))
    method = model.model.method
    recording = record_exits(model.network, data, policy=method.policy(model.network, method.settings()))
    return CalibrationContext(model.network, method, data), recording


@pytest.mark.parametrize("method", REPLAYED)
def test_looked_up_points_are_the_replayed_points(base: str, tmp_path: Path, method: str) -> None:
    context, recording = recorded(factories.run_folder(base, tmp_path, method, schedule=FAST), 40)
    known = with_outcomes(context.network, recording, context.data)  # type: ignore[arg-type]
    assert known.outcomes is not None
    fast, slow = point_evaluator(context, known), point_evaluator(context, recording)  # type: ignore[arg-type]
    settings = candidate_settings(context.network, context.method, known)
    if context.method.space.name == "threshold":  # type: ignore[union-attr]
        exits = len(context.network.exit_heads)
        limits = tuple(np.linspace(0.0, 0.6, exits).tolist())  # the first exit is closed
        settings += [{"thresholds": limits, "temperatures": (1.5,) * exits}]
    for one in [*settings, {}]:
        a, b = fast(one), slow(one)
        assert asdict(a).keys() == asdict(b).keys() and a.settings == b.settings
        for name in ("mac_share", "score", "mean_exit_layer", "seen", "error"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-9), (one, name)
        assert np.array_equal(a.row_losses, b.row_losses)  # type: ignore[arg-type]


def test_outcomes_of_some_rows_are_those_of_a_smaller_recording(trained: Path) -> None:
    context, recording = recorded(trained, 30)
    known = with_outcomes(context.network, recording, context.data)  # type: ignore[arg-type]
    chosen = np.arange(30) % 3 > 0
    few, part = context.select_rows(chosen, known)
    _, plain = context.select_rows(chosen, recording)  # type: ignore[arg-type]
    again = with_outcomes(few.network, plain, few.data).outcomes
    assert part.outcomes is not None and again is not None
    for name, values in vars(again).items():
        assert np.allclose(getattr(part.outcomes, name), values), name


def test_tasks_whose_metric_is_no_mean_of_rows_have_no_outcomes(base: str, tmp_path: Path) -> None:
    run = factories.run_folder(base, tmp_path, "berxit", "regression", schedule=FAST)
    context, recording = recorded(run, 12)
    assert with_outcomes(context.network, recording, context.data) is recording  # type: ignore[arg-type]


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (7, 0), (0, 7), (12, 5), (30, 270), (300, 0)])
def test_bounds_from_counts_are_those_from_rows(worse: int, better: int) -> None:
    losses = np.zeros((1, 300))
    losses[0, :worse], losses[0, worse : worse + better] = 1.0, -1.0
    counted = mean_upper_bounds(losses, np.array([0.9]))[0]
    almost = np.where(losses == 0.0, 1e-9, losses)  # no longer right or wrong: a weight is drawn for each row
    assert counted == pytest.approx(mean_upper_bounds(almost, np.array([0.9]))[0], abs=0.004)
