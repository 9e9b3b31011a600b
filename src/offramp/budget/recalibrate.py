"""`offramp calibrate` as a function: new operating points for a run, and guarantees if asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from offramp import methods
from offramp.budget import risk as risks
from offramp.budget.calibrate import Settings, Subject, calibrate, candidates, per_exit
from offramp.budget.record import Recording, record
from offramp.budget.risk import Losses
from offramp.errors import OfframpError
from offramp.model import folder as folders
from offramp.model import points as operating
from offramp.model.card import card
from offramp.model.files import write_text
from offramp.model.points import Guarantee, Points
from offramp.model.predictor import Predictor
from offramp.model.runner import by_row, full_macs
from offramp.parts.batch import Data
from offramp.parts.space import Fixed, Threshold
from offramp.text.read import fingerprint

Row = Mapping[str, Any]


def recalibrate(
    run: str, rows: Sequence[Row], source: str, risk: float | None = None, confidence: float = 0.95
) -> Points:
    """Calibrate a run on labelled rows and write its points.json; earlier guarantees go with the old points."""
    predictor = Predictor.load(run)
    predictor.task.check(rows, source)
    network, method, mark = predictor.network, predictor.model.method, fingerprint(source, rows)
    if risk is not None:
        _check_provable(predictor, rows, risk, confidence)
    recipe = folders.read_recipe(run)
    _warn_of_known_rows(recipe, mark, source, risk)
    name = "/".join(Path(source).parts[-2:])
    points = calibrate(network, method, Data(rows, predictor.prepare(rows, source)), name, mark)
    for doubt in [] if isinstance(method.space, Fixed) else complaints(points):
        warnings.warn(doubt, stacklevel=2)
    if risk is not None:
        proven = prove(predictor, rows, risk, confidence)
        points = replace(points, guarantees=(proven,))
    operating.save(Path(run), points)
    if recipe:
        write_text(Path(run) / "README.md", card(predictor.model, points, recipe))
    return points


def _check_provable(predictor: Predictor, rows: Sequence[Row], risk: float, confidence: float) -> None:
    """Refuse before any work what cannot be proven after it."""
    if predictor.task.scores_by_loss or predictor.task.kind == "sequence":
        asked = f"a risk for the task {predictor.task.name}"
        raise OfframpError(asked, "a task without single answers to compare", "leave --risk out")
    risks.check(risk, confidence, len(rows) - len(rows) // 2)


def _warn_of_known_rows(recipe: Mapping[str, Any], mark: str, source: str, risk: float | None) -> None:
    if mark in (recipe.get("train_fingerprint"), recipe.get("file_fingerprint")):
        why = "are rows this run was trained on: its points will look better than they are"
        warnings.warn(f"{source} {why}" + (", and the guarantee is void" if risk else ""), stacklevel=3)
    elif risk is not None and mark == recipe.get("dev_fingerprint"):
        warnings.warn(f"the epoch of this run was chosen on {source}: prove a risk on rows it never saw", stacklevel=3)


def complaints(points: Points) -> list[str]:
    """What a user should know when exits do not pay."""
    if len(points.points) == 1:
        return ["no setting is cheaper than the full model: exits do not pay on these rows"]
    found = []
    scores = [p.score for p in points.points]
    useful = [p for p in points.points[:-1] if not points.better(points.loosest.score - 0.02 * points.scale, p.score)]
    if not useful:
        found.append("every cheaper setting loses two points or more: train longer, or pool otherwise (--set pool=…)")
    if len(set(scores[:-1])) == 1 and len(scores) > 3:
        found.append("all early settings score the same: an off-ramp may have collapsed to one answer")
    return found


def prove(predictor: Predictor, rows: Sequence[Row], risk: float, confidence: float) -> Guarantee:
    """The cheapest setting whose departure from the full model is proven small; the full model if there is none."""
    find, test = risks.halves(len(rows), seed=0)
    network, method = predictor.network, predictor.model.method
    first = _subject(predictor, [rows[i] for i in find])
    second = _subject(predictor, [rows[i] for i in test])
    tapes = [record(network, subject.data) if method.replays else None for subject in (first, second)]
    ordered = _careful_first(first, tapes[0], _candidates(first, tapes[0]))

    def measured(settings: Settings) -> tuple[Losses, float]:
        return _departures(second, tapes[1], settings)

    full = asdict(method.settings())
    proven = risks.guarantee([full, *ordered], measured, risk, confidence, predictor.task.departs_whole)
    if proven is None or proven.settings == full:
        warnings.warn(f"no cheaper setting could be shown to keep within a risk of {risk}: using the full model",
                      stacklevel=2)  # fmt: skip
    return proven or Guarantee(risk, confidence, full, len(test), 0.0, 1.0)


def _subject(predictor: Predictor, rows: list[Row]) -> Subject:
    return Subject(predictor.network, predictor.model.method, Data(rows, predictor.prepare(rows)))


def _candidates(subject: Subject, tape: Recording | None) -> list[Settings]:
    tape = tape or record(subject.network, subject.data)
    found = candidates(subject.network, subject.method, tape)
    per_ramp = isinstance(subject.method.space, Threshold) and subject.method.replays
    return found + (per_exit(subject) if per_ramp else [])


def _careful_first(subject: Subject, tape: Recording | None, found: list[Settings]) -> list[Settings]:
    """The front of departure against cost on the finding half, from dearest and safest to cheapest."""
    measured = [(float(losses.mean()), share, s) for s in found for losses, share in [_departures(subject, tape, s)]]
    front: list[Settings] = []
    cheapest = 1.0
    for _, share, settings in sorted(measured, key=lambda item: (item[0], item[1])):
        if share < cheapest:
            front.append(asdict(methods.configure(subject.method.settings, settings, subject.method.name)))
            cheapest = share
    return front


def _departures(subject: Subject, tape: Recording | None, settings: Settings) -> tuple[Losses, float]:
    task, data = subject.network.task, subject.data
    ours, full = (subject.run(s, tape) for s in (settings, {}))
    said, meant = (task.predictions(data.rows, data.encoded, outcome.logits) for outcome in (ours, full))
    whole = full_macs(subject.network, data.encoded, ours).sum()
    spent = by_row(ours, data.encoded, len(data.rows))[2].sum() / whole
    return np.array(task.departures(said, meant)), float(spent)
