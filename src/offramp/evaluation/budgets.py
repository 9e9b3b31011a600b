"""What each budget buys on labelled rows: score, compute and time, measured, not promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offramp import methods
from offramp.calibration.replay import record_exits, replay
from offramp.errors import OfframpError
from offramp.evaluation.curve import CurvePoint
from offramp.evaluation.result_cells import Origin, evaluate_setting
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor, Row
from offramp.nn.batches import Data

BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.25, None)  # None: no budget given, within half a point of the full model on dev
BATCH = 32


@dataclass(frozen=True)
class BudgetTiming:
    """How long to look at the clock."""

    timed: int  # rows timed in batches
    alone: int  # rows timed one at a time
    rounds: int


def measure_budgets(
    predictor: Predictor, rows: Sequence[Row], origin: Origin, effort: BudgetTiming
) -> list[dict[str, Any]]:
    """For every budget a result cell over all rows, and milliseconds and speed-up over the full model on some."""
    chosen = {budget: predictor.settings(budget) for budget in BUDGETS}
    distinct = list(dict.fromkeys(chosen.values()))  # two budgets may buy the same point: measured once
    cells = {settings: evaluate_setting(predictor, rows, settings, origin, BATCH) for settings in distinct}
    timed = rows[: effort.timed]
    batches = [timed[start : start + BATCH] for start in range(0, len(timed), BATCH)]
    ms = {
        "batch": _milliseconds(predictor, distinct, batches, effort.rounds),
        "alone": _milliseconds(predictor, distinct, [[row] for row in rows[: effort.alone]], effort.rounds),
    }
    return [
        {
            "budget": budget,
            "ms": {how: round(taken[settings], 4) for how, taken in ms.items()},
            "speed_up": {how: round(taken[chosen[1.0]] / taken[settings], 3) for how, taken in ms.items()},
            "cell": cells[settings],
        }
        for budget, settings in chosen.items()
    ]


def _milliseconds(
    predictor: Predictor, settings: Sequence[Any], calls: Sequence[Sequence[Row]], rounds: int
) -> dict[Any, float]:
    """A row from text to prediction, for each setting."""

    def answer(made: Any, rows: Sequence[Row]) -> None:
        encoded = predictor.prepare(rows)
        predictor.finish(rows, encoded, predictor.run(encoded, made, BATCH))

    count = sum(len(rows) for rows in calls)
    return {made: 1000 * seconds / count for made, seconds in interleaved(answer, settings, calls, rounds).items()}


def measure_curve(predictor: Predictor, rows: Sequence[Row]) -> list[CurvePoint]:
    """Every operating point on these rows: one pass and replays, or a run each where settings change later states."""
    if predictor.points is None:
        raise OfframpError("a curve", "a model without operating points", "give dev rows to `offramp train`")
    network, method, task = predictor.network, predictor.model.method, predictor.task
    data = Data(rows, predictor.prepare(rows))
    recording = (
        record_exits(network, data, policy=method.policy(network, method.settings())) if method.replays else None
    )
    found = []
    for point in predictor.points.points:
        settings = methods.configure(method.settings, point.settings, method.name)
        if recording is None:
            outcome = predictor.run(data.encoded, settings)
        else:
            outcome = replay(network, recording, method.policy(network, settings))
        scores = task.metrics(rows, task.predictions(rows, data.encoded, outcome.logits))
        found.append(
            CurvePoint(float(outcome.macs.sum()) / predictor.full_macs(data.encoded, outcome), scores[task.metric])
        )
    return found
