"""Budgets in time: prices are recovered, points are chosen by them, and a real run has the last word."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offramp.calibration import latency
from offramp.calibration import time_model as prices
from offramp.calibration.latency import (
    LatencyRequest,
    PredictedLatency,
    choose_in_time,
    find_latency_point,
    rows_of_all_lengths,
)
from offramp.calibration.time_model import FEATURES, TimeModel
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference.budget import parse_latency
from offramp.inference.operating_points import LatencyPoint, OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import runs

DATA = {"name": "dev", "rows": 3, "fingerprint": "0"}
CURVE = [
    OperatingPoint({"threshold": 1.0}, 0.1, 0.8, 1.0),
    OperatingPoint({"threshold": 0.5}, 0.5, 0.9, 3.0),
    OperatingPoint({}, 1.0, 0.88, 6.0),
]


def points(*more: LatencyPoint) -> OperatingPoints:
    return OperatingPoints("accuracy", True, DATA, tuple(CURVE), latencies=more)


def found(*times: list[float]) -> list[PredictedLatency]:
    return [PredictedLatency(point, np.array(ms)) for point, ms in zip(CURVE, times, strict=True)]


@pytest.mark.parametrize(
    ("ms", "percentile", "threshold"),
    [(10.0, 95.0, 0.5), (4.0, 95.0, 1.0), (4.0, 50.0, 0.5), (100.0, 100.0, 0.5)],
)
def test_the_most_accurate_point_in_time(ms: float, percentile: float, threshold: float) -> None:
    known = found([1.0, 2.0, 2.0], [3.0, 4.0, 9.0], [8.0, 8.0, 9.0])
    assert (
        choose_in_time(known, points(), LatencyRequest(ms / 1000, percentile)).point.settings["threshold"] == threshold
    )


def test_what_cannot_be_met_says_what_can() -> None:
    known = found([4.0, 4.0], [6.0, 6.0], [9.0, 9.0])
    with pytest.raises(OfframpError, match=r"fastest point takes 4ms(.|\n)*give 4\.4ms"):
        choose_in_time(known, points(), LatencyRequest(0.001))
    with pytest.raises(OfframpError, match="fastest point takes 8ms"):
        choose_in_time(known, points(), LatencyRequest(0.005), slowdown=2.0)


def test_a_real_run_has_the_last_word(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine proves twice as slow as predicted: another point is taken."""
    own, rows = Path(shutil.copytree(trained, tmp_path / "run")), runs.rows("classification", 10)
    monkeypatch.setattr(latency, "time_model_of", lambda *_: None)
    monkeypatch.setattr(latency, "predict_latencies", lambda *_: found([1.0] * 10, [4.0] * 10, [5.0] * 10))
    slow = {0.1: 2.0, 0.5: 8.0, 1.0: 10.0}
    monkeypatch.setattr(
        latency, "measure_latencies", lambda model, point, rows: np.full(len(rows), slow[point.mac_share])
    )
    chosen = find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.006, engine="torch"))
    assert (chosen.mac_share, chosen.predicted, chosen.measured, chosen.score) == (0.1, 1.0, 2.0, 0.8)
    assert (chosen.milliseconds, chosen.percentile, chosen.engine) == (6.0, 95.0, "torch")
    with pytest.raises(OfframpError, match="fastest point"):
        find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.0015, engine="torch"))


def test_prices_are_measured_once_and_again_elsewhere(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = Predictor.load(trained, "torch"), list[int]()

    def cheap(model: Predictor, texts: runs.Rows) -> TimeModel:
        calls.append(len(texts))
        return TimeModel(dict.fromkeys(FEATURES, 1.0), 0.0, 1, prices.measurement_place(model))

    monkeypatch.setattr(prices, "measure_time_model", cheap)
    first = prices.time_model_of(model, tmp_path, [])
    assert prices.time_model_of(model, tmp_path, []) == first and len(calls) == 1
    monkeypatch.setattr(prices, "hardware", lambda: "another machine")
    assert prices.time_model_of(model, tmp_path, []) != first and len(calls) == 2
    assert len(json.loads((tmp_path / prices.FILE).read_text())) == 2


def test_old_points_are_never_read(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calibrates has new ones in hand: a stale or damaged file must not spoil the work at its end."""
    own, rows = Path(shutil.copytree(trained, tmp_path / "run")), runs.rows("classification", 10)
    monkeypatch.setattr(latency, "time_model_of", lambda *_: None)
    monkeypatch.setattr(
        latency, "predict_latencies", lambda model, points, *_: [PredictedLatency(points.full_point, np.ones(10))]
    )
    monkeypatch.setattr(latency, "measure_latencies", lambda model, point, rows: np.ones(len(rows)))
    for old in ("{", json.dumps({"model": "of other weights"})):
        (own / "points.json").write_text(old)
        assert find_latency_point(str(own), points(), rows, "rows", LatencyRequest(1.0, engine="torch")).measured == 1.0


def lasting(own: Path, ms: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A run that was priced when all took `ms`, on a machine where by now all takes 1; prices as they were used."""
    place, used = prices.measurement_place(Predictor.load(own, "torch")), list[float]()
    prices.store_time_model(own, TimeModel(dict.fromkeys(FEATURES, ms), 0.0, 1, place))

    def priced(model: Predictor, points: OperatingPoints, data: Data, found: TimeModel) -> list[PredictedLatency]:
        used.append(found.ms["call"])
        return [PredictedLatency(point, np.full(len(data.rows), used[-1])) for point in points.points]

    monkeypatch.setattr(prices, "measure_time_model", lambda *_: TimeModel(dict.fromkeys(FEATURES, 1.0), 0.0, 1, place))
    monkeypatch.setattr(latency, "predict_latencies", priced)
    monkeypatch.setattr(latency, "measure_latencies", lambda model, point, rows: np.ones(len(rows)))
    return used


def test_prices_of_a_busy_day_are_measured_anew(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, rows = Path(shutil.copytree(trained, tmp_path / "run")), runs.rows("classification", 10)
    used = lasting(own, 50.0, monkeypatch)
    chosen = find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.005, engine="torch"))
    assert used == [50.0, 1.0] and (chosen.predicted, chosen.score) == (1.0, 0.9)
    find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.005, engine="torch"))
    assert used[2:] == [1.0]  # they were kept
    with pytest.raises(OfframpError, match="fastest point takes 1ms"):
        find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.0005, engine="torch"))
    assert used[3:] == [1.0, 1.0]  # once, not for ever


def test_times_that_keep_changing_are_measured_anew_too(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, rows = Path(shutil.copytree(trained, tmp_path / "run")), runs.rows("classification", 10)
    used = lasting(own, 1e-9, monkeypatch)
    monkeypatch.setattr(latency, "ATTEMPTS", 1)
    slow = iter([9.0, 1.0])  # the first check is disturbed
    monkeypatch.setattr(latency, "measure_latencies", lambda model, point, rows: np.full(len(rows), next(slow)))
    assert find_latency_point(str(own), points(), rows, "rows", LatencyRequest(0.005, engine="torch")).measured == 1.0
    assert used == [1e-9, 1.0]


def test_rows_of_all_lengths(trained: Path) -> None:
    model, rows = Predictor.load(trained, "torch"), runs.rows("classification", 24, 2)
    data = Data(rows, model.prepare(rows))
    few = [len(data.encoded[i].ids) for i in rows_of_all_lengths(data, 5)]
    all_ = sorted(len(e.ids) for e in data.encoded)
    assert few == sorted(few) and few[0] == all_[0] and few[-1] == all_[-1] and len(few) == 5
    assert rows_of_all_lengths(data, 100) == sorted(
        rows_of_all_lengths(data, 100), key=lambda i: (len(data.encoded[i].ids), i)
    )


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 0.005), (" 0.2 s", 0.2), ("800us", 0.0008), (".5ms", 0.0005)])
def test_times_with_units(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5 minutes", "ms", "-5ms", "0ms", "1e3ms", "nan ms"])
def test_times_without(text: str) -> None:
    with pytest.raises(OfframpError, match=r"5ms, 0\.2s or 800us"):
        parse_latency(text)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 101.0, float("nan")])
def test_percentiles_that_are_none(percentile: float) -> None:
    with pytest.raises(OfframpError, match="percentile"):
        LatencyRequest(0.005, percentile)


def test_wishes_nobody_can_hear() -> None:
    with pytest.raises(OfframpError, match="engine"):
        LatencyRequest(0.005, engine="abacus")
    with pytest.raises(OfframpError, match="precision"):
        LatencyRequest(0.005, precision="fp7")  # type: ignore[arg-type]


def test_a_stored_latency_is_used(trained: Path, tmp_path: Path) -> None:
    model = Predictor.load(trained, "torch")
    timed = LatencyPoint(
        5.0, 95.0, {"threshold": 0.25}, 4.0, 4.5, 0.9, 0.5, "torch", "fp32", None, operating_hardware()
    )
    operating.save_points(tmp_path, points(timed))
    model.points = operating.load_points(tmp_path)
    assert model.points == points(timed)
    assert model.settings(latency=0.005).threshold == model.settings(latency=0.02).threshold == 0.25
    assert model.predict(["a good film"], latency=0.005)[0]["label"] in ("good", "bad")
    with pytest.raises(OfframpError, match=r"within 4ms(.|\n)*5ms on torch fp32(.|\n)*--latency 4ms"):
        model.settings(latency=0.004)
    with pytest.raises(OfframpError, match="latency=-1"):
        model.settings(latency=-1)
    with pytest.raises(OfframpError, match="only one"):
        model.settings(0.5, latency=0.005)
    model.points = points(replace(timed, hardware="an abacus"))
    with pytest.warns(UserWarning, match="an abacus"):
        model.settings(latency=0.005)
    model.points = points(replace(timed, threads=3))
    with pytest.warns(UserWarning, match="5ms were measured on 3 threads; this runs on all cores"):
        model.settings(latency=0.005)
    model.how = EngineOptions(threads=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.settings(latency=0.005).threshold == 0.25
    model.how = EngineOptions(threads=1)
    with pytest.warns(UserWarning, match="3 threads; this runs on 1 thread$"):
        model.settings(latency=0.005)
    model.points, model.how = points(replace(timed, engine="other")), EngineOptions()
    with pytest.raises(OfframpError, match="5ms on other fp32"):
        model.settings(latency=0.005)


def operating_hardware() -> str:
    from offramp.utils.hardware import hardware

    return hardware()
