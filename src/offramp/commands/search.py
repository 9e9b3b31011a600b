"""`offramp search` as a function: rows parted, the search kept in a file beside the model, the front scored elsewhere.

Configurations are found on some rows and scored on the others, so points promise what new rows will show. The file
`search.json` in the run folder always holds a whole state; it belongs to one model, one set of rows and one way of
breeding, and is refused for any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offramp.calibration.length_search import (
    Gene,
    SearchPlan,
    SearchProgress,
    TriedConfiguration,
    configurations_from_json,
    configurations_to_json,
    kept_shares,
    length_space,
    promising_configurations,
    search_lengths,
)
from offramp.calibration.scores import monotone_scores, shrink_scores
from offramp.calibration.subject import CalibrationContext, Predictions, point_evaluator
from offramp.commands.calibrate import warn_of_training_rows
from offramp.data.readers import fingerprint
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.model_card import render_model_card
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front
from offramp.inference.predictor import Predictor
from offramp.methods._base import PairMethod
from offramp.nn.batches import Data
from offramp.utils.files import read_json, write_json, write_text
from offramp.utils.hardware import best_precision

FILE = "search.json"
SAVE_SECONDS, SELDOM = 5.0, 20.0  # between two writes, and how many times as long as one took
FORMAT = 3  # changes when a search would breed others than the file's
REPORTED = 40  # promising points, at most, that are scored on the other rows
Row = Mapping[str, Any]
Say = Callable[[SearchProgress], None]
Scoring = Callable[[int, int], None]  # configurations scored, of how many


@dataclass(frozen=True)
class SearchRequest:
    """How to search, on how many rows, and whether to go on with what an interrupted search left."""

    plan: SearchPlan
    rows: int = 500
    resume: bool = False


def search_run(
    run: str,
    rows: Sequence[Row],
    source: str,
    wish: SearchRequest,
    say: Say = lambda _: None,
    scoring: Scoring = lambda done, total: None,
) -> OperatingPoints:
    """Search a run's lengths (and exits) and write its points.json; earlier guarantees go with the old points."""
    predictor = Predictor(folders.load_run(run))  # its old points may be damaged, or another model's
    method, task = predictor.model.method, predictor.task
    length_space(method)
    task.check(rows, source)
    if task.scores_by_loss:
        given, fix = f"the task {task.name}, which has no score to search by", "choose by hand: --set lengths=0.9,0.8,…"
        raise OfframpError("a search over lengths", given, fix)
    if len(rows) < 2:
        asked, given = "rows to search on and others to score on", f"{len(rows)} in {source}"
        raise OfframpError(asked, given, "give two or more, better some hundreds")
    mark, recipe = fingerprint(source, rows), folders.read_recipe(run)
    warn_of_training_rows(recipe, mark, source, None)
    some, others = split_search_rows(len(rows), wish.rows)
    precision = best_precision()
    file = _File(Path(run), {"rows": mark, "search_rows": len(some), "precision": precision, **_breeding(wish.plan)})
    known = file.known(wish.resume)
    finding, judging = (_subject(predictor, [rows[i] for i in part]) for part in (some, others))
    finding = replace(finding, bfloat16=precision == "bf16")
    found = file.kept(lambda heard: search_lengths(finding, wish.plan, known, heard), say)
    about = {"name": "/".join(Path(source).parts[-2:]), "rows": len(others), "fingerprint": mark}
    about |= {"search_rows": len(some), "tried": len(found)}
    points = OperatingPoints(task.metric, task.higher_is_better, about, score_found(judging, found, scoring))
    operating.save_points(Path(run), points)
    if recipe:
        write_text(Path(run) / "README.md", render_model_card(predictor.model, points, recipe))
    return points


def split_search_rows(count: int, wanted: int) -> tuple[list[int], list[int]]:
    """Rows to search on, at most half of them, and the others to score on: never the same ones."""
    if wanted < 1:
        raise OfframpError("rows to search on", f"--rows {wanted}", "give 1 or more, e.g. 500")
    order = np.random.default_rng(0).permutation(count)
    some = min(wanted, count // 2)
    return sorted(order[:some].tolist()), sorted(order[some:].tolist())


def _subject(predictor: Predictor, rows: list[Row]) -> CalibrationContext:
    return CalibrationContext(predictor.network, predictor.model.method, Data(rows, predictor.prepare(rows)))


def score_found(
    subject: CalibrationContext, found: Sequence[TriedConfiguration], scoring: Scoring
) -> tuple[OperatingPoint, ...]:
    """What was found promising, scored on other rows; what does not hold there leaves the front."""
    higher = subject.network.task.higher_is_better
    best = promising_configurations(found, higher)
    index = np.unique(np.linspace(0, len(best) - 1, REPORTED).round().astype(int))
    chosen: dict[Gene, list[OperatingPoint]] = {}
    for i in index:
        chosen.setdefault(best[i][0].gene, []).append(best[i][1])
    scoring(0, len(chosen))
    full, fresh = subject.predictions(subject.run({}, None)), list[OperatingPoint]()
    loosest = point_evaluator(subject, None, full)({})
    for done, (gene, points) in enumerate(chosen.items(), start=1):
        fresh += _again(subject, gene, points, full)
        scoring(done, len(chosen))
    return (*monotone_scores(pareto_front(shrink_scores(fresh, higher), loosest, higher)[:-1], higher), loosest)


def _again(
    subject: CalibrationContext, gene: Gene, points: list[OperatingPoint], full: Predictions
) -> Sequence[OperatingPoint]:
    """The same settings on the subject's rows."""
    pair, lengths = subject.method, {length_space(subject.method).name: kept_shares(gene)}
    if not isinstance(pair, PairMethod):
        return [point_evaluator(subject, None, full)(lengths)]
    under = subject.exits_at_lengths(lengths)
    point = point_evaluator(under, under.record() if under.method.replays else None, full)
    fresh = [point(pair.merged_settings.part(1, known.settings)) for known in points]
    return [replace(new, settings=known.settings) for new, known in zip(fresh, points, strict=True)]


def _breeding(plan: SearchPlan) -> dict[str, Any]:
    """What decides which configurations an iteration tries; how many iterations there are does not."""
    return {name: value for name, value in asdict(plan).items() if name != "iterations"}


class _File:
    """The state of a search: whose it is, and everything tried so far."""

    def __init__(self, run: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = (
            run / FILE,
            {"format": FORMAT, "model": operating.weights_fingerprint(run), **identity},
        )

    def known(self, resume: bool) -> list[TriedConfiguration]:
        """What an interrupted search of this model on these rows tried, to go on with; nothing to start a new one,
        which takes the place of a damaged file only: what hours have found is not overwritten."""
        if not self.path.is_file():
            return []
        try:
            content = dict(read_json(self.path))
            found = configurations_from_json(content["found"])
        except (OfframpError, KeyError, TypeError, ValueError) as error:
            if not resume:
                return []
            fix = "leave --resume out, or remove the file, to start a new one"
            raise OfframpError("to go on with a search", f"a damaged {self.path}", fix) from error
        odd = [name for name, value in self.identity.items() if content.get(name) != value]
        if not odd and resume:
            return found
        told = {"model": "another model", "rows": "other rows", "search_rows": "another number of search rows"}
        whose = f"a search of {' and '.join(told.get(name, f'other {name}') for name in odd)}"
        given = f"{self.path}, {whose if odd else 'this very search'}: {len(found)} configurations tried"
        again = f"give --resume to go on, or remove {FILE} to start over"
        fix = f"move {FILE} away to start a new one" if odd else again
        raise OfframpError(f"to {'go on with' if resume else 'start'} a search", given, fix)

    def kept(self, work: Callable[[Say], list[TriedConfiguration]], say: Say) -> list[TriedConfiguration]:
        """The search, its state written every few seconds and whenever it stops."""
        due, heard = time.monotonic() + SAVE_SECONDS, list[TriedConfiguration]()

        def note(news: SearchProgress) -> None:
            nonlocal due, heard
            heard, began = news.found, time.monotonic()
            if began > due:
                self._write(heard)
                due = max(began + SAVE_SECONDS, time.monotonic() + SELDOM * (time.monotonic() - began))
            say(news)

        try:
            return work(note)
        finally:
            if heard:
                self._write(heard)

    def _write(self, found: list[TriedConfiguration]) -> None:
        write_json(self.path, {**self.identity, "found": configurations_to_json(found)})
