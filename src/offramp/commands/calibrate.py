"""`offramp calibrate` as a function: new operating points for a run, and guarantees if wanted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offramp.calibration.calibrate import CalibrationContext, calibrate
from offramp.calibration.latency import LatencyRequest, find_latency_point
from offramp.calibration.length_search import searched_settings
from offramp.calibration.risk import check_provable, check_task_has_risk, prove_risk
from offramp.data.readers import fingerprint
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.budget import Budget
from offramp.inference.model_card import write_model_card
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data

ENOUGH_ROWS = 100  # rows below which operating points are hardly more than luck
Row = Mapping[str, Any]


def recalibrate(
    run: str,
    rows: Sequence[Row],
    source: str,
    risk: float | None = None,
    confidence: float = 0.95,
    latency: LatencyRequest | None = None,
) -> OperatingPoints:
    """Calibrate a run on labelled rows and write its points.json; guarantees of the old points are dropped."""
    predictor = Predictor(folders.load_run(run))  # its old points may be another model's
    predictor.task.check(rows, source)
    network, method, rows_fingerprint = predictor.network, predictor.model.method, fingerprint(source, rows)
    if risk is not None:
        check_task_has_risk(predictor.task)
        check_provable(risk, confidence, len(rows) - len(rows) // 2)
    if latency is not None and network.decoder is not None:
        given = f"the task {predictor.task.name!r}, whose time depends on how much is generated"
        raise OfframpError("answers within a time", given, "leave --latency out, and choose by --budget")
    recipe = folders.read_recipe(run)
    warn_of_training_rows(recipe, rows_fingerprint, source, risk)
    if len(rows) < ENOUGH_ROWS:
        few = f"{len(rows)} rows say little about the cost of settings: {ENOUGH_ROWS} or more would be better"
        warnings.warn(few, stacklevel=2)
    data, searched = Data(rows, predictor.prepare(rows, source)), searched_settings(Path(run))
    points = calibrate(network, method, data, "/".join(Path(source).parts[-2:]), rows_fingerprint, searched)
    if searched:
        points = replace(points, data={**points.data, "searched": True})
    for warning in points.warnings:
        warnings.warn(warning, stacklevel=2)
    if risk is not None:
        context = CalibrationContext(network, method, data, searched=searched)
        proven = prove_risk(context, context.record() if method.replays else None, risk, confidence)
        if proven.settings == asdict(method.settings()):
            full = f"no cheaper setting could be shown to stay within a risk of {risk}: using the full model"
            warnings.warn(full, stacklevel=2)
        points = replace(points, guarantees=(proven,))
    if latency is not None:
        points = replace(points, latencies=(find_latency_point(run, points, rows, source, latency),))
    operating.save_points(Path(run), points)
    write_model_card(Path(run), predictor.model, points, recipe)
    return points


def warn_of_training_rows(recipe: Mapping[str, Any], rows_fingerprint: str, source: str, risk: float | None) -> None:
    """Warn when points will look better than they are, or a guarantee would be void."""
    if rows_fingerprint in (recipe.get("train_fingerprint"), recipe.get("file_fingerprint")):
        why = "are rows this run was trained on: its points will look better than they are"
        warnings.warn(f"{source} {why}" + (", and the guarantee is void" if risk else ""), stacklevel=3)
    elif risk is not None and rows_fingerprint == recipe.get("dev_fingerprint"):
        warnings.warn(f"the epoch of this run was chosen on {source}: prove a risk on rows it never saw", stacklevel=3)


def check_point_request(budget: float | None, max_loss: float | None) -> None:
    """Refuse, before any work, a budget or a loss that no point could be chosen for."""
    Budget.parse(budget, max_loss=max_loss)
