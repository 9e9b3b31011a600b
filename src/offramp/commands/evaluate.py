"""`offramp eval` as a function: score a run on labelled rows, at one setting or at all operating points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from offramp.data.readers import read_rows
from offramp.evaluation.collect import FULL_DEPTH
from offramp.evaluation.curves import sweep_points
from offramp.evaluation.result_cells import Origin, data_and_split, evaluate_setting
from offramp.inference.finetuned import with_known_labels
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe, remembered_columns
from offramp.tasks import Row
from offramp.utils.command_line import python_call
from offramp.utils.files import check_output_file, write_json

Cell = dict[str, Any]  # a result cell


def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    budget: float | None = None,
    max_loss: float | None = None,
    risk: float | None = None,
    latency: str | float | None = None,
    max_disagreement: float | None = None,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    json: str | Path | None = None,
    command: str | None = None,
) -> Cell:
    """Score a run on labelled rows and return a result cell: metrics, share of the full compute, where rows left.

        cell = offramp.evaluate("runs/sst2", "data/sst2/dev.jsonl", budget=0.5)
        cell["metrics"]["accuracy"], cell["macs"]["share_of_full"], cell["exit_histogram"]

    Args:
        run: a run folder.
        data: a file of labelled rows, or the name of a data set on the hub.
        budget: the share of the full model's compute to spend, above 0 and at most 1.
        max_loss: instead of a budget: how much of the metric may be lost, e.g. 0.01.
        risk: instead of a budget: a risk that `offramp.calibrate(risk=…)` has proven.
        latency: instead of a budget: a time that `offramp.calibrate(latency=…)` met, "5ms" or seconds.
        max_disagreement: instead of a budget: how often an answer may differ from the full model's, e.g. 0.01.
        settings: instead of a budget: settings of the method by name, e.g. {"threshold": 0.3}.
        batch_size: rows in a batch if they have 64 tokens; of short ones more.
        engine, precision, threads: how layers are executed, as in `offramp.load`.
        limit: use only the first rows.
        columns: columns of the file by the names that the task expects, e.g. {"text": "sentence"}.
        json: write the result cell to this file.
        command: what the result cell names as its origin; this call if left out.

    Without any of these the run's default point is used: the one that `offramp attach` stored, otherwise the
    cheapest one that lost at most half a point of the metric in calibration.
    """
    check_output_file(json, data, run)
    predictor = Predictor.load(run, engine, precision, threads)
    chosen = predictor.settings(budget, settings, max_loss, risk, latency, max_disagreement)
    command = command or python_call(
        "evaluate",
        run,
        data=data,
        budget=budget,
        max_loss=max_loss,
        risk=risk,
        latency=latency,
        max_disagreement=max_disagreement,
        settings=settings,
    )
    rows, origin = _rows(predictor, run, data, limit, columns, command)
    limits = {"budget": budget, "max_loss": max_loss, "risk": risk, "latency": latency}
    named = {**limits, "max_disagreement": max_disagreement, "settings": settings or None}
    cell = evaluate_setting(predictor, rows, chosen, origin, batch_size)
    cell["chosen"] = _choice(named, full=chosen == predictor.model.method.settings())
    if json is not None:
        write_json(Path(json), cell)
    return cell


def _choice(named: Mapping[str, Any], full: bool) -> Cell:
    """Return how the setting of a cell was chosen, for reports: by which argument, and its value."""
    given = {name: value for name, value in named.items() if value is not None}
    by, value = next(iter(given.items()), ("default", None))
    if full:
        by, value = FULL_DEPTH, None
    return {"by": by, "value": dict(value) if isinstance(value, Mapping) else value}


def evaluate_points(
    run: str | Path,
    data: str | Path,
    *,
    batch_size: int = 32,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    json: str | Path | None = None,
    command: str | None = None,
) -> list[Cell]:
    """Score the operating points of a run on new rows (`offramp eval --curve`) and return their result cells.

    The first cell is the full model's and carries the curve of all points; the others are the points chosen for a loss
    or a risk, with what calibration expected of them. The arguments are those of `evaluate`.
    """
    check_output_file(json, data, run)
    predictor = Predictor.load(run, engine, precision, threads)
    command = command or python_call("evaluate_points", run, data=data)
    rows, origin = _rows(predictor, run, data, limit, columns, command)
    cells = sweep_points(predictor, rows, origin, batch_size)
    if json is not None:
        write_json(Path(json), cells)
    return cells


def _rows(
    predictor: Predictor,
    run: str | Path,
    data: str | Path,
    limit: int | None,
    columns: Mapping[str, str] | None,
    command: str,
) -> tuple[list[Row], Origin]:
    """Read and check labelled rows; also return where results on them come from."""
    remembered = remembered_columns(predictor.model.folder or run)
    given = read_rows(str(data), columns=columns, limit=limit, remembered=remembered)
    rows = with_known_labels(predictor.model, given)
    predictor.task.check_rows(rows, str(data))
    return rows, Origin(*data_and_split(str(data)), command, read_recipe(predictor.model.folder or run))
