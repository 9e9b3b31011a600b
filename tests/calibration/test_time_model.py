"""The time model: events are counted, known coefficients are recovered, and a model is valid where it was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offramp import engines
from offramp.calibration import time_model
from offramp.calibration.latency import predict_latencies
from offramp.calibration.time_model import FEATURES, TimeModel, fit_time_model, measurement_place, trace_features
from offramp.core.cost import Event
from offramp.engines import EngineOptions
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import factories


def trace(*events: tuple[str, int, list[int], list[int], list[int]]) -> list[Event]:
    parts = [(kind, layer, *map(torch.tensor, rest)) for kind, layer, *rest in events]
    return [Event(*one) for one in parts]  # type: ignore[arg-type]  # tuples of mixed kinds, spelt short


def test_trace_features_count_the_events_of_each_row() -> None:
    events = trace(
        ("embed", 0, [0, 1], [4, 6], [4, 6]),
        ("attend", 1, [0, 1], [4, 0], [4, 6]),
        ("feed", 1, [0], [3], [4]),
        ("head", 1, [0, 1], [4, 6], [4, 6]),
        ("head", 2, [1], [6], [6]),
    )
    first, second = (dict(zip(FEATURES, row, strict=True)) for row in trace_features(events, 2, [4, 6]))
    assert (first["attend"], first["attend.token"], first["attend.pair"]) == (1, 4, 16)
    assert (first["feed"], first["feed.token"], first["head"], first["text.token"]) == (1, 3, 1, 4)
    assert (second["attend"], second["attend.pair"], second["feed"]) == (0, 0, 0)  # no queries: nothing was computed
    assert (second["head"], second["head.token"], second["embed.token"], second["call"]) == (2, 12, 6, 1)
    assert trace_features(events, 2)[0][FEATURES.index("text")] == 0


def test_fit_time_model_recovers_known_coefficients() -> None:
    rng = np.random.default_rng(0)
    features = rng.integers(1, 60, (80, len(FEATURES))).astype(np.float64)
    true = dict.fromkeys(FEATURES, 0.0) | {"call": 0.4, "attend": 0.2, "attend.token": 0.03, "attend.pair": 0.0005,
                                        "feed.token": 0.05, "head": 0.1}  # fmt: skip
    ms = features @ np.array([true[name] for name in FEATURES])
    found, error = fit_time_model(features, ms)
    assert found == pytest.approx(true, abs=1e-9) and error < 1e-9
    noisy, error = fit_time_model(features, ms * rng.normal(1.0, 0.02, len(ms)))
    assert min(noisy.values()) >= 0.0 and 0.005 < error < 0.03
    predicted = TimeModel(noisy, error, 80, {}).predict(features)
    assert np.abs(predicted / ms - 1).max() < 0.05


def simulate_clock(model: Predictor, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the clock of a machine where a half-layer takes 1 ms plus 0.1 ms a token, and nothing else takes time."""
    clock, engine = {"now": 0.0}, model.engine
    attend, feed = type(engine).attend, type(engine).feed

    def slow_attend(self, layer, queries, *more):  # type: ignore[no-untyped-def]  # stands in for the engine's
        clock["now"] += 0.001 + 0.0001 * len(queries)
        return attend(self, layer, queries, *more)

    def slow_feed(self, layer, x):  # type: ignore[no-untyped-def]  # as above
        clock["now"] += 0.001 + 0.0001 * len(x)
        return feed(self, layer, x)

    monkeypatch.setattr(type(engine), "attend", slow_attend)
    monkeypatch.setattr(type(engine), "feed", slow_feed)
    return clock


def measure(model: Predictor, clock: dict[str, float], rows: list[dict[str, Any]]) -> TimeModel:
    def now() -> float:
        clock["now"] += 1e-6  # the clock never stands still
        return clock["now"]

    return time_model.measure_time_model(model, rows, now)


def test_predicted_latencies_of_a_simulated_machine_are_right(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Predictor.load(trained, "torch"), factories.labelled_rows("classification", 30, 5)
    found = measure(model, simulate_clock(model, monkeypatch), rows[:6])
    assert found.error < 0.01 and found.place["engine"] == "torch" and found.samples > 30
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    for latency in predict_latencies(model, model.points, data, found):
        output = model.run(data.encoded, model.settings(given=latency.point.settings))
        lengths = np.array([len(e.ids) for e in data.encoded])
        assert latency.ms == pytest.approx(2 * output.exit_layer * (1 + 0.1 * lengths), rel=0.03, abs=0.01)


def test_predict_latencies_runs_methods_that_cannot_be_replayed(
    every_task: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = Predictor.load(every_task["regression"], "torch"), factories.labelled_rows("regression", 40, 5)
    found = measure(model, simulate_clock(model, monkeypatch), rows[:6])
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    (only,) = predict_latencies(model, model.points, data, found)
    assert only.ms == pytest.approx([6 * (1 + 0.1 * len(e.ids)) for e in data.encoded], rel=0.03)


def test_measurement_place_names_the_version_of_openvino() -> None:
    def place(engine: str) -> dict[str, object]:
        return measurement_place(SimpleNamespace(engine_name=engine, how=EngineOptions()))  # type: ignore[arg-type]  # all that is read

    assert place("openvino")["openvino"] == engines.versions("openvino")["openvino"]
    assert "openvino" not in place("torch")


def test_time_model_is_measured_once_per_place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Predictor.load(trained, "torch"), list[int]()

    def measure(model: Predictor, texts: list[dict[str, Any]]) -> TimeModel:
        calls.append(len(texts))
        return TimeModel(dict.fromkeys(FEATURES, 1.0), 0.0, 1, measurement_place(model))

    monkeypatch.setattr(time_model, "measure_time_model", measure)
    first = time_model.time_model_of(model, tmp_path, [])
    assert time_model.time_model_of(model, tmp_path, []) == first and len(calls) == 1
    monkeypatch.setattr(time_model, "hardware", lambda: "another machine")
    assert time_model.time_model_of(model, tmp_path, []) != first and len(calls) == 2
    assert len(json.loads((tmp_path / time_model.FILE).read_text())) == 2


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "3",
        "null",
        '{"ms": {}}',
        "[1, null, {}]",
        '[{"ms": 3}]',
        '[{"ms": {}, "place": {}}]',
        'MODEL, {"ms": {"call": "x"}, "error": 0.1, "samples": 1, "place": {}}]',
    ],
)
def test_a_damaged_store_of_time_models_counts_as_absent(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    model = Predictor.load(trained, "torch")
    other = TimeModel(dict.fromkeys(FEATURES, 2.0), 0.0, 1, {"hardware": "another machine"})
    damaged = damaged.replace("MODEL", json.dumps([asdict(other)])[:-1])
    (tmp_path / time_model.FILE).write_text(damaged, encoding="utf-8")
    fresh = TimeModel(dict.fromkeys(FEATURES, 1.0), 0.0, 1, measurement_place(model))
    monkeypatch.setattr(time_model, "measure_time_model", lambda *_: fresh)
    assert time_model.time_model_of(model, tmp_path, []) == fresh
    kept = [asdict(other)] if "another machine" in damaged else []
    assert json.loads((tmp_path / time_model.FILE).read_text(encoding="utf-8")) == [*kept, asdict(fresh)]
