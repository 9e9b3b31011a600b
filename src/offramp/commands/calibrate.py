"""`offramp calibrate` as a function: new operating points for a run, and guarantees if asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp import methods
from offramp.calibration import risk as risks
from offramp.calibration.calibrate import calibrate, explore_settings, has_searchable_thresholds
from offramp.calibration.latency import LatencyRequest, find_latency_point
from offramp.calibration.replay import ExitRecording
from offramp.calibration.risk import Losses
from offramp.calibration.scores import select_rows
from offramp.calibration.subject import (
    CalibrationContext,
    Settings,
    candidate_settings,
    search_exit_settings,
    unique_settings,
)
from offramp.data.readers import fingerprint
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import full_macs
from offramp.inference.model_card import render_model_card
from offramp.inference.operating_points import OperatingPoints, RiskGuarantee, pareto_front
from offramp.inference.predictor import Predictor
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data
from offramp.utils.files import write_text

ENOUGH = 100  # rows below which operating points are hardly more than luck
Row = Mapping[str, Any]
DisagreementEvaluator = Callable[[Settings], tuple[Losses, float]]


def recalibrate(
    run: str,
    rows: Sequence[Row],
    source: str,
    risk: float | None = None,
    confidence: float = 0.95,
    wish: LatencyRequest | None = None,
) -> OperatingPoints:
    """Calibrate a run on labelled rows and write its points.json; what was shown of the old points goes with them."""
    predictor = Predictor(folders.load_run(run))  # its old points may be another model's
    predictor.task.check(rows, source)
    network, method, mark = predictor.network, predictor.model.method, fingerprint(source, rows)
    if risk is not None:
        _check_provable(predictor, rows, risk, confidence)
    if wish is not None and network.decoder is not None:
        given = f"the task {predictor.task.name!r}, whose time hangs on how much is said"
        raise OfframpError("answers within a time", given, "leave --latency out, and choose by --budget")
    recipe = folders.read_recipe(run)
    warn_of_training_rows(recipe, mark, source, risk)
    if len(rows) < ENOUGH:
        few = f"{len(rows)} rows tell little of what settings cost: {ENOUGH} or more would be better"
        warnings.warn(few, stacklevel=2)
    name = "/".join(Path(source).parts[-2:])
    data = Data(rows, predictor.prepare(rows, source))
    known = searched_settings(Path(run))
    points = calibrate(network, method, data, name, mark, known)
    points = replace(points, data={**points.data, **({"searched": True} if known else {})})
    for noticed in points.warnings:
        warnings.warn(noticed, stacklevel=2)
    if risk is not None:
        subject = CalibrationContext(network, method, data, searched=known)
        proven = prove_risk(subject, subject.record() if method.replays else None, risk, confidence)
        if proven.settings == asdict(method.settings()):
            no = f"no cheaper setting could be shown to keep within a risk of {risk}: using the full model"
            warnings.warn(no, stacklevel=2)
        points = replace(points, guarantees=(proven,))
    if wish is not None:
        points = replace(points, latencies=(find_latency_point(run, points, rows, source, wish),))
    operating.save_points(Path(run), points)
    if recipe:
        write_text(Path(run) / "README.md", render_model_card(predictor.model, points, recipe))
    return points


def searched_settings(run: Path) -> list[Settings]:
    """Settings that `offramp search` found for these weights, unless they were since replaced by a training's."""
    try:
        old = operating.load_points(run)
    except OfframpError:  # none, damaged, or another model's
        return []
    return [p.settings for p in old.points[:-1]] if {"search_rows", "searched"} & old.data.keys() else []


def _check_provable(predictor: Predictor, rows: Sequence[Row], risk: float, confidence: float) -> None:
    """Refuse before any work what cannot be proven after it."""
    if predictor.task.scores_by_loss or predictor.task.kind == "sequence":
        asked = f"a risk for the task {predictor.task.name}"
        raise OfframpError(asked, "a task without single answers to compare", "leave --risk out")
    risks.check_provable(risk, confidence, len(rows) - len(rows) // 2)


def warn_of_training_rows(recipe: Mapping[str, Any], mark: str, source: str, risk: float | None) -> None:
    """Say so when points will flatter themselves, or a guarantee would be void."""
    if mark in (recipe.get("train_fingerprint"), recipe.get("file_fingerprint")):
        why = "are rows this run was trained on: its points will look better than they are"
        warnings.warn(f"{source} {why}" + (", and the guarantee is void" if risk else ""), stacklevel=3)
    elif risk is not None and mark == recipe.get("dev_fingerprint"):
        warnings.warn(f"the epoch of this run was chosen on {source}: prove a risk on rows it never saw", stacklevel=3)


def prove_risk(
    subject: CalibrationContext, tape: ExitRecording | None, risk: float, confidence: float
) -> RiskGuarantee:
    """The cheapest setting whose departure from the full model is proven small; the full model if there is none."""
    find, test = risks.split_in_halves(len(subject.data.rows), seed=0)
    first, second = (_half(subject, tape, rows) for rows in (find, test))
    ordered = _careful_first(subject.method, disagreement_evaluator(*first), _candidates(*first))
    full, whole = asdict(subject.method.settings()), subject.network.task.disagreement_is_binary
    proven = risks.learn_then_test([full, *ordered], disagreement_evaluator(*second), risk, confidence, whole)
    return proven or RiskGuarantee(risk, confidence, full, len(test), 0.0, 1.0)


def _half(
    subject: CalibrationContext, tape: ExitRecording | None, rows: NDArray[np.int64]
) -> tuple[CalibrationContext, ExitRecording | None]:
    chosen = np.isin(np.arange(len(subject.data.rows)), rows)
    if tape is None:
        return subject.subset(chosen), None
    return select_rows(subject, tape, chosen)


def _candidates(subject: CalibrationContext, tape: ExitRecording | None) -> list[Settings]:
    if isinstance(subject.method, PairMethod):
        *tried, loosest = explore_settings(subject, subject.record())
        return [p.settings for p in pareto_front(tried, loosest, subject.network.task.higher_is_better)]
    tape = tape or subject.record()
    found = unique_settings([*candidate_settings(subject.network, subject.method, tape), *subject.searched])
    return found + (
        [s for _, s in search_exit_settings(subject, tape)] if has_searchable_thresholds(subject.method) else []
    )


def _careful_first(method: Method, departs: DisagreementEvaluator, found: list[Settings]) -> list[Settings]:
    """The front of departure against cost on the finding half, from dearest and safest to cheapest."""
    measured = [(float(losses.mean()), share, s) for s in found for losses, share in [departs(s)]]
    front: list[Settings] = []
    cheapest = 1.0
    for _, share, settings in sorted(measured, key=lambda item: (item[0], item[1])):
        if share < cheapest:
            front.append(asdict(methods.configure(method.settings, settings, method.name)))
            cheapest = share
    return front


def disagreement_evaluator(subject: CalibrationContext, tape: ExitRecording | None) -> DisagreementEvaluator:
    """A function that tells how far a setting is from the full model on every row, and the share of MACs it needs."""
    data, meant = subject.data, subject.predictions(subject.run({}, tape))
    full = float(full_macs(subject.network, data.encoded).sum())

    def departs(settings: Settings) -> tuple[Losses, float]:
        outcome = subject.run(settings, tape)
        losses = subject.network.task.disagreement(subject.predictions(outcome), meant)
        return np.array(losses), float(outcome.macs.sum()) / full

    return departs


def check_point_request(budget: float | None, max_loss: float | None) -> None:
    """Refuse, before any work, a budget or a loss that no point could be chosen for."""
    if budget is not None and max_loss is not None:
        raise OfframpError("one point to show", "both --budget and --max-loss", "give one of them")
    if budget is not None:
        operating.check_budget(budget)
    if max_loss is not None and not max_loss >= 0.0:
        raise OfframpError("how much of the metric may be lost", f"--max-loss {max_loss}", "give 0 or more, e.g. 0.01")
