"""Points for a latency: chosen by predicted times, confirmed by a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from offramp.calibration import latency
from offramp.calibration import time_model as time_models
from offramp.calibration.latency import (
    LatencyRequest,
    PredictedLatency,
    choose_in_time,
    find_latency_point,
    rows_of_all_lengths,
)
from offramp.calibration.time_model import FEATURES, TimeModel
from offramp.errors import OfframpError
from offramp.inference.operating_points import LatencyPoint, OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import factories

ROWS = factories.labelled_rows("classification", 10)
CURVE = (
    OperatingPoint({"threshold": 1.0}, 0.1, 0.8, 1.0),
    OperatingPoint({"threshold": 0.5}, 0.5, 0.9, 3.0),
    OperatingPoint({}, 1.0, 0.88, 6.0),
)
POINTS = OperatingPoints("accuracy", True, {"name": "dev", "rows": 3, "fingerprint": "0"}, CURVE)


@pytest.fixture
def own_run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def predicted(*times: list[float]) -> list[PredictedLatency]:
    return [PredictedLatency(point, np.array(ms)) for point, ms in zip(CURVE, times, strict=True)]


def find(run: Path, seconds: float) -> LatencyPoint:
    return find_latency_point(str(run), POINTS, ROWS, "rows", LatencyRequest(seconds, engine="torch"))


@pytest.mark.parametrize(
    ("ms", "percentile", "threshold"),
    [(10.0, 95.0, 0.5), (4.0, 95.0, 1.0), (4.0, 50.0, 0.5), (100.0, 100.0, 0.5)],
)
def test_choose_in_time_takes_the_most_accurate_point(ms: float, percentile: float, threshold: float) -> None:
    latencies = predicted([1.0, 2.0, 2.0], [3.0, 4.0, 9.0], [8.0, 8.0, 9.0])
    chosen = choose_in_time(latencies, POINTS, LatencyRequest(ms / 1000, percentile))
    assert chosen.point.settings["threshold"] == threshold


def test_choose_in_time_names_what_is_possible() -> None:
    latencies = predicted([4.0, 4.0], [6.0, 6.0], [9.0, 9.0])
    with pytest.raises(OfframpError, match=r"takes 4ms(.|\n)*4\.4ms"):
        choose_in_time(latencies, POINTS, LatencyRequest(0.001))
    with pytest.raises(OfframpError, match="takes 8ms"):
        choose_in_time(latencies, POINTS, LatencyRequest(0.005), slowdown=2.0)


def test_real_run_that_is_slower_than_predicted_changes_the_point(
    own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = {0.1: 2.0, 0.5: 8.0, 1.0: 10.0}  # twice as slow as predicted
    monkeypatch.setattr(latency, "time_model_of", lambda *_: None)
    monkeypatch.setattr(latency, "predict_latencies", lambda *_: predicted([1.0] * 10, [4.0] * 10, [5.0] * 10))
    monkeypatch.setattr(latency, "measure_latencies", lambda _, point, rows: np.full(len(rows), real[point.mac_share]))
    chosen = find(own_run, 0.006)
    assert (chosen.mac_share, chosen.predicted, chosen.measured, chosen.score) == (0.1, 1.0, 2.0, 0.8)
    assert (chosen.milliseconds, chosen.percentile, chosen.engine) == (6.0, 95.0, "torch")
    with pytest.raises(OfframpError, match="fastest point"):
        find(own_run, 0.0015)


@pytest.mark.parametrize("old", ["{", '{"model": "of other weights"}'])
def test_find_latency_point_never_reads_old_points(own_run: Path, monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    monkeypatch.setattr(latency, "time_model_of", lambda *_: None)
    monkeypatch.setattr(latency, "predict_latencies", lambda *_: [PredictedLatency(CURVE[-1], np.ones(10))])
    monkeypatch.setattr(latency, "measure_latencies", lambda _, point, rows: np.ones(len(rows)))
    (own_run / "points.json").write_text(old)
    assert find(own_run, 1.0).measured == 1.0


def store_outdated_time_model(run: Path, ms: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Store a time model in which everything takes `ms`, on a machine where it now takes 1; return the values used."""
    place, used = time_models.measurement_place(Predictor.load(run, "torch")), list[float]()
    time_models.store_time_model(run, TimeModel(dict.fromkeys(FEATURES, ms), 0.0, 1, place))

    def predict(model: Predictor, points: OperatingPoints, data: Data, times: TimeModel) -> list[PredictedLatency]:
        used.append(times.ms["call"])
        return [PredictedLatency(point, np.full(len(data.rows), used[-1])) for point in points.points]

    fresh = TimeModel(dict.fromkeys(FEATURES, 1.0), 0.0, 1, place)
    monkeypatch.setattr(time_models, "measure_time_model", lambda *_: fresh)
    monkeypatch.setattr(latency, "predict_latencies", predict)
    monkeypatch.setattr(latency, "measure_latencies", lambda _, point, rows: np.ones(len(rows)))
    return used


def test_time_model_of_a_busy_machine_is_measured_again_once(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = store_outdated_time_model(own_run, 50.0, monkeypatch)
    chosen = find(own_run, 0.005)
    assert used == [50.0, 1.0] and (chosen.predicted, chosen.score) == (1.0, 0.9)
    find(own_run, 0.005)
    assert used[2:] == [1.0], "the new model was stored"
    with pytest.raises(OfframpError, match="fastest point takes 1ms"):
        find(own_run, 0.0005)
    assert used[3:] == [1.0, 1.0]


def test_time_model_is_measured_again_if_times_keep_changing(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = store_outdated_time_model(own_run, 1e-9, monkeypatch)
    monkeypatch.setattr(latency, "ATTEMPTS", 1)
    real = iter([9.0, 1.0])  # the first measurement is disturbed
    monkeypatch.setattr(latency, "measure_latencies", lambda _, point, rows: np.full(len(rows), next(real)))
    assert find(own_run, 0.005).measured == 1.0
    assert used == [1e-9, 1.0]


def test_rows_of_all_lengths_are_sorted_and_reach_both_ends(trained: Path) -> None:
    model, rows = Predictor.load(trained, "torch"), factories.labelled_rows("classification", 24, 2)
    data = Data(rows, model.prepare(rows))
    few = [len(data.encoded[i].ids) for i in rows_of_all_lengths(data, 5)]
    lengths = sorted(len(e.ids) for e in data.encoded)
    assert few == sorted(few) and (few[0], few[-1], len(few)) == (lengths[0], lengths[-1], 5)
    every = rows_of_all_lengths(data, 100)
    assert every == sorted(every, key=lambda i: (len(data.encoded[i].ids), i))


@pytest.mark.parametrize("percentile", [0.0, -1.0, 101.0, float("nan")])
def test_latency_request_refuses_percentiles_out_of_range(percentile: float) -> None:
    with pytest.raises(OfframpError, match="percentile"):
        LatencyRequest(0.005, percentile)


def test_latency_request_refuses_unknown_engines_and_precisions() -> None:
    with pytest.raises(OfframpError, match="engine"):
        LatencyRequest(0.005, engine="abacus")
    with pytest.raises(OfframpError, match="precision"):
        LatencyRequest(0.005, precision="fp7")  # type: ignore[arg-type]


def test_stored_time_models_are_read_back_as_json(own_run: Path) -> None:
    place = {"hardware": "x"}
    time_models.store_time_model(own_run, TimeModel(dict.fromkeys(FEATURES, 1.0), 0.1, 3, place))
    (stored,) = json.loads((own_run / time_models.FILE).read_text())
    assert stored["place"] == place and set(stored["ms"]) == set(FEATURES)
