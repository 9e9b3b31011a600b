"""Warnings of calibration: which exits do not pay, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offramp.calibration import calibrate as module
from offramp.calibration.diagnostics import calibration_warnings, collapsed_exits
from offramp.calibration.replay import ExitRecording
from offramp.core.cost import HeadCost
from offramp.inference.operating_points import OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, pack_rows
from offramp.training.schedule import Schedule
from tests import factories

COUNT = 40
LABELS = torch.arange(COUNT) % 2
ROWS = [{"text": "it is a film", "label": ("bad", "good")[i % 2]} for i in range(COUNT)]
QUICK = Schedule(1, 8, 0.001)


def one_hot(labels: Tensor, confidence: float = 3.0) -> Tensor:
    return torch.nn.functional.one_hot(labels, 2).float() * confidence


CORRECT = {layer: one_hot(LABELS) for layer in range(4)}
CONSTANT = one_hot(torch.zeros(COUNT, dtype=torch.int64), 0.1)


def warnings_of(
    run: Path, monkeypatch: pytest.MonkeyPatch, logits: dict[int, Tensor], expensive_heads: bool = False
) -> tuple[str, ...]:
    """Return the warnings of a calibration in which the exits have these logits."""
    model = Predictor.load(run)
    data = Data(ROWS, model.prepare(ROWS))
    recording = ExitRecording(logits, {}, pack_rows(model.task, data.encoded))
    if expensive_heads:
        for exit_head in model.network.exit_heads.values():
            exit_head.cost = HeadCost(10**9, 0)
    monkeypatch.setattr(module, "record_exits", lambda *_, **__: recording)
    return module.find_operating_points(model.network, model.model.method, data, "rows", "").warnings


def test_no_warning_for_correct_exits(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(trained, monkeypatch, CORRECT) == ()


def test_warning_names_collapsed_exits(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(trained, monkeypatch, {**CORRECT, 0: CONSTANT})
    assert warning.startswith("exit 0:") and "collapsed" in warning
    both = warnings_of(trained, monkeypatch, {**CORRECT, 0: CONSTANT, 2: CONSTANT})
    assert both[0].startswith("exits 0, 2:")


def test_constant_exits_are_not_collapsed_if_the_full_model_is_constant_too(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = one_hot(torch.ones(COUNT, dtype=torch.int64))
    warnings = warnings_of(trained, monkeypatch, dict.fromkeys(range(4), constant))
    assert not [warning for warning in warnings if "collapsed" in warning]


def test_warning_for_heads_that_cost_more_than_they_save(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(trained, monkeypatch, CORRECT, expensive_heads=True)
    assert "heads cost more" in warning


def test_warning_if_no_row_leaves(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "candidate_settings", lambda *_: [{"threshold": 1e-9}])  # below any uncertainty
    (warning,) = warnings_of(trained, monkeypatch, CORRECT)
    assert "no row ever leaves" in warning


def test_warning_if_the_loss_is_known_imprecisely(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exits and full model both guess, and disagree; the exits happen to be luckier."""
    exits, full = LABELS.clone(), LABELS.clone()
    exits[::4], full[1::2] = 1 - exits[::4], 1 - full[1::2]
    exit_logits = {**dict.fromkeys(range(3), one_hot(exits)), 3: one_hot(full)}
    warning, majority = warnings_of(trained, monkeypatch, exit_logits)
    assert "most frequent answer" in majority
    assert "known to ±" in warning and f"{COUNT} rows" in warning


def test_warning_if_exits_are_wrong(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_hot(1 - LABELS)
    warning, left_out = warnings_of(trained, monkeypatch, {0: wrong, 1: wrong, 2: wrong, 3: one_hot(LABELS)})
    assert "two points or more" in warning and "no cheaper setting is useful" in left_out


@pytest.mark.parametrize(("layer", "warnings"), [(1, 0), (2, 1)])
def test_no_warning_for_exits_that_no_row_may_take(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, warnings: int
) -> None:
    """With RevPC every row runs at least one layer after the prefix, so the exit of the prefix is never used."""
    model = Predictor.load(factories.run_folder(base, tmp_path, "alberta", schedule=QUICK))
    data = Data(ROWS, model.prepare(ROWS))
    real = module.CalibrationContext(model.network, model.model.method, data).record()
    recording = replace(real, logits={**{n: one_hot(LABELS) for n in real.logits}, layer: CONSTANT})
    monkeypatch.setattr(module, "record_exits", lambda *_, **__: recording)
    found = module.find_operating_points(model.network, model.model.method, data, "rows", "").warnings
    collapsed = [warning for warning in found if "collapsed" in warning]
    assert len(collapsed) == warnings and all("head=…" in warning for warning in collapsed)


@pytest.mark.parametrize(("share", "warns"), [(0.5, False), (1.0, True)])
def test_full_setting_that_saves_by_itself_needs_no_cheaper_one(trained: Path, share: float, warns: bool) -> None:
    point = OperatingPoint({}, share, 0.9, 2.0)
    points = OperatingPoints("accuracy", True, {"rows": 9}, (point,))
    warnings = calibration_warnings(Predictor.load(trained).network, None, [point], points)
    assert any("no setting is cheaper" in warning for warning in warnings) == warns


def test_collapsed_exits_of_a_regression_give_one_number(tmp_path: Path, base: str) -> None:
    model = Predictor.load(factories.run_folder(base, tmp_path, "berxit", "regression", schedule=QUICK))
    logits = {layer: torch.linspace(0, 1, 30)[:, None] for layer in range(4)} | {1: torch.full((30, 1), 0.5)}
    packed = pack_rows(model.task, model.prepare(factories.labelled_rows("regression", 30)))
    recording = ExitRecording(logits, {}, packed)
    assert collapsed_exits(model.network, recording, [0, 1, 2]) == [1]
    assert collapsed_exits(model.network, recording, [0, 2]) == []


def test_training_emits_and_stores_the_warnings(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibration_warnings", lambda *_: ("the roof leaks",))
    with pytest.warns(UserWarning, match="the roof leaks"):
        run = factories.run_folder(base, tmp_path, "branchynet", schedule=QUICK)
    points = Predictor.load(run).points
    assert points is not None and points.warnings[0] == "the roof leaks"
