"""`offramp eval --curve` as a function: what a run's operating points, chosen on other rows, do on these rows.

One cell for full depth, one for each loss that reports quote, one for each proven risk; the first also carries the
whole curve. Where a method can be replayed one pass over the rows serves them all, so the cells have no seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from offramp import methods
from offramp.calibration.replay import record_exits, replay
from offramp.errors import OfframpError
from offramp.evaluation.collect import LOSSES
from offramp.evaluation.result_cells import Measurement, Origin, compute_fields, labelled_data, result_cell
from offramp.inference.batching import score_policy
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, RiskGuarantee
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data

Cell = dict[str, Any]


def sweep_points(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], origin: Origin, batch_size: int = 32
) -> list[Cell]:
    """Result cells of chosen points; `chosen` says how each came to be and what calibration promised of it."""
    points = predictor.points
    if points is None:
        raise OfframpError("a curve", "a model without operating points", "run `offramp calibrate` on it first")
    data = labelled_data(predictor, rows, origin)
    measure = cache(_measurer(predictor, data, batch_size))
    wishes: list[tuple[str, float | None, OperatingPoint | RiskGuarantee]] = [("full", None, points.full_point)]
    wishes += [("max_loss", loss, points.choose(Budget.loss(loss))) for loss in LOSSES]
    wishes += [("risk", proven.risk, proven) for proven in points.guarantees]
    cells = []
    for by, value, point in wishes:
        made = result_cell(predictor, measure(_settings(predictor, point)), origin)
        cells.append({**made, "chosen": {"by": by, "value": value, "expected": _expected(point)}})
    cells[0]["curve"] = [_spot(predictor, point, measure(_settings(predictor, point))) for point in points.points]
    return cells


def _settings(predictor: Predictor, point: OperatingPoint | RiskGuarantee) -> Any:
    return methods.configure(predictor.model.method.settings, point.settings, predictor.model.method.name)


def _expected(point: OperatingPoint | RiskGuarantee) -> Cell:
    """What calibration found, on its own rows."""
    return {name: value for name, value in asdict(point).items() if name != "settings"}


def _spot(predictor: Predictor, point: OperatingPoint, made: Measurement) -> Cell:
    """A place on the curve: what was promised and what came of it."""
    compute = compute_fields(predictor, made.data, made.outcome)
    found = {name: round(value, 6) for name, value in made.metrics.items()}
    share, layer = compute["macs"]["share_of_full"], compute["mean_exit_layer"]
    given = {"settings": point.settings, "expected": _expected(point)}
    return {"metrics": found, "share_of_full": share, "mean_exit_layer": layer, **given}


def _measurer(predictor: Predictor, data: Data, batch_size: int) -> Callable[[Any], Measurement]:
    network, method, task = predictor.network, predictor.model.method, predictor.task
    if not method.replays or task.scores_by_loss:

        def run(settings: Any) -> Measurement:
            found = score_policy(network, predictor.engine, method.policy(network, settings), data, batch_size)
            return Measurement(data, settings, *found, batch_size)

        return run
    tape = record_exits(network, data, batch_size, predictor.engine, method.policy(network, method.settings()))

    def again(settings: Any) -> Measurement:
        outcome = replay(network, tape, method.policy(network, settings))
        metrics = task.metrics(data.rows, task.predictions(data.rows, data.encoded, outcome.logits))
        return Measurement(data, settings, metrics, outcome, batch_size)

    return again
