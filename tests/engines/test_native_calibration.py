"""Operating points that are calibrated on the C++ engine, in its own precision."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import offramp
from offramp.calibration.calibrate import CalibrationContext, CalibrationEngine
from offramp.core.policy import Policy
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference import run_folder
from offramp.inference.batching import score_policy
from offramp.inference.operating_points import load_points
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import factories


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "own"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = factories.labelled_rows("classification", 120, 7)
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "new.jsonl"


def test_points_and_proofs_belong_to_the_engine_and_precision(own: Path, data: Path) -> None:
    points = offramp.calibrate(own, data, risk=0.2, confidence=0.9, engine="native", precision="int8", threads=1)
    assert (points.engine, points.precision) == ("native", "int8")
    assert (points.guarantees[0].engine, points.guarantees[0].precision) == ("native", "int8")
    assert offramp.load(own, engine="native", precision="int8").settings(risk=0.2) is not None
    with pytest.raises(OfframpError, match="proven in int8"):
        offramp.load(own, engine="native").settings(risk=0.2)


@pytest.mark.filterwarnings("ignore:rows of")
def test_points_for_a_disagreement_belong_to_a_precision_too(own: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in factories.labelled_rows("classification", 120, 7)]
    source = factories.write_jsonl(tmp_path / "texts.jsonl", rows)
    offramp.calibrate(own, source)
    exact = load_points(own).disagreements
    for _ in range(2):  # replaced the second time, not added again
        both = offramp.calibrate(own, source, engine="native", precision="int8").disagreements
        assert both[: len(exact)] == exact and len(both) == 2 * len(exact)
        assert {(one.engine, one.precision) for one in both[len(exact) :]} == {("native", "int8")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offramp.load(own, engine="native", precision="int8").predict(["a good film"], max_disagreement=0.05)


@pytest.mark.parametrize(("engine", "precision"), [("native", "fp32"), ("native", "int8"), ("torch", "fp32")])
def test_points_have_the_scores_of_real_runs(own: Path, data: Path, engine: str, precision: Any) -> None:
    points = offramp.calibrate(own, data, engine=engine, precision=precision)
    predictor, rows = Predictor.load(own, engine, precision), factories.labelled_rows("classification", 120, 7)
    scored, _ = score_policy(predictor.network, predictor.engine, Policy(), Data(rows, predictor.prepare(rows)))
    assert points.full_point.score == pytest.approx(scored[points.metric])
    assert predictor.points is not None and predictor.points.precision == precision


def test_a_recording_has_the_numbers_of_its_engine(own: Path) -> None:
    rows = factories.labelled_rows("classification", 6, 7)
    predictor = Predictor(run_folder.load_run(own), None, "native", EngineOptions("int8", 1))
    given = Data(rows, predictor.prepare(rows))
    place = CalibrationEngine("native", "int8", predictor.engine)
    method = predictor.model.method
    exact, low = (
        CalibrationContext(predictor.network, method, given, engine=one).record()
        for one in (CalibrationEngine(), place)
    )
    real = predictor.run(given.encoded, method.settings())
    assert [row.tolist() for row in low.logits[predictor.network.depth]] == [row.tolist() for row in real.logits]
    assert not exact.logits[predictor.network.depth].equal(low.logits[predictor.network.depth])


def test_a_search_is_not_bound_to_an_engine(own: Path, data: Path) -> None:
    with pytest.raises(OfframpError, match="search first"):
        offramp.calibrate(own, data, search=True, engine="native")
