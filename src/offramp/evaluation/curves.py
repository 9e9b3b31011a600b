"""Score against compute of one run: its operating points on labelled rows, what each budget gives, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from offramp import methods
from offramp.calibration.replay import record_exits, replay
from offramp.errors import OfframpError
from offramp.evaluation.collect import LOSSES, Cell, CurvePoint
from offramp.evaluation.result_cells import (
    Measurement,
    Origin,
    compute_fields,
    evaluate_setting,
    labelled_data,
    result_cell,
)
from offramp.evaluation.timing import interleaved
from offramp.inference.batching import score_policy
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, RiskGuarantee
from offramp.inference.predictor import Predictor, Row
from offramp.nn.batches import Data
from offramp.utils.files import atomic_replace

BATCH = 32
LINE, MARK, FULL = "#2f6db3", "#d1495b", "#444444"


def sweep_points(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], origin: Origin, batch_size: int = 32
) -> list[Cell]:
    """Return result cells of a run's operating points, which were chosen on other rows.

    One cell for full depth, one for each loss that reports quote, one for each proven risk; `chosen` says how a point
    was chosen and what calibration expected of it. The first cell also carries the curve of all points. Where a method
    can be replayed, one pass over the rows serves all points, so the cells have no seconds.
    """
    points = predictor.points
    if points is None:
        raise OfframpError("a curve", "a model without operating points", "run `offramp calibrate` on it first")
    data = labelled_data(predictor, rows, origin)
    measure = cache(_measurer(predictor, data, batch_size))
    choices: list[tuple[str, float | None, OperatingPoint | RiskGuarantee]] = [("full", None, points.full_point)]
    choices += [("max_loss", loss, points.choose(Budget.loss(loss))) for loss in LOSSES]
    choices += [("risk", proven.risk, proven) for proven in points.guarantees]
    cells = []
    for by, value, point in choices:
        cell = result_cell(predictor, measure(_settings(predictor, point)), origin)
        cells.append({**cell, "chosen": {"by": by, "value": value, "expected": _expected(point)}})
    cells[0]["curve"] = [_curve_entry(predictor, p, measure(_settings(predictor, p))) for p in points.points]
    return cells


def _settings(predictor: Predictor, point: OperatingPoint | RiskGuarantee) -> Any:
    return methods.configure(predictor.model.method.settings, point.settings, predictor.model.method.name)


def _expected(point: OperatingPoint | RiskGuarantee) -> Cell:
    """Return what calibration found on its own rows."""
    return {name: value for name, value in asdict(point).items() if name != "settings"}


def _curve_entry(predictor: Predictor, point: OperatingPoint, measurement: Measurement) -> Cell:
    """Return a point of the curve: what calibration expected and what was measured."""
    compute = compute_fields(predictor, measurement.data, measurement.outcome)
    return {
        "metrics": {name: round(value, 6) for name, value in measurement.metrics.items()},
        "share_of_full": compute["macs"]["share_of_full"],
        "mean_exit_layer": compute["mean_exit_layer"],
        "settings": point.settings,
        "expected": _expected(point),
    }


def _measurer(predictor: Predictor, data: Data, batch_size: int) -> Callable[[Any], Measurement]:
    """Return a function that measures a setting: by replay where the method can be replayed, else by a run."""
    network, method, task = predictor.network, predictor.model.method, predictor.task
    if not method.replays or task.scores_by_loss:

        def run(settings: Any) -> Measurement:
            found = score_policy(network, predictor.engine, method.policy(network, settings), data, batch_size)
            return Measurement(data, settings, *found, batch_size)

        return run
    recording = record_exits(network, data, batch_size, predictor.engine, method.policy(network, method.settings()))

    def replayed(settings: Any) -> Measurement:
        outcome = replay(network, recording, method.policy(network, settings))
        metrics = task.metrics(data.rows, task.predictions(data.rows, data.encoded, outcome.logits))
        return Measurement(data, settings, metrics, outcome, batch_size)

    return replayed


@dataclass(frozen=True)
class BudgetTiming:
    """How many rows are timed, and how often."""

    timed: int  # rows timed in batches
    alone: int  # rows timed one at a time
    rounds: int


def measure_budgets(
    predictor: Predictor, rows: Sequence[Row], origin: Origin, timing: BudgetTiming, budgets: Sequence[Budget]
) -> list[dict[str, Any]]:
    """Return, for every budget, a result cell over all rows, and milliseconds and speed-up on some of them.

    The speed-up is that against the first budget.
    """
    chosen = {budget: predictor.settings(budget) for budget in budgets}
    distinct = list(dict.fromkeys(chosen.values()))  # two budgets may give the same point: it is measured once
    cells = {settings: evaluate_setting(predictor, rows, settings, origin, BATCH) for settings in distinct}
    timed = rows[: timing.timed]
    batches = [timed[start : start + BATCH] for start in range(0, len(timed), BATCH)]
    ms = {
        "batch": _milliseconds(predictor, distinct, batches, timing.rounds),
        "alone": _milliseconds(predictor, distinct, [[row] for row in rows[: timing.alone]], timing.rounds),
    }
    return [
        {
            "budget": str(budget),
            "ms": {how: round(taken[settings], 4) for how, taken in ms.items()},
            "speed_up": {how: round(taken[chosen[budgets[0]]] / taken[settings], 3) for how, taken in ms.items()},
            "cell": cells[settings],
        }
        for budget, settings in chosen.items()
    ]


def _milliseconds(
    predictor: Predictor, settings: Sequence[Any], calls: Sequence[Sequence[Row]], rounds: int
) -> dict[Any, float]:
    """Return the milliseconds of a row from text to prediction, for each setting."""

    def predict(one: Any, rows: Sequence[Row]) -> None:
        encoded = predictor.prepare(rows)
        predictor.finish(rows, encoded, predictor.run(encoded, one, BATCH))

    count = sum(len(rows) for rows in calls)
    return {one: 1000 * seconds / count for one, seconds in interleaved(predict, settings, calls, rounds).items()}


def measure_curve(predictor: Predictor, rows: Sequence[Row]) -> list[CurvePoint]:
    """Measure every operating point on these rows, by replay if the method can be replayed."""
    if predictor.points is None:
        raise OfframpError("a curve", "a model without operating points", "give dev rows to `offramp train`")
    network, method, task = predictor.network, predictor.model.method, predictor.task
    data, curve = Data(rows, predictor.prepare(rows)), []
    full_policy = method.policy(network, method.settings())
    recording = record_exits(network, data, policy=full_policy) if method.replays else None
    for point in predictor.points.points:
        settings = _settings(predictor, point)
        if recording is None:
            outcome = predictor.run(data.encoded, settings)
        else:
            outcome = replay(network, recording, method.policy(network, settings))
        metrics = task.metrics(rows, task.predictions(rows, data.encoded, outcome.logits))
        share = float(outcome.macs.sum()) / predictor.full_macs(data.encoded, outcome)
        curve.append(CurvePoint(share, metrics[task.metric]))
    return curve


@dataclass(frozen=True)
class CurvePicture:
    """The scores of all operating points, and the two points that are marked."""

    title: str
    metric: str
    points: Sequence[CurvePoint]
    full: CurvePoint
    chosen: CurvePoint


def draw_curve(curve: CurvePicture, path: Path) -> None:
    """Write the picture as a PNG. It needs no window and no global state, so it works on a server and in a thread."""
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    points = sorted(curve.points, key=lambda p: p.share)
    axes.axhline(curve.full.score, color=FULL, linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    axes.plot([p.share for p in points], [p.score for p in points], "o-", color=LINE, markersize=4, linewidth=1.4,
              label="operating points", zorder=2)  # fmt: skip
    axes.plot(curve.full.share, curve.full.score, "D", color=FULL, markersize=8, zorder=3, linestyle="none",
              label=f"full model: {curve.full.score:.1%}")  # fmt: skip
    axes.plot(curve.chosen.share, curve.chosen.score, "o", color=MARK, markersize=9, zorder=4, linestyle="none",
              label=f"chosen: {curve.chosen.score:.1%} at {curve.chosen.share:.0%} of the compute")  # fmt: skip
    _label_axes(axes, curve)
    canvas = FigureCanvasAgg(figure)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def _label_axes(axes: Axes, curve: CurvePicture) -> None:
    axes.set_title(curve.title, fontsize=11, loc="left")
    axes.set_xlabel("share of the full model's multiply-accumulates")
    axes.set_ylabel(curve.metric)
    axes.set_xlim(-0.02, max([1.0, *(p.share for p in curve.points)]) + 0.04)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
