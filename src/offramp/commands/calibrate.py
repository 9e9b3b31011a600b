"""`offramp calibrate` as a function: operating points for a run, searched lengths and guarantees if wanted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offramp import engines
from offramp.calibration.calibrate import (
    CalibrationContext,
    CalibrationEngine,
    check_closed_exits,
    find_operating_points,
)
from offramp.calibration.disagreement import find_disagreement_points, record_unlabelled
from offramp.calibration.latency import LatencyRequest, find_latency_point
from offramp.calibration.length_search import (
    ReportProgress,
    ReportScoring,
    SearchPlan,
    SearchRequest,
    check_searchable,
    find_length_points,
    rows_not_searched_on,
    searched_settings,
)
from offramp.calibration.loss_bounds import CONFIDENCE, check_confidence
from offramp.calibration.risk import (
    RecordedRows,
    check_provable,
    check_task_has_risk,
    prove_risk,
    prove_risk_on,
)
from offramp.calibration.usefulness import distrust
from offramp.data.overlap import (
    FEW_ROWS,
    MOST_ROWS,
    read_training_marks,
    repeated_texts,
    row_marks,
    training_rows_reason,
)
from offramp.data.readers import fingerprint, read_rows
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.budget import parse_latency
from offramp.inference.finetuned import with_known_labels
from offramp.inference.model_card import write_model_card
from offramp.inference.operating_points import AGREEMENT, OperatingPoints, pareto_front
from offramp.inference.predictor import Predictor, graph_folder
from offramp.inference.run_folder import remembered_columns
from offramp.nn.batches import Data
from offramp.tasks import Task
from offramp.training.schedule import LARGEST_SEED
from offramp.utils.command_line import check_given_with

CONFIDENCE_OF_RISK = 0.95
ENOUGH_ROWS = 100  # rows below which operating points are hardly more than luck
FEWEST = 20  # rows without labels
FINDING = 3  # of rows without labels, every third finds settings, and the others test them
FAR_FEWER = 4  # times fewer rows than the points in place were found on
Row = Mapping[str, Any]


def calibrate(
    run: str | Path,
    data: str | Path,
    *,
    risk: float | None = None,
    confidence: float | None = None,
    latency: str | float | None = None,
    percentile: float | None = None,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    loss_confidence: float = CONFIDENCE,
    force: bool = False,
    search: bool = False,
    iterations: int | None = None,
    mutations: int | None = None,
    crossovers: int | None = None,
    search_rows: int | None = None,
    seed: int | None = None,
    resume: bool = False,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    closed_exits: Sequence[int] = (),
    on_search: ReportProgress = lambda _: None,
    on_scoring: ReportScoring = lambda done, total: None,
) -> OperatingPoints:
    """Find settings for every budget on rows that a run was not trained on, and write its points.json.

        points = offramp.calibrate("runs/mine", "calibration.jsonl", risk=0.02, confidence=0.95)
        points.full_point.score, points.guarantees[0].mac_share

    Labelled rows replace the operating points, guarantees and latencies; points for a `max_disagreement` stay. Rows
    without labels are labelled by the full model: they replace the points for a `max_disagreement` that were found on
    the same engine and precision (of a run without labelled points, the operating points too).

    Args:
        run: a run folder.
        data: a file of rows, or the name of a data set on the hub; the texts alone, where there are no labels.
        risk: also prove a setting whose predictions disagree with the full model at most this often.
        confidence: with which the risk must hold, 0.95 by default.
        latency: also find a setting that answers single rows within this time, "5ms" or seconds.
        percentile: of rows that must be answered within the latency, 95 by default.
        engine, precision, threads: what the latency is measured on. Where an engine or a precision is named, the points
            are found on it too; otherwise they are found on torch in fp32, and hold for every engine in fp32.
        loss_confidence: with which a point that is chosen by `max_loss` loses no more than that on new rows.
        force: replace points that were found on many more rows.
        search: search by evolution how many tokens each layer keeps (and, in a pair, when rows leave).
        iterations: generations of the search after the first population, 30 by default.
        mutations, crossovers: new configurations of each kind in a generation of the search, 30 by default.
        search_rows: rows to search on, 500 by default, at most half of them; the others score what was found.
        seed: seed of the search's random numbers, 0 by default.
        resume: continue a search that was interrupted.
        limit: use only the first rows.
        columns: columns of the file by the names that the task expects, e.g. {"text": "sentence"}.
        closed_exits: layers whose exits no setting may use, e.g. [0]; for methods with a threshold for every exit.
        on_search: is called after every configuration that the search has tried.
        on_scoring: is called with the number of configurations scored and of all.
    """
    plan = {"iterations": iterations, "mutations": mutations, "crossovers": crossovers, "seed": seed}
    searching = {"search-rows": search_rows, "resume": resume, **plan}
    check_given_with("--search", search, {f"--{name}": value for name, value in searching.items()})
    check_given_with("--risk", risk is not None, {"--confidence": confidence})
    check_given_with("--latency", latency is not None, {"--percentile": percentile})
    seconds = parse_latency(latency) if isinstance(latency, str) else latency
    named = (engine, precision) != (engines.AUTO, "fp32")
    if threads is not None and seconds is None and not named:
        raise OfframpError("an engine to be timed", f"--threads {threads} without --latency", "add --latency 5ms")
    if search and (named or threads is not None):
        given = f"--search and --engine {engine} --precision {precision}"
        raise OfframpError("points for an engine", given, "search first, then run `offramp calibrate` without --search")
    how = EngineOptions(precision, threads, graph_folder(run)) if named else None
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED):
        raise OfframpError("a seed", f"--seed {seed}", f"give 0 to {LARGEST_SEED}")
    if search and (risk is not None or seconds is not None):
        given = f"--search and {'--risk' if risk is not None else '--latency'}"
        raise OfframpError(
            "one kind of calibration", given, "search first, then run `offramp calibrate` without --search"
        )
    check_confidence(loss_confidence)
    closed = frozenset(closed_exits)
    within = LatencyRequest.percentile if percentile is None else percentile
    timed = None if seconds is None else LatencyRequest(seconds, within, engine, precision, threads)
    rows = read_rows(str(data), columns=columns, limit=limit, remembered=remembered_columns(run))
    if search:
        chosen = SearchPlan(**{name: value for name, value in plan.items() if value is not None})
        wanted = SearchRequest(chosen, SearchRequest.rows if search_rows is None else search_rows, resume)
        return search_run(str(run), rows, str(data), wanted, on_search, on_scoring, loss_confidence, force, closed)
    return calibrate_run(
        str(run),
        rows,
        str(data),
        risk,
        CONFIDENCE_OF_RISK if confidence is None else confidence,
        timed,
        loss_confidence,
        force,
        closed,
        engine,
        how,
    )


def calibrate_run(
    run: str,
    rows: Sequence[Row],
    source: str,
    risk: float | None = None,
    confidence: float = CONFIDENCE_OF_RISK,
    latency: LatencyRequest | None = None,
    loss_confidence: float = CONFIDENCE,
    force: bool = False,
    closed_exits: frozenset[int] = frozenset(),
    engine: str = engines.AUTO,
    how: EngineOptions | None = None,
) -> OperatingPoints:
    """Calibrate a run on rows and write its points.json.

    Rows without labels find points for a disagreement only. Labelled rows find all others, and guarantees and latencies
    of the old points are dropped. With `how` points are found on the engine and in its precision, else on torch in
    fp32.
    """
    model = folders.load_run(run)  # without its old points, which may be another model's
    predictor = Predictor(model, None, "torch") if how is None else Predictor(model, None, engine, how)
    place = CalibrationEngine(predictor.engine_name, predictor.how.precision, predictor.engine)
    old = _old_points(Path(run))
    label = predictor.task.target
    if label and rows and not any(label in row for row in rows):
        if latency is not None or closed_exits:
            given = f"{source}, whose rows have no {label!r}, and {'--latency' if latency else '--close-exit'}"
            raise OfframpError("labelled rows", given, "give labelled rows, or calibrate for a disagreement only")
        return calibrate_disagreement(run, predictor, rows, source, old, place, risk, confidence, force)
    if not force:
        check_enough_to_replace(Path(run), len(rows), source)
    rows = with_known_labels(predictor.model, rows)
    predictor.task.check_rows(rows, source)
    network, method, rows_fingerprint = predictor.network, predictor.model.method, fingerprint(source, rows)
    recipe = folders.read_recipe(run)
    rows, seen = leave_out_seen_rows(run, recipe, predictor.task, rows, source)
    if risk is not None and seen:
        given = f"{source}: {training_rows_reason(seen)}"
        raise OfframpError(f"a proven risk of {risk:g}", given, "give rows that training has not seen")
    if risk is not None:
        check_task_has_risk(predictor.task)
        check_provable(risk, confidence, len(rows) - len(rows) // 2)
    if latency is not None and network.decoder is not None:
        given = f"the task {predictor.task.name!r}, whose time depends on how much is generated"
        raise OfframpError("answers within a time", given, "leave --latency out, and choose by --budget")
    warn_of_training_rows(recipe, rows_fingerprint, source, risk)
    if len(rows) < ENOUGH_ROWS:
        few = f"{len(rows)} rows say little about the cost of settings: {ENOUGH_ROWS} or more would be better"
        warnings.warn(few, stacklevel=2)
    searched = searched_settings(Path(run))
    scoring, among = rows_not_searched_on(Path(run), rows_fingerprint, len(rows)) if searched else (None, 0)
    found_on = len(rows) - len(scoring) if scoring is not None else 0
    if scoring is not None:
        warnings.warn(f"lengths were searched on {found_on} of these rows: only the others score them", stacklevel=2)
        rows = [rows[number] for number in scoring]
    data = Data(rows, predictor.prepare(rows, source))
    name = "/".join(Path(source).parts[-2:])
    points = find_operating_points(
        network, method, data, name, rows_fingerprint, searched, loss_confidence, closed_exits, place, among
    )
    points = distrust_training_rows(points, run, recipe, predictor.task, rows)
    if searched:
        points = replace(points, data={**points.data, "searched": True})
    if scoring is not None:  # for the next calibration on the same file
        points = replace(points, data={**points.data, "search_rows": found_on, "scored": among})
    for warning in points.warnings:
        warnings.warn(warning, stacklevel=2)
    if risk is not None:
        context = CalibrationContext(network, method, data, searched=searched, closed_exits=closed_exits, engine=place)
        proven = prove_risk(context, context.record() if method.replays else None, risk, confidence)
        if proven.settings == asdict(method.settings()):
            full = f"no cheaper setting could be shown to stay within a risk of {risk}: using the full model"
            warnings.warn(full, stacklevel=2)
        points = replace(points, guarantees=(proven,))
    if old is not None and not closed_exits:  # the same weights: what texts have shown of them still holds
        kept = old.default if old.default_budget.kind == "disagreement" else None
        points = replace(points, disagreements=old.disagreements, default=kept)
    if latency is not None:
        points = replace(points, latencies=(find_latency_point(run, points, rows, source, latency),))
    operating.save_points(Path(run), points)
    write_model_card(Path(run), predictor.model, points, recipe)
    return points


def calibrate_disagreement(
    run: str,
    predictor: Predictor,
    rows: Sequence[Row],
    source: str,
    old: OperatingPoints | None,
    place: CalibrationEngine,
    risk: float | None = None,
    confidence: float = CONFIDENCE_OF_RISK,
    force: bool = False,
) -> OperatingPoints:
    """Find points for a `max_disagreement` on rows without labels, and write them beside the run's other points.

    A third of the rows finds settings and the others test them, as `attach` does with texts of their own.
    """
    task, recipe, mark = predictor.task, folders.read_recipe(run), fingerprint(source, rows)
    if len(rows) < FEWEST:
        fix = f"give {FEWEST} or more; with labels, name their column: --column {task.target}=COLUMN"
        raise OfframpError("rows to find points on", f"{len(rows)} rows of {source}, without {task.target!r}", fix)
    why = f"rows of {source} have no {task.target!r}: only points for a disagreement with the full model are found"
    warnings.warn(why, stacklevel=3)
    check_task_has_risk(task)
    rows, seen = leave_out_seen_rows(run, recipe, task, rows, source)
    tested_rows = len(rows) - len(rows) // FINDING
    if risk is not None and seen:
        given = f"{source}: {training_rows_reason(seen)}"
        raise OfframpError(f"a proven risk of {risk:g}", given, "give texts that training has not seen")
    if risk is not None:
        check_provable(risk, confidence, tested_rows)
    same = [one for one in old.disagreements if one.holds_on(place.name, place.precision)] if old else []
    if not force and same and tested_rows * FAR_FEWER < same[0].rows:
        given = f"{tested_rows} rows of {source} to test with, where the points in place were tested on {same[0].rows}"
        fix = "give more rows, or --force (force=True) to replace them all the same"
        raise OfframpError(f"points for a disagreement of {run} that are worth having", given, fix)
    order = np.random.default_rng(0).permutation(len(rows))
    parts = [[rows[i] for i in some] for some in np.split(order, [len(rows) // FINDING])]
    finding, testing = (_recorded(predictor, part, source, place) for part in parts)
    disagreements, tested = find_disagreement_points(finding, testing)
    points = old
    if points is None or (points.metric == AGREEMENT and points.holds_on(place.name, place.precision)):
        full, *others = tested
        name = "/".join(Path(source).parts[-2:]) + " (two thirds)"
        data = {"name": name, "rows": tested_rows, "fingerprint": mark}
        front = pareto_front(others, replace(full, score=1.0), True)
        points = OperatingPoints(
            AGREEMENT, True, data, front, engine=place.name, precision=place.precision,
            default=old.default if old else {"kind": "disagreement", "value": 0.01},
            guarantees=old.guarantees if old else (), latencies=old.latencies if old else (),
            disagreements=old.disagreements if old else (),
        )  # fmt: skip
    if seen:
        warnings.warn(f"{source}: {training_rows_reason(seen)}; nothing is proven", stacklevel=2)
        disagreements = [replace(one, proven=False) for one in disagreements]
    elsewhere = [one for one in points.disagreements if one not in same]
    points = replace(points, disagreements=(*elsewhere, *disagreements))
    for warning in repeated_texts(row_marks(rows, task.input_columns)):
        warnings.warn(warning, stacklevel=2)
    if risk is not None:
        proven = prove_risk_on(finding, testing, risk, confidence)
        here = place.name, place.precision
        kept = [one for one in points.guarantees if not (one.risk == risk and one.holds_on(*here))]
        points = replace(points, guarantees=(*kept, proven))
    operating.save_points(Path(run), points)
    write_model_card(Path(run), predictor.model, points, recipe)
    return points


def _recorded(predictor: Predictor, rows: Sequence[Row], source: str, place: CalibrationEngine) -> RecordedRows:
    """Return rows with the full model's answers as labels, and their recording where the method can be replayed."""
    method = predictor.model.method
    context, recording = record_unlabelled(
        predictor.network, method, Data(rows, predictor.prepare(rows, source)), place
    )
    return context, recording if method.replays else None


def leave_out_seen_rows(
    run: str, recipe: Mapping[str, Any], task: Task, rows: Sequence[Row], source: str
) -> tuple[Sequence[Row], float]:
    """Return the rows that training has not seen, and the share of seen ones where they cannot be left out.

    They stay where nothing else would be left, where training had more rows than a run folder remembers, and where
    labelled rows are most of them training rows: such points are not trusted at all.
    """
    known, own = read_training_marks(Path(run)), row_marks(rows, task.input_columns)
    whole = [recipe.get(name) for name in ("train_fingerprint", "file_fingerprint")]
    if not known.marks:  # exits attached by an earlier version
        whole.append(recipe.get("text_fingerprint"))
    share = 1.0 if fingerprint(source, rows) in whole else known.share_of(own)
    if share <= FEW_ROWS:
        return rows, 0.0
    labelled = any(task.target in row for row in rows)
    unseen = [row for row, mark in zip(rows, own, strict=True) if mark not in known.marks]
    if not known.complete or len(unseen) < FEWEST or (labelled and share > MOST_ROWS):
        return rows, share
    left_out = f"{len(rows) - len(unseen)} of {len(rows)} rows of {source} were seen in training and are left out"
    warnings.warn(left_out, stacklevel=4)
    return unseen, 0.0


def _old_points(folder: Path) -> OperatingPoints | None:
    """Return a run's points; none where they cannot be used."""
    try:
        return operating.load_points(folder) if (folder / "points.json").is_file() else None
    except OfframpError:  # damaged, or another model's
        return None


def search_run(
    run: str,
    rows: Sequence[Row],
    source: str,
    request: SearchRequest,
    report: ReportProgress = lambda _: None,
    report_scoring: ReportScoring = lambda done, total: None,
    loss_confidence: float = CONFIDENCE,
    force: bool = False,
    closed_exits: frozenset[int] = frozenset(),
) -> OperatingPoints:
    """Search a run's lengths (and exits) and write its points.json; guarantees of the old points are dropped."""
    if not force:
        check_enough_to_replace(Path(run), len(rows), source)
    predictor = Predictor(folders.load_run(run))  # its old points may be damaged, or another model's
    method, task = predictor.model.method, predictor.task
    task.check_rows(rows, source)
    check_searchable(method, task, len(rows), source)
    rows_fingerprint, recipe = fingerprint(source, rows), folders.read_recipe(run)
    rows, _ = leave_out_seen_rows(run, recipe, task, rows, source)
    warn_of_training_rows(recipe, rows_fingerprint, source, None)
    data = Data(rows, predictor.prepare(rows, source))
    check_closed_exits(predictor.network, method, closed_exits)
    context = CalibrationContext(
        predictor.network, method, data, loss_confidence=loss_confidence, closed_exits=closed_exits
    )
    name = "/".join(Path(source).parts[-2:])
    points = find_length_points(context, request, Path(run), name, rows_fingerprint, report, report_scoring)
    points = distrust_training_rows(points, run, recipe, task, rows)
    for warning in points.warnings:
        warnings.warn(warning, stacklevel=2)
    operating.save_points(Path(run), points)
    write_model_card(Path(run), predictor.model, points, recipe)
    return points


def check_enough_to_replace(folder: Path, rows: int, source: str) -> None:
    """Refuse to replace points that were found on far more rows; points that cannot be used may always be replaced."""
    points = _old_points(folder)
    if points is None or not points.trusted or rows * FAR_FEWER >= points.data["rows"]:
        return
    given = f"{rows} rows of {source}, where the points in place come from {points.data['rows']} rows"
    fix = "calibrate on more rows, or give --force (force=True) to replace them all the same"
    raise OfframpError(f"operating points for {folder} that are worth having", given, fix)


def distrust_training_rows(
    points: OperatingPoints, run: str, recipe: Mapping[str, Any], task: Task, rows: Sequence[Row]
) -> OperatingPoints:
    """Return the points, not to be trusted if most of their rows are rows that the run was trained on."""
    if points.data["fingerprint"] in (recipe.get("train_fingerprint"), recipe.get("file_fingerprint")):
        share = 1.0
    else:
        share = read_training_marks(Path(run)).share_of(row_marks(rows, task.input_columns))
    return distrust(points, training_rows_reason(share)) if share > MOST_ROWS else points


def warn_of_training_rows(recipe: Mapping[str, Any], rows_fingerprint: str, source: str, risk: float | None) -> None:
    """Warn when points will look better than they are, or a guarantee would be void."""
    if rows_fingerprint in (recipe.get("train_fingerprint"), recipe.get("file_fingerprint")):
        why = "are rows this run was trained on: its points will look better than they are"
        warnings.warn(f"{source} {why}", stacklevel=3)
    elif risk is not None and rows_fingerprint == recipe.get("dev_fingerprint"):
        warnings.warn(f"the epoch of this run was chosen on {source}: prove a risk on rows it never saw", stacklevel=3)
