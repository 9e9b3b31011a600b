"""A budget in time: the most accurate point whose single answers keep within so many milliseconds on this machine.

What the loop would do with every calibration row at every point is known from a replay (or a real run); priced with
what this machine was measured to take (`prices.py`), it gives the milliseconds of each row, and so their percentiles.
The point chosen is then timed for real, text to prediction, one row at a time; where that is slower than predicted,
predictions are raised by as much and another point is chosen. Where none is left and prices were those of an earlier
day, the machine may have been busy then: they are measured anew, once.
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
from offramp.engines import AUTO, How, Precision
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.inference.operating_points import LatencyPoint, OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, pack_rows
from offramp.utils.hardware import hardware

Array = NDArray[np.float64]
Row = Mapping[str, Any]
READ = 24  # rows whose text is read to price reading
CHECKED = 200  # rows that are answered for real
ROUNDS = 3
BATCH = 32
TRIES = 6


@dataclass(frozen=True)
class LatencyRequest:
    """How soon single answers are wanted, and of how many rows in a hundred that must be true."""

    seconds: float
    percentile: float = 95.0
    engine: str = AUTO
    precision: Precision = "fp32"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile <= 100.0:
            raise OfframpError("a percentile of rows", f"{self.percentile}", "give a number above 0 and up to 100: 95")
        engines.choose(self.engine, torch.device("cpu"))
        How(self.precision, self.threads)

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return 1000 * self.seconds


@dataclass(frozen=True)
class PredictedLatency:
    """A point and the milliseconds of every row at it."""

    point: OperatingPoint
    ms: Array  # [rows]


def predict_latencies(
    model: Predictor, points: OperatingPoints, data: Data, prices: TimeModel
) -> list[PredictedLatency]:
    """All points, priced row by row."""
    task, method = model.task, model.model.method
    loosest = method.policy(model.network, method.settings())
    recording = record_exits(model.network, data, engine=model.engine, policy=loosest) if method.replays else None
    tokens = [len(row.ids) for row in data.encoded]
    owner, made = np.array([row.example for row in data.encoded]), []
    for point in points.points:
        policy = method.policy(model.network, model.settings(given=point.settings))
        if recording is not None:
            seen = trace_features(replay_trace(model.network, recording, policy), len(tokens), tokens)
        else:
            starts = range(0, len(tokens), BATCH)
            parts = [pack_rows(task, data.encoded[start : start + BATCH]) for start in starts]
            logs = [trace_features(run_trace(model, policy, part), part.count, part.lengths.tolist()) for part in parts]
            seen = np.concatenate(logs)
        made.append(
            PredictedLatency(point, np.bincount(owner, prices.predict(seen), len(data.rows)).astype(np.float64))
        )
    return made


def choose_in_time(
    found: Sequence[PredictedLatency], points: OperatingPoints, wish: LatencyRequest, factor: float = 1.0
) -> PredictedLatency:
    """The most accurate point in time; `factor` is how much slower the machine proved to be than predicted."""

    def late(guess: PredictedLatency) -> float:
        return factor * float(np.percentile(guess.ms, wish.percentile))

    fitting = [guess for guess in found if late(guess) <= wish.ms]
    if not fitting:
        least = min(map(late, found))
        raise OfframpError(
            f"{wish.percentile:g} % of single answers within {wish.ms:g}ms",
            f"a model whose fastest point takes {least:.3g}ms on this machine, on {wish.engine} {wish.precision}",
            f"ask for {_up(least):g}ms or more, another --engine, or train with a smaller --max-length",
        )
    best = fitting[0]
    for guess in fitting[1:]:
        best = guess if points.better(guess.point.score, best.point.score) else best
    return best


def _up(ms: float) -> float:
    """A little more, in two digits."""
    return float(f"{1.1 * ms:.2g}")


def measure_latencies(
    model: Predictor, point: OperatingPoint, rows: Sequence[Row], clock: Clock = time.perf_counter
) -> Array:
    """Milliseconds of each row from text to prediction, one row at a time; the median over rounds."""
    settings = model.settings(given=point.settings)
    taken = np.zeros((len(rows), ROUNDS + 1))
    for number in range(ROUNDS + 1):
        for place, row in enumerate(rows):
            started = clock()
            encoded = model.prepare([row])
            model.finish([row], encoded, model.run(encoded, settings, 1))
            taken[place, number] = 1000 * (clock() - started)
    return np.asarray(np.median(taken[:, 1:], axis=1))  # the first round warms up


def rows_of_all_lengths(data: Data, count: int) -> list[int]:
    """Rows of all lengths, as many of each as there are: numbers into `data.rows`."""
    lengths = np.bincount([e.example for e in data.encoded], [len(e.ids) for e in data.encoded], len(data.rows))
    order = np.argsort(lengths, kind="stable")
    return [int(order[i]) for i in np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]


def find_latency_point(
    run: str, points: OperatingPoints, rows: Sequence[Row], source: str, wish: LatencyRequest
) -> LatencyPoint:
    """The point for a wish, predicted and then checked by a real run; the folder's own points are never read."""
    folder = Path(run)
    model = Predictor(folders.load_run(run), points, wish.engine, How(wish.precision, wish.threads, folder / ".cache"))
    wish = replace(wish, engine=model.engine_name)
    data = Data(rows, model.prepare(rows, source))
    texts, stored = [rows[i] for i in rows_of_all_lengths(data, READ)], stored_time_model(model, folder) is not None
    try:
        return _chosen(model, points, data, time_model_of(model, folder, texts), wish)
    except OfframpError:
        if not stored:
            raise
    return _chosen(model, points, data, remeasured_time_model(model, folder, texts), wish)


def _chosen(
    model: Predictor, points: OperatingPoints, data: Data, prices: TimeModel, wish: LatencyRequest
) -> LatencyPoint:
    """The best point by these prices whose real run keeps within the wish."""
    found, checked = (
        predict_latencies(model, points, data, prices),
        [data.rows[i] for i in rows_of_all_lengths(data, CHECKED)],
    )
    factor = 1.0
    for _ in range(TRIES):
        best = choose_in_time(found, points, wish, factor)
        predicted = float(np.percentile(best.ms, wish.percentile))
        measured = float(np.percentile(measure_latencies(model, best.point, checked), wish.percentile))
        if measured <= wish.ms:
            break
        factor = 1.02 * max(factor, measured / predicted)
    else:
        raise OfframpError(
            f"{wish.percentile:g} % of single answers within {wish.ms:g}ms",
            f"times that keep changing: predicted {predicted:.3g}ms, then measured {measured:.3g}ms",
            "calibrate on an idle machine",
        )
    told = (round(predicted, 4), round(measured, 4), best.point.score, best.point.mac_share)
    how = (wish.engine, wish.precision, wish.threads, hardware())
    return LatencyPoint(wish.ms, wish.percentile, best.point.settings, *told, *how)
