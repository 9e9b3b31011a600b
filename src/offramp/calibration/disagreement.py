"""Operating points in terms of disagreement with the full model, found on texts without labels.

Rows are labelled by the full model itself, so that the search for thresholds works as on labelled rows. Settings are
found on some rows and tested on others, from the lowest disagreement to the lowest cost (Learn-then-Test, as `risk`): a
point is proven if the test passes at its limit, and otherwise the cheapest setting whose disagreement on the testing
rows stays within the limit, marked as unproven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from offramp.calibration.calibrate import CalibrationContext, CalibrationEngine, Settings
from offramp.calibration.replay import ExitRecording, exit_table
from offramp.calibration.risk import (
    RecordedRows,
    disagreement_evaluator,
    order_by_disagreement,
    p_value,
    risk_candidates,
    rows_needed,
)
from offramp.calibration.thresholds import CUTS, ExitTable, search_thresholds, threshold_cuts
from offramp.inference.operating_points import DisagreementPoint, OperatingPoint
from offramp.methods import Method
from offramp.nn.batches import Data
from offramp.nn.network import Network

LIMITS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05)
CONFIDENCE = 0.95
MAX_EXITS = 4  # that `choose_exits` takes
Floats = NDArray[np.float64]


def record_unlabelled(
    network: Network, method: Method, data: Data, engine: CalibrationEngine | None = None
) -> tuple[CalibrationContext, ExitRecording]:
    """Return rows labelled by the full model's own predictions, and the recording of every exit: one pass for both."""
    context = CalibrationContext(network, method, data, engine=engine or CalibrationEngine())
    recording = context.record()
    predictions = context.predictions(context.run({}, recording if method.replays else None))
    rows = [network.task.labelled(row, prediction) for row, prediction in zip(data.rows, predictions, strict=True)]
    return replace(context, data=Data(rows, data.encoded)), recording


def upper_bound(disagreements: Floats, binary: bool, confidence: float = CONFIDENCE) -> float:
    """Return an upper confidence bound on the mean disagreement: exact (Clopper–Pearson), or Hoeffding–Bentkus."""
    n, total = len(disagreements), float(disagreements.sum())
    if n == 0:
        return 1.0
    if binary:
        found = round(total)
        return 1.0 if found >= n else float(beta.ppf(confidence, found + 1, n - found))
    low, high = float(disagreements.mean()), 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(disagreements, middle, binary=False) > 1 - confidence else (low, middle)
    return high


def find_disagreement_points(
    finding: RecordedRows, testing: RecordedRows, limits: Sequence[float] = LIMITS
) -> tuple[list[DisagreementPoint], list[OperatingPoint]]:
    """Return one point for every limit, and all tested settings as operating points whose score is the agreement."""
    method, task, engine = testing[0].method, testing[0].network.task, testing[0].engine
    candidates = order_by_disagreement(method, disagreement_evaluator(*finding), risk_candidates(*finding))
    evaluate = disagreement_evaluator(*testing)
    tested = [(settings, *evaluate(settings)) for settings in [asdict(method.settings()), *candidates]]
    layers = [_mean_exit_layer(testing, settings) for settings, _, _ in tested]
    points: list[DisagreementPoint] = []
    for limit in sorted(limits, reverse=True):  # a stricter limit is never cheaper than a looser one
        cheapest = points[0].mac_share if points else 0.0
        points.insert(0, _point_for(limit, tested, layers, task.disagreement_is_binary, engine, cheapest))
    operating = [
        OperatingPoint(settings, share, 1.0 - float(losses.mean()), layer, 1.0 - float(losses.mean()))
        for (settings, losses, share), layer in zip(tested, layers, strict=True)
    ]
    return points, operating


def _point_for(
    limit: float,
    tested: Sequence[tuple[Settings, Floats, float]],
    layers: Sequence[float],
    binary: bool,
    engine: CalibrationEngine,
    cheapest: float = 0.0,
) -> DisagreementPoint:
    chosen, proven = 0, False
    for index, (_, losses, _) in enumerate(tested[1:], 1):  # the full model, which comes first, proves nothing
        if p_value(losses, limit, binary) > 1.0 - CONFIDENCE:
            break
        chosen, proven = index, True
    if not proven:  # too few rows for a proof: the cheapest setting whose estimate fits
        fitting = [
            i for i, (_, losses, share) in enumerate(tested) if float(losses.mean()) <= limit and share >= cheapest
        ]
        chosen = min(fitting, key=lambda i: tested[i][2]) if fitting else 0
    settings, losses, share = tested[chosen]
    return DisagreementPoint(
        limit,
        settings,
        share,
        float(losses.mean()),
        len(losses),
        layers[chosen],
        engine.name,
        engine.precision,
        upper_bound(losses, binary),
        proven,
    )


def _mean_exit_layer(testing: RecordedRows, settings: Settings) -> float:
    context, recording = testing
    return float(context.run(settings, recording).exit_layer.mean())


def rows_for(limit: float) -> int:
    """Return how many testing rows a proof of this limit needs at least."""
    return rows_needed(limit, CONFIDENCE)


def choose_exits(
    context: CalibrationContext,
    recording: ExitRecording,
    uncertainties: Floats,
    layer_ms: float,
    exit_ms: Sequence[float],
    limit: float = 0.01,
) -> tuple[list[int], dict[str, float]]:
    """Return the few exits that minimise the expected time of a row at a limit of disagreement, and the times compared.

    Exits are added one by one, each time the one that saves most, until no exit saves more than its head takes on this
    machine: `layer_ms` a layer, `exit_ms` the head of every exit. `uncertainties` are [exits, rows]. Where no exit
    saves time, none is returned.
    """
    layers = sorted(context.network.exit_heads)
    table = exit_table(context.network, recording, context.data, uncertainties)
    times = np.array([layer_ms * layer for layer in [*layers, context.network.depth]])
    chosen: list[int] = []
    best = float(times[-1])
    compared = {"full": best}
    while len(chosen) < min(MAX_EXITS, len(layers)):
        options = {
            number: _expected_ms(table, sorted([*chosen, number]), times, exit_ms, limit)
            for number in range(len(layers))
            if number not in chosen
        }
        number = min(options, key=lambda n: options[n])
        if options[number] >= best * 0.995:
            break
        chosen, best = sorted([*chosen, number]), options[number]
        compared[",".join(str(layers[n]) for n in chosen)] = best
    every = _expected_ms(table, list(range(len(layers))), times, exit_ms, limit)
    compared["every layer"] = every
    return [layers[number] for number in chosen], compared


def _expected_ms(table: ExitTable, chosen: list[int], times: Floats, exit_ms: Sequence[float], limit: float) -> float:
    """Return the mean time of a row with these exits, thresholds chosen for a mean disagreement of at most `limit`."""
    rows = table.uncertainty.shape[1]
    reach = np.repeat(times[[*chosen, -1], None], rows, axis=1)
    ask = np.repeat(np.array([exit_ms[number] for number in chosen])[:, None], rows, axis=1)
    own = ExitTable(table.uncertainty[chosen], table.score[[*chosen, -1]], reach, ask, np.zeros_like(ask))
    levels = np.stack([np.resize(threshold_cuts(values), CUTS + 1) for values in own.uncertainty])  # none is left out
    start = np.concatenate((np.zeros((1, len(chosen))), levels.T))
    front = search_thresholds(own, start, levels, generations=10, children=120)
    full = own.score[-1].mean()
    fitting = front.cost[front.score >= full - limit]
    return float(fitting.min()) if len(fitting) else float(times[-1])
