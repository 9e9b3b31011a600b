"""A budget in time: the most accurate point whose single answers stay within so many milliseconds on this machine.

The trace of every calibration row at every point is known from a replay (or a real run). The time model of this machine
(`time_model.py`) turns it into the milliseconds of each row, and so into percentiles. The chosen point is then timed
for real, from text to prediction, one row at a time; where that is slower than predicted, all predictions are raised by
the same factor and another point is chosen. If none is left and the time model was stored earlier, when the machine may
have been busy, it is measured again, once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines
from offramp.calibration.replay import record_exits, replay_trace
from offramp.calibration.time_model import (
    Clock,
    TimeModel,
    remeasured_time_model,
    run_trace,
    stored_time_model,
    time_model_of,
    trace_features,
)
from offramp.engines import AUTO, EngineOptions, Precision
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.inference.operating_points import LatencyPoint, OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor, graph_folder
from offramp.nn.batches import Data, pack_rows
from offramp.utils.hardware import hardware

Array = NDArray[np.float64]
Row = Mapping[str, Any]
TEXT_ROWS = 24  # rows whose text is read to measure reading
TIMED_ROWS = 200  # rows that are answered for real
TIMED_ROUNDS = 3
BATCH = 32
ATTEMPTS = 6


@dataclass(frozen=True)
class LatencyRequest:
    """The time wanted for single answers, and the percentage of rows that must be answered within it."""

    seconds: float
    percentile: float = 95.0
    engine: str = AUTO
    precision: Precision = "fp32"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile <= 100.0:
            raise OfframpError("a percentile of rows", f"{self.percentile}", "give a number above 0 and up to 100: 95")
        engines.choose(self.engine, torch.device("cpu"))
        EngineOptions(self.precision, self.threads)

    @property
    def ms(self) -> float:
        """The time in milliseconds."""
        return 1000 * self.seconds

    def __str__(self) -> str:
        return f"{self.percentile:g} % of single answers within {self.ms:g}ms"


@dataclass(frozen=True)
class PredictedLatency:
    """A point and the predicted milliseconds of every row at it."""

    point: OperatingPoint
    ms: Array  # [rows]


def predict_latencies(
    predictor: Predictor, points: OperatingPoints, data: Data, time_model: TimeModel
) -> list[PredictedLatency]:
    """Return the predicted milliseconds of every row at every point."""
    network, method = predictor.network, predictor.model.method
    full = method.policy(network, method.settings())
    recording = record_exits(network, data, engine=predictor.engine, policy=full) if method.replays else None
    tokens = [len(row.ids) for row in data.encoded]
    row_of_window, predicted = np.array([row.example for row in data.encoded]), []
    for point in points.points:
        policy = method.policy(network, predictor.settings(given=point.settings))
        if recording is not None:
            features = trace_features(replay_trace(network, recording, policy), len(tokens), tokens)
        else:
            starts = range(0, len(tokens), BATCH)
            parts = [pack_rows(predictor.task, data.encoded[start : start + BATCH]) for start in starts]
            traces = [(run_trace(predictor, policy, part), part) for part in parts]
            features = np.concatenate(
                [trace_features(trace, part.count, part.lengths.tolist()) for trace, part in traces]
            )
        ms = np.bincount(row_of_window, time_model.predict(features), len(data.rows)).astype(np.float64)
        predicted.append(PredictedLatency(point, ms))
    return predicted


def choose_in_time(
    predicted: Sequence[PredictedLatency], points: OperatingPoints, request: LatencyRequest, slowdown: float = 1.0
) -> PredictedLatency:
    """Return the point in time that loses least; `slowdown` is how much slower the machine proved than predicted."""

    def percentile(latency: PredictedLatency) -> float:
        return slowdown * float(np.percentile(latency.ms, request.percentile))

    fitting = [latency for latency in predicted if percentile(latency) <= request.ms]
    if not fitting:
        fastest = min(map(percentile, predicted))
        raise OfframpError(
            str(request),
            f"a model whose fastest point takes {fastest:.3g}ms here, on {request.engine} {request.precision}",
            f"give {_rounded_up(fastest):g}ms or more, another --engine, or train with a smaller --max-length",
        )
    return min(fitting, key=lambda latency: points.order_of_loss(latency.point))


def _rounded_up(ms: float) -> float:
    """Return a tenth more, in two digits."""
    return float(f"{1.1 * ms:.2g}")


def measure_latencies(
    predictor: Predictor, point: OperatingPoint, rows: Sequence[Row], clock: Clock = time.perf_counter
) -> Array:
    """Return the milliseconds of each row from text to prediction, one row at a time; the median over rounds."""
    settings = predictor.settings(given=point.settings)
    times = np.zeros((len(rows), TIMED_ROUNDS + 1))
    for number in range(TIMED_ROUNDS + 1):
        for place, row in enumerate(rows):
            started = clock()
            encoded = predictor.prepare([row])
            predictor.finish([row], encoded, predictor.run(encoded, settings, 1))
            times[place, number] = 1000 * (clock() - started)
    return np.asarray(np.median(times[:, 1:], axis=1))  # the first round warms up


def rows_of_all_lengths(data: Data, count: int) -> list[int]:
    """Return the indices of at most `count` rows, spread evenly over the rows sorted by length."""
    lengths = np.bincount([e.example for e in data.encoded], [len(e.ids) for e in data.encoded], len(data.rows))
    order = np.argsort(lengths, kind="stable")
    return [int(order[i]) for i in np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]


def find_latency_point(
    run: str, points: OperatingPoints, rows: Sequence[Row], source: str, request: LatencyRequest
) -> LatencyPoint:
    """Return the point for a request, predicted and then timed; points.json of the folder is not read."""
    folder = Path(run)
    how = EngineOptions(request.precision, request.threads, graph_folder(folder))
    predictor = Predictor(folders.load_run(run), points, request.engine, how)
    request = replace(request, engine=predictor.engine_name)
    data = Data(rows, predictor.prepare(rows, source))
    texts = [rows[i] for i in rows_of_all_lengths(data, TEXT_ROWS)]
    was_stored = stored_time_model(predictor, folder) is not None
    try:
        return _timed_point(predictor, points, data, time_model_of(predictor, folder, texts), request)
    except OfframpError:
        if not was_stored:
            raise
    return _timed_point(predictor, points, data, remeasured_time_model(predictor, folder, texts), request)


def _timed_point(
    predictor: Predictor, points: OperatingPoints, data: Data, time_model: TimeModel, request: LatencyRequest
) -> LatencyPoint:
    """Return the best point by this time model whose real run satisfies the request."""
    predictions = predict_latencies(predictor, points, data, time_model)
    timed_rows = [data.rows[i] for i in rows_of_all_lengths(data, TIMED_ROWS)]
    slowdown = 1.0
    for _ in range(ATTEMPTS):
        best = choose_in_time(predictions, points, request, slowdown)
        predicted = float(np.percentile(best.ms, request.percentile))
        measured = float(np.percentile(measure_latencies(predictor, best.point, timed_rows), request.percentile))
        if measured <= request.ms:
            break
        slowdown = 1.02 * max(slowdown, measured / predicted)
    else:
        raise OfframpError(
            str(request),
            f"times that keep changing: predicted {predicted:.3g}ms, then measured {measured:.3g}ms",
            "calibrate on an idle machine",
        )
    return LatencyPoint(
        milliseconds=request.ms,
        percentile=request.percentile,
        settings=best.point.settings,
        predicted=round(predicted, 4),
        measured=round(measured, 4),
        score=best.point.score,
        mac_share=best.point.mac_share,
        engine=request.engine,
        precision=request.precision,
        threads=request.threads,
        hardware=hardware(),
    )
