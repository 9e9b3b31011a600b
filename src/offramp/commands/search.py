"""`offramp search` as a function: find lengths for a run and write its operating points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.length_search import (
    ReportProgress,
    ReportScoring,
    SearchRequest,
    check_searchable,
    find_length_points,
)
from offramp.commands.calibrate import warn_of_training_rows
from offramp.data.readers import fingerprint
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.model_card import write_model_card
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data

Row = Mapping[str, Any]


def search_run(
    run: str,
    rows: Sequence[Row],
    source: str,
    request: SearchRequest,
    report: ReportProgress = lambda _: None,
    report_scoring: ReportScoring = lambda done, total: None,
) -> OperatingPoints:
    """Search a run's lengths (and exits) and write its points.json; guarantees of the old points are dropped."""
    predictor = Predictor(folders.load_run(run))  # its old points may be damaged, or another model's
    method, task = predictor.model.method, predictor.task
    task.check(rows, source)
    check_searchable(method, task, len(rows), source)
    rows_fingerprint, recipe = fingerprint(source, rows), folders.read_recipe(run)
    warn_of_training_rows(recipe, rows_fingerprint, source, None)
    context = CalibrationContext(predictor.network, method, Data(rows, predictor.prepare(rows, source)))
    name = "/".join(Path(source).parts[-2:])
    points = find_length_points(context, request, Path(run), name, rows_fingerprint, report, report_scoring)
    operating.save_points(Path(run), points)
    write_model_card(Path(run), predictor.model, points, recipe)
    return points
