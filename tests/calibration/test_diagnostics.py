"""Calibration says when exits do not pay, which, and why."""

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
from tests import runs

COUNT = 40
TRUTH = torch.arange(COUNT) % 2
ROWS = [{"text": "it is a film", "label": ("bad", "good")[i % 2]} for i in range(COUNT)]


def said(answers: Tensor, sure: float = 3.0) -> Tensor:
    return torch.nn.functional.one_hot(answers, 2).float() * sure


def warned(
    run: Path, monkeypatch: pytest.MonkeyPatch, logits: dict[int, Tensor], dear: bool = False
) -> tuple[str, ...]:
    """What calibration notices about a model whose exits say these things."""
    model = Predictor.load(run)
    data = Data(ROWS, model.prepare(ROWS))
    tape = ExitRecording(logits, {}, pack_rows(model.task, data.encoded))
    if dear:
        for exit_head in model.network.exit_heads.values():
            exit_head.cost = HeadCost(10**9, 0)
    monkeypatch.setattr(module, "record_exits", lambda *_, **__: tape)
    return module.calibrate(model.network, model.model.method, data, "rows", "").warnings


GOOD = {layer: said(TRUTH) for layer in range(4)}


def test_good_exits_are_nothing_to_complain_of(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned(trained, monkeypatch, GOOD) == ()


def test_collapsed_heads_are_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = warned(trained, monkeypatch, {**GOOD, 0: said(torch.zeros(COUNT, dtype=torch.int64), 0.1)})
    assert only.startswith("exit 0:") and "collapsed" in only
    flat = said(torch.ones(COUNT, dtype=torch.int64), 0.1)
    both = warned(trained, monkeypatch, {**GOOD, 0: flat, 2: flat})
    assert both[0].startswith("exits 0, 2:")


def test_one_answer_is_no_collapse_where_the_full_model_gives_it_too(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = said(torch.ones(COUNT, dtype=torch.int64))
    assert not [w for w in warned(trained, monkeypatch, dict.fromkeys(range(4), same)) if "collapsed" in w]


def test_dear_heads_are_told_from_exits_nobody_takes(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (dear,) = warned(trained, monkeypatch, GOOD, dear=True)
    assert "heads cost more" in dear
    monkeypatch.setattr(module, "candidate_settings", lambda *_: [{"threshold": 1e-9}])  # below any doubt
    (never,) = warned(trained, monkeypatch, GOOD)
    assert "no row ever leaves" in never


def test_a_loss_that_nobody_knows_is_said(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full model guesses and so do its exits, otherwise and luckier: no telling what new rows will bring."""
    guess, other = TRUTH.clone(), TRUTH.clone()
    guess[::4], other[1::2] = 1 - guess[::4], 1 - other[1::2]
    (only,) = warned(trained, monkeypatch, {**dict.fromkeys(range(3), said(guess)), 3: said(other)})
    assert "known to ±" in only and f"{COUNT} rows" in only


def test_exits_that_are_wrong_do_not_pay(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = said(1 - TRUTH)
    (only,) = warned(trained, monkeypatch, {0: wrong, 1: wrong, 2: wrong, 3: said(TRUTH)})
    assert "two points or more" in only


def test_exits_that_nobody_may_take_are_not_complained_of(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With RevPC every row runs one layer after the prefix at least: the exit of the prefix may say what it likes."""
    run = runs.train(base, tmp_path, "alberta", schedule=runs.Schedule(1, 8, 0.001))
    flat = said(torch.zeros(COUNT, dtype=torch.int64), 0.1)
    model = Predictor.load(run)
    data = Data(ROWS, model.prepare(ROWS))
    real = module.CalibrationContext(model.network, model.model.method, data).record()
    for layers, named in (((1,), 0), ((2,), 1)):
        tape = replace(real, logits={**{n: said(TRUTH) for n in real.logits}, **dict.fromkeys(layers, flat)})
        monkeypatch.setattr(module, "record_exits", lambda *_, tape=tape, **__: tape)
        found = module.calibrate(model.network, model.model.method, data, "rows", "").warnings
        collapses = [warning for warning in found if "collapsed" in warning]
        assert len(collapses) == named and all("head=…" in warning for warning in collapses)


def test_what_saves_by_itself_need_not_have_cheaper_settings(trained: Path) -> None:
    network = Predictor.load(trained).network
    half, whole = (OperatingPoint({}, share, 0.9, 2.0) for share in (0.5, 1.0))
    told = [
        calibration_warnings(network, None, [one], OperatingPoints("accuracy", True, {"rows": 9}, (one,)))
        for one in (half, whole)
    ]
    assert told[0] == () and "no setting is cheaper" in told[1][0]


def test_a_regression_head_that_says_one_number(tmp_path: Path, base: str) -> None:
    model = Predictor.load(runs.train(base, tmp_path, "berxit", "regression", schedule=runs.Schedule(1, 8, 0.001)))
    logits = {layer: torch.linspace(0, 1, 30)[:, None] for layer in range(4)} | {1: torch.full((30, 1), 0.5)}
    packed = pack_rows(model.task, model.prepare(runs.rows("regression", 30)))
    tape = ExitRecording(logits, {}, packed)
    assert collapsed_exits(model.network, tape, [0, 1, 2]) == [1] and collapsed_exits(model.network, tape, [0, 2]) == []


def test_training_warns_too(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibration_warnings", lambda *_: ("the roof leaks",))
    with pytest.warns(UserWarning, match="the roof leaks"):
        run = runs.train(base, tmp_path, "branchynet", schedule=runs.Schedule(1, 8, 0.001))
    points = Predictor.load(run).points
    assert points is not None and points.warnings == ("the roof leaks",)
