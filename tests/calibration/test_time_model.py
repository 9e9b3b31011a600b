"""Prices of a machine: what was done is counted, known prices are recovered, and they hold where they were measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offramp import engines
from offramp.calibration import time_model as prices
from offramp.calibration.latency import predict_latencies
from offramp.calibration.time_model import FEATURES, TimeModel, fit_time_model, measurement_place, trace_features
from offramp.core.cost import Event
from offramp.engines import EngineOptions
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import runs


def log(*events: tuple[str, int, list[int], list[int], list[int]]) -> list[Event]:
    parts = [(what, layer, *map(torch.tensor, rest)) for what, layer, *rest in events]
    return [Event(*one) for one in parts]  # type: ignore[arg-type]  # tuples of mixed kinds, spelt short


def test_features_count_what_was_done_for_each_row() -> None:
    done = log(("embed", 0, [0, 1], [4, 6], [4, 6]), ("attend", 1, [0, 1], [4, 0], [4, 6]), ("feed", 1, [0], [3], [4]),
               ("head", 1, [0, 1], [4, 6], [4, 6]), ("head", 2, [1], [6], [6]))  # fmt: skip
    first, second = (dict(zip(FEATURES, row, strict=True)) for row in trace_features(done, 2, [4, 6]))
    assert (first["attend"], first["attend.token"], first["attend.pair"]) == (1, 4, 16)
    assert (first["feed"], first["feed.token"], first["head"], first["text.token"]) == (1, 3, 1, 4)
    assert (second["attend"], second["attend.pair"], second["feed"]) == (0, 0, 0)  # nobody asked: nothing was done
    assert (second["head"], second["head.token"], second["embed.token"], second["call"]) == (2, 12, 6, 1)
    assert trace_features(done, 2)[0][FEATURES.index("text")] == 0


def test_the_fit_recovers_known_prices() -> None:
    rng = np.random.default_rng(0)
    seen = rng.integers(1, 60, (80, len(FEATURES))).astype(np.float64)
    true = dict.fromkeys(FEATURES, 0.0) | {"call": 0.4, "attend": 0.2, "attend.token": 0.03, "attend.pair": 0.0005,
                                        "feed.token": 0.05, "head": 0.1}  # fmt: skip
    ms = seen @ np.array([true[name] for name in FEATURES])
    found, error = fit_time_model(seen, ms)
    assert found == pytest.approx(true, abs=1e-9) and error < 1e-9
    noisy, error = fit_time_model(seen, ms * rng.normal(1.0, 0.02, len(ms)))
    assert min(noisy.values()) >= 0.0 and 0.005 < error < 0.03
    told = TimeModel(noisy, error, 80, {}).predict(seen)
    assert np.abs(told / ms - 1).max() < 0.05


def ticking(model: Predictor, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine on which a half-layer takes a millisecond and each of its tokens a tenth, and nothing else any time."""
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


def measured(model: Predictor, clock: dict[str, float], rows: runs.Rows) -> TimeModel:
    def now() -> float:
        clock["now"] += 1e-6  # a clock that never stands still
        return clock["now"]

    return prices.measure_time_model(model, rows, now)


def test_a_machine_of_known_speed_is_priced_right(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Predictor.load(trained, "torch"), runs.rows("classification", 30, 5)
    found = measured(model, ticking(model, monkeypatch), rows[:6])
    assert found.error < 0.01 and found.place["engine"] == "torch" and found.samples > 30
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    for guess in predict_latencies(model, model.points, data, found):
        outcome = model.run(data.encoded, model.settings(given=guess.point.settings))
        lengths = np.array([len(e.ids) for e in data.encoded])
        assert guess.ms == pytest.approx(2 * outcome.exit_layer * (1 + 0.1 * lengths), rel=0.03, abs=0.01)


def test_methods_that_cannot_be_replayed_are_run(every_task: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Predictor.load(every_task["regression"], "torch"), runs.rows("regression", 40, 5)
    found = measured(model, ticking(model, monkeypatch), rows[:6])
    data = Data(rows, model.prepare(rows))
    assert model.points is not None
    (only,) = predict_latencies(model, model.points, data, found)
    assert only.ms == pytest.approx([6 * (1 + 0.1 * len(e.ids)) for e in data.encoded], rel=0.03)


def test_prices_belong_to_a_version_of_openvino() -> None:
    def where(engine: str) -> dict[str, object]:
        return measurement_place(SimpleNamespace(engine_name=engine, how=EngineOptions()))  # type: ignore[arg-type]  # all that is looked at

    assert where("openvino")["openvino"] == engines.versions("openvino")["openvino"]
    assert "openvino" not in where("torch")
