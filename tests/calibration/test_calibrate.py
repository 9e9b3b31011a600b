"""Calibration: what a replay promises is what a real run does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from offramp import methods
from offramp.calibration.calibrate import calibrate, calibration_subset
from offramp.calibration.replay import record_exits, replay
from offramp.calibration.thresholds import CUTS, threshold_cuts
from offramp.data.tokenization import Encoded
from offramp.inference.batching import score_policy
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import runs

WITH_EXITS = ["classification", "pairs", "tagging", "question_answering"]


def opened(run: Path, kind: str) -> tuple[Predictor, Data]:
    """A run and rows, some of which need several windows where contexts are read in windows."""
    model = Predictor.load(run)
    rows = runs.rows(kind, 30, 4)
    if kind == "question_answering":
        rows[3]["context"] = "the man is good . " * 20 + rows[3]["context"]
        rows[3]["answers"] = {"text": [], "answer_start": []}
    return model, Data(rows, model.prepare(rows))


@pytest.mark.parametrize("kind", WITH_EXITS)
def test_a_replay_is_a_real_run(every_task: dict[str, Path], kind: str) -> None:
    model, data = opened(every_task[kind], kind)
    recording = record_exits(model.network, data)
    exits = set()
    for threshold in [0.0, *threshold_cuts(np.concatenate([_unsure(model, data, layer) for layer in (0, 1, 2)]))[::6]]:
        chosen = model.settings(given={"threshold": threshold})
        real = model.run(data.encoded, chosen, batch_size=7)
        promised = replay(model.network, recording, model.model.method.policy(model.network, chosen))
        assert np.array_equal(real.exit_layer, promised.exit_layer)
        assert np.array_equal(real.macs, promised.macs)
        assert np.array_equal(real.tokens_kept, promised.tokens_kept)
        for a, b in zip(real.logits, promised.logits, strict=True):
            assert a.shape == b.shape and np.allclose(a, b, atol=1e-5)
        exits |= set(real.exit_layer)
    assert len(exits) > 2, "rows left at one place only: little was tested"


def test_the_first_look_is_bounded_where_each_setting_is_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(count: int, tokens: int) -> Data:
        return Data([{"text": ""}] * count, [Encoded([5] * tokens, [], n, [], [], 0) for n in range(count)])

    monkeypatch.setattr("offramp.calibration.calibrate.FEW_ROWS", 20)
    lengths, exits = methods.get("length_adaptive"), methods.get("branchynet")
    sizes = {(rows, tokens): len(calibration_subset(lengths, many(rows, tokens)).rows)
             for rows, tokens in ((30, 9), (3000, 9), (900, 400), (300, 9000))}  # fmt: skip
    assert sizes == {(30, 9): 30, (3000, 9): 1000, (900, 400): 250, (300, 9000): 20}
    assert len(calibration_subset(exits, many(3000, 9)).rows) == 3000  # recorded once, whatever is tried
    assert len(calibration_subset(methods.get("adapler"), many(3000, 9)).rows) == 1000
    assert len(calibration_subset(methods.get("length_adaptive+branchynet"), many(3000, 9)).rows) == 1000
    assert len(calibration_subset(methods.get("full"), many(3000, 9)).rows) == 3000


def _unsure(model: Predictor, data: Data, layer: int) -> np.ndarray:
    """The entropy of every row after a layer."""
    from offramp.nn.confidence import row_entropy

    recording = record_exits(model.network, data)
    return row_entropy(model.task, recording.logits[layer], recording.packed).double().numpy()


@pytest.mark.parametrize("kind", WITH_EXITS)
def test_points_promise_what_a_fresh_evaluation_finds(every_task: dict[str, Path], kind: str) -> None:
    model, data = opened(every_task[kind], kind)
    points = calibrate(model.network, model.model.method, data, "rows", "f00")
    assert points.data == {"name": "rows", "rows": 30, "fingerprint": "f00"}
    shares, scores = [p.mac_share for p in points.points], [p.score for p in points.points]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and len(shares) > 1
    assert scores[:-1] == sorted(set(scores[:-1])), "whoever pays more gets more"
    assert (
        points.full_point.settings == asdict(model.model.method.settings()) and points.full_point.mean_exit_layer == 3
    )
    full = model.full_macs(data.encoded)
    for point in points.points:
        policy = model.model.method.policy(model.network, model.settings(given=point.settings))
        metrics, outcome = score_policy(model.network, model.engine, policy, data, batch_size=5)
        assert outcome.macs.sum() / full == pytest.approx(point.mac_share, abs=1e-12)
        assert metrics[points.metric] == pytest.approx(point.seen, abs=1e-9)


@pytest.mark.parametrize("kind", ["regression", "masked_lm"])
def test_nothing_to_turn_is_one_point(every_task: dict[str, Path], kind: str) -> None:
    model, data = opened(every_task[kind], kind)
    (point,) = calibrate(model.network, model.model.method, data, "rows", "0").points
    assert (point.mac_share, point.mean_exit_layer) == (1.0, 3.0)


def test_the_run_itself_was_calibrated_on_its_dev_rows(trained: Path) -> None:
    model = Predictor.load(trained)
    rows = runs.rows("classification", 24, 1)
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    again = calibrate(model.network, model.model.method, data, model.points.data["name"], "")
    assert [(p.mac_share, p.score) for p in again.points] == [(p.mac_share, p.score) for p in model.points.points]


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(0, 5).map(lambda x: round(x, 3))))
def test_no_value_stands_on_a_cut(values: np.ndarray) -> None:
    made = threshold_cuts(values)
    assert made == sorted(made) and len(made) <= CUTS + 1
    assert not set(made) & set(values) and values.min() < made[0] and values.max() < made[-1]
    parted = {tuple(values < cut) for cut in made}
    assert len(parted) == min(CUTS + 1, len(np.unique(values))) == len(made)
