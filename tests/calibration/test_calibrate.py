"""Calibration: a replay equals a real run, and points promise what a new evaluation finds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from offramp import methods
from offramp.calibration import calibrate as module
from offramp.calibration.calibrate import calibration_subset, find_operating_points
from offramp.calibration.replay import record_exits, replay
from offramp.calibration.thresholds import threshold_cuts
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.batching import score_policy
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from offramp.nn.confidence import row_entropy
from tests import factories

WITH_EXITS = ["classification", "pairs", "tagging", "question_answering"]


def load_with_rows(run: Path, kind: str) -> tuple[Predictor, Data]:
    """Return a run and rows, one of which needs several windows where contexts are read in windows."""
    model = Predictor.load(run)
    rows = factories.labelled_rows(kind, 30, 4)
    if kind == "question_answering":
        rows[3]["context"] = "the man is good . " * 20 + rows[3]["context"]
        rows[3]["answers"] = {"text": [], "answer_start": []}
    return model, Data(rows, model.prepare(rows))


@pytest.mark.parametrize("kind", WITH_EXITS)
def test_replay_equals_a_real_run(every_task: dict[str, Path], kind: str) -> None:
    model, data = load_with_rows(every_task[kind], kind)
    recording = record_exits(model.network, data)
    entropies = [row_entropy(model.task, recording.logits[layer], recording.packed) for layer in (0, 1, 2)]
    cuts = threshold_cuts(np.concatenate([entropy.double().numpy() for entropy in entropies]))
    exits = set()
    for threshold in [0.0, *cuts[::6]]:
        settings = model.settings(given={"threshold": threshold})
        real = model.run(data.encoded, settings, batch_size=7)
        replayed = replay(model.network, recording, model.model.method.policy(model.network, settings))
        assert np.array_equal(real.exit_layer, replayed.exit_layer)
        assert np.array_equal(real.macs, replayed.macs)
        assert np.array_equal(real.tokens_kept, replayed.tokens_kept)
        for a, b in zip(real.logits, replayed.logits, strict=True):
            assert a.shape == b.shape and np.allclose(a, b, atol=1e-5)
        exits |= set(real.exit_layer)
    assert len(exits) > 2, "rows left at one exit only: little was tested"


@pytest.mark.parametrize(
    ("method", "rows", "tokens", "kept"),
    [
        ("length_adaptive", 30, 9, 30),
        ("length_adaptive", 3000, 9, 1000),
        ("length_adaptive", 900, 400, 250),
        ("length_adaptive", 300, 9000, 20),
        ("branchynet", 3000, 9, 3000),  # recorded once, however many settings are tried
        ("adapler", 3000, 9, 1000),
        ("length_adaptive+branchynet", 3000, 9, 1000),
        ("full", 3000, 9, 3000),
    ],
)
def test_calibration_subset_is_bounded_where_each_setting_is_a_run(
    monkeypatch: pytest.MonkeyPatch, method: str, rows: int, tokens: int, kept: int
) -> None:
    monkeypatch.setattr(module, "FEW_ROWS", 20)
    data = Data([{"text": ""}] * rows, [Encoded([5] * tokens, [], n, [], [], 0) for n in range(rows)])
    assert len(calibration_subset(methods.get(method), data).rows) == kept


@pytest.mark.parametrize("kind", WITH_EXITS)
def test_points_promise_what_a_new_evaluation_finds(every_task: dict[str, Path], kind: str) -> None:
    model, data = load_with_rows(every_task[kind], kind)
    points = find_operating_points(model.network, model.model.method, data, "rows", "f00")
    assert points.data == {"name": "rows", "rows": 30, "fingerprint": "f00"}
    assert (points.engine, points.precision) == ("torch", "fp32")
    shares, scores = [p.mac_share for p in points.points], [p.score for p in points.points]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and len(shares) > 1
    ranks = [(p.score, -(p.loss_upper or 0.0)) for p in points.points[:-1]]
    assert scores[:-1] == sorted(scores[:-1]) and len(set(ranks)) == len(ranks), "a costlier point is better"
    assert points.full_point.settings == asdict(model.model.method.settings())
    assert points.full_point.mean_exit_layer == 3
    full = model.full_macs(data.encoded)
    for point in points.points:
        policy = model.model.method.policy(model.network, model.settings(given=point.settings))
        metrics, output = score_policy(model.network, model.engine, policy, data, batch_size=5)
        assert output.macs.sum() / full == pytest.approx(point.mac_share, abs=1e-12)
        assert metrics[points.metric] == pytest.approx(point.seen, abs=1e-9)


@pytest.mark.parametrize("kind", ["regression", "masked_lm"])
def test_method_without_settings_has_one_point(every_task: dict[str, Path], kind: str) -> None:
    model, data = load_with_rows(every_task[kind], kind)
    (point,) = find_operating_points(model.network, model.model.method, data, "rows", "0").points
    assert (point.mac_share, point.mean_exit_layer) == (1.0, 3.0)


def test_training_calibrates_on_its_dev_rows(trained: Path) -> None:
    model = Predictor.load(trained)
    rows = factories.labelled_rows("classification", 24, 1)
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    again = find_operating_points(model.network, model.model.method, data, model.points.data["name"], "")
    assert [(p.mac_share, p.score) for p in again.points] == [(p.mac_share, p.score) for p in model.points.points]


def test_exit_thresholds_are_searched_on_enough_rows_only(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(module, "FEW_ROWS", 20)
    monkeypatch.setattr(module, "cross_fitted_gains", lambda context, *_: searched.append(len(context.data.rows)) or [])
    model = Predictor.load(trained)
    for count in (19, 20):
        rows = factories.labelled_rows("classification", count, 5)
        find_operating_points(model.network, model.model.method, Data(rows, model.prepare(rows)), "rows", "")
    assert searched == [20]


def test_no_setting_uses_a_closed_exit(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_ROWS", 20)
    model, rows = Predictor.load(trained), factories.labelled_rows("classification", 40, 5)
    data = Data(rows, model.prepare(rows))
    network, method = model.network, model.model.method
    found = find_operating_points(network, method, data, "rows", "", closed_exits=frozenset({0}))
    *cheaper, full = found.points
    assert cheaper and all(p.settings["thresholds"][0] == 0.0 < max(p.settings["thresholds"]) for p in cheaper)
    assert found.data["closed_exits"] == [0] and full.settings["thresholds"] == ()
    context = module.CalibrationContext(network, method, data, closed_exits=frozenset({0, 2}))
    for _, settings in module.search_exit_settings(context, context.record()):
        assert settings["thresholds"][0] == settings["thresholds"][2] == 0.0


def test_exits_that_cannot_be_closed_are_refused(every_task: dict[str, Path], trained: Path) -> None:
    model, data = load_with_rows(every_task["regression"], "regression")
    with pytest.raises(OfframpError, match="exit0=false"):
        find_operating_points(model.network, methods.get("pabee"), data, "rows", "", closed_exits=frozenset({0}))
    model, data = load_with_rows(trained, "classification")
    with pytest.raises(OfframpError, match="use some of: 0, 1, 2"):
        find_operating_points(model.network, model.model.method, data, "rows", "", closed_exits=frozenset({7}))


@pytest.mark.parametrize("kind", ["classification", "tagging", "question_answering"])
def test_select_rows_equals_a_recording_of_those_rows(every_task: dict[str, Path], kind: str) -> None:
    model, rows = Predictor.load(every_task[kind]), factories.labelled_rows(kind, 20, 4)
    context = module.CalibrationContext(model.network, model.model.method, Data(rows, model.prepare(rows)))
    chosen = np.arange(20) % 3 == 1
    selected, recording = context.select_rows(chosen, record_exits(model.network, context.data))
    some = [row for row, wanted in zip(rows, chosen, strict=True) if wanted]
    assert selected.data == Data(some, model.prepare(some))
    fresh = record_exits(model.network, selected.data)
    assert all(np.allclose(recording.logits[n], fresh.logits[n], atol=1e-5) for n in fresh.logits)
    for settings in ({}, {"threshold": 0.5}):
        first, second = selected.run(settings, recording), selected.run(settings, fresh)
        assert np.array_equal(first.exit_layer, second.exit_layer) and np.array_equal(first.macs, second.macs)
