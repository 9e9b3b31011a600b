"""The search of a run's lengths: which points it writes, how it continues after an interruption, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.length_search import (
    SEARCH_FILE,
    SearchPlan,
    SearchProgress,
    SearchRequest,
    configuration_front,
    promising_configurations,
    rows_not_searched_on,
    score_found,
    search_lengths,
    searched_settings,
    split_search_rows,
)
from offramp.commands.calibrate import calibrate_run, search_run
from offramp.data.readers import fingerprint
from offramp.errors import OfframpError
from offramp.inference.operating_points import pareto_front
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests import factories
from tests.calibration.test_length_search import SMALL_PLAN, context_of

ROWS = factories.labelled_rows("classification", 30, 5)
ONE_POPULATION = SearchRequest(SearchPlan(0), 12)
pytestmark = pytest.mark.usefixtures("small_search")


@pytest.fixture
def own_run(run_or_pair: Path, tmp_path: Path) -> Path:
    """A copy of the run or the pair that a test may change."""
    return Path(shutil.copytree(run_or_pair, tmp_path / "own"))


@pytest.fixture
def own_simple_run(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(run, tmp_path / "own"))


def search(
    run: Path, request: SearchRequest, report: Callable[[SearchProgress], None] = lambda _: None
) -> dict[str, Any]:
    """Search a run and return its new points.json."""
    search_run(str(run), ROWS, "some/new.jsonl", request, report)
    return read_json(run / "points.json")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize(("count", "wanted"), [(20, 5), (20, 500), (2, 1)])
def test_split_search_rows_shares_no_row(count: int, wanted: int) -> None:
    search_rows, scoring_rows = split_search_rows(count, wanted)
    assert sorted(search_rows + scoring_rows) == list(range(count))
    assert len(search_rows) == min(wanted, count // 2)


def test_split_search_rows_refuses_no_rows() -> None:
    with pytest.raises(OfframpError, match="--rows 0"):
        split_search_rows(10, 0)


def test_interrupted_search_continues_to_the_same_result(own_run: Path) -> None:
    expected = search(own_run, SearchRequest(SMALL_PLAN, 12))
    assert expected["data"]["search_rows"] == 12 and expected["data"]["rows"] == 18
    state = read_json(own_run / SEARCH_FILE)
    (own_run / SEARCH_FILE).unlink()
    reported: list[SearchProgress] = []

    def stop(progress: SearchProgress) -> None:
        reported.append(progress)
        if progress.iteration == 1 and progress.left == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(own_run, SearchRequest(SMALL_PLAN, 12), stop)
    kept = len(read_json(own_run / SEARCH_FILE)["found"])
    assert kept == len(reported)
    resumed: list[SearchProgress] = []
    assert search(own_run, SearchRequest(SMALL_PLAN, 12, resume=True), resumed.append) == expected
    assert read_json(own_run / SEARCH_FILE) == state and len(resumed) == len(state["found"]) - kept


def test_search_writes_points_of_the_scoring_rows(own_run: Path) -> None:
    stored = search(own_run, SearchRequest(SMALL_PLAN, 12))
    model = Predictor.load(own_run)
    assert model.points is not None
    others = [ROWS[i] for i in split_search_rows(30, 12)[1]]
    encoded = model.prepare(others)
    assert "searched on 12 other rows" in (own_run / "README.md").read_text()
    for point in model.points.points:
        output = model.run(encoded, model.settings(given=point.settings), 4)
        predictions = model.task.predictions(others, encoded, output.logits)
        assert model.task.metrics(others, predictions)["accuracy"] == pytest.approx(point.seen)
        assert point.seen is not None and point.score <= point.seen + 1e-4, "the bias of choosing is subtracted"
        assert output.macs.sum() / model.full_macs(encoded) == pytest.approx(point.mac_share)
    assert stored["points"][-1]["mac_share"] == pytest.approx(1.0)
    model.predict(["a film"], budget=0.8)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("field", ["model", "rows", "search_rows", "seed"])
def test_search_refuses_the_state_of_another_search(own_simple_run: Path, field: str, resume: bool) -> None:
    search(own_simple_run, ONE_POPULATION)
    state = read_json(own_simple_run / SEARCH_FILE)
    (own_simple_run / SEARCH_FILE).write_text(json.dumps({**state, field: "other"}))
    with pytest.raises(OfframpError, match=r"other.*\n.*move search\.json away"):
        search(own_simple_run, replace(ONE_POPULATION, resume=resume))


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"found": [{}]}'])
def test_damaged_state_is_refused_to_resume_and_replaced_by_a_new_search(own_simple_run: Path, damage: str) -> None:
    points = search(own_simple_run, ONE_POPULATION)
    (own_simple_run / SEARCH_FILE).write_text(damage)
    with pytest.raises(OfframpError, match=r"damaged.*search\.json"):
        search(own_simple_run, replace(ONE_POPULATION, resume=True))
    assert read_json(own_simple_run / "points.json") == points
    assert search(own_simple_run, ONE_POPULATION)["points"] == points["points"]


def test_finished_search_is_not_started_again_without_resume(own_simple_run: Path) -> None:
    search(own_simple_run, SearchRequest(replace(SMALL_PLAN, iterations=0), 12))
    before = factories.read_files(own_simple_run)
    with pytest.raises(OfframpError, match=r"--resume to continue, or remove search\.json"):
        search(own_simple_run, SearchRequest(SMALL_PLAN, 12))  # the number of iterations makes no other search
    assert factories.read_files(own_simple_run) == before
    (own_simple_run / SEARCH_FILE).unlink()
    search(own_simple_run, SearchRequest(SearchPlan(0), 11))


def test_score_found_scores_the_best_of_every_range_of_costs(run: Path) -> None:
    """On few rows the shortest lengths may look as good as all tokens; the scoring rows decide."""
    context = context_of(run)
    tried = search_lengths(context, SearchPlan(0), [], lambda _: None)
    lucky = [replace(one, points=(replace(one.points[0], score=1.0 - 0.1 * n),)) for n, one in enumerate(tried)]
    assert len(configuration_front(lucky, True)) == 1
    best = promising_configurations(lucky, True)
    assert len(best) > len(tried) / 2
    reported: list[tuple[int, int]] = []
    points, bounds, scored = score_found(context, lucky, lambda *progress: reported.append(progress))
    assert reported[-1] == (len(best), len(best)), "all of them were scored, not one"
    fresh = [point for one in tried for point in one.points if one.gene in {kept.gene for kept, _ in best}]
    expected = pareto_front(fresh, points[-1], higher_is_better=True)
    settings = [point.settings for point in points]
    assert all(point.settings in settings for point in expected), "others are there for their bounds"
    assert bounds.rows == len(context.data.rows) and scored == len(best)


@pytest.mark.parametrize("risk", [None, 0.9])
def test_recalibrate_tries_searched_settings_again(
    own_run: Path, monkeypatch: pytest.MonkeyPatch, risk: float | None
) -> None:
    """Calibrating again (for a time, a risk, other rows) does not lose the searched lengths.

    On the rows of the search only those that found nothing score: the others would prove their own choice.
    """
    search(own_run, ONE_POPULATION)
    stored = read_json(own_run / "points.json")
    stored["points"][0]["settings"]["lengths"] = [0.97, 0.93, 0.91]
    (own_run / "points.json").write_text(json.dumps(stored))
    tried: list[tuple[int, list[float]]] = []  # on how many rows, which lengths

    def spy(name: str) -> Callable[..., Any]:
        method = getattr(CalibrationContext, name)

        def called(context: CalibrationContext, settings: dict[str, Any], *more: Any) -> Any:
            tried.append((len(context.data.rows), list(settings.get("lengths", ()))))
            return method(context, settings, *more)

        return called

    for name in ("run", "exits_at_lengths"):
        monkeypatch.setattr(CalibrationContext, name, spy(name))
    with pytest.warns(UserWarning, match="searched on 12 of these rows"):
        calibrate_run(str(own_run), ROWS, "a.jsonl", risk)
    searched = {(rows, lengths == [0.97, 0.93, 0.91]) for rows, lengths in tried}
    assert {(18, True), *([(9, True)] if risk else [])} <= searched and max(rows for rows, _ in searched) == 18
    assert read_json(own_run / "points.json")["data"].get("searched"), "nor when it is calibrated once more"
    assert rows_not_searched_on(own_run, fingerprint("a.jsonl", ROWS), 30)[0] == split_search_rows(30, 12)[1]
    tried.clear()
    calibrate_run(str(own_run), factories.labelled_rows("classification", 30, seed=77), "b.jsonl")
    assert max(rows for rows, _ in tried) == 30, "other rows all score"
    (own_run / "points.json").write_text("{")
    assert searched_settings(own_run) == []


def test_search_refuses_a_task_without_a_score(base: str, tmp_path: Path) -> None:
    quick = Schedule(epochs=1, batch_size=24)
    run = factories.run_folder(base, tmp_path, "length_adaptive", "masked_lm", schedule=quick)
    rows = factories.labelled_rows("masked_lm", 8, 5)
    with pytest.raises(OfframpError, match=r"masked_lm(.|\n)*--set lengths="):
        search_run(str(run), rows, "some/new.jsonl", SearchRequest(SMALL_PLAN))


@pytest.mark.parametrize("points", ["{", '{"model": "another"}'])
def test_search_replaces_unusable_points(own_simple_run: Path, points: str) -> None:
    (own_simple_run / "points.json").write_text(points)
    search(own_simple_run, ONE_POPULATION)
    assert Predictor.load(own_simple_run).points is not None


def test_search_reports_the_progress_of_scoring(own_run: Path) -> None:
    reported: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        reported.append((done, total))

    search_run(str(own_run), ROWS, "some/new.jsonl", ONE_POPULATION, report_scoring=report)
    assert len(reported) > 1 and reported == [(done, len(reported) - 1) for done in range(len(reported))]


def test_question_answering_works_at_searched_lengths(base: str, tmp_path: Path) -> None:
    """Dropped tokens return at the end, so an answer is a piece of its context whatever was dropped."""
    quick = Schedule(epochs=1, batch_size=24, lr=0.005)
    run = factories.run_folder(base, tmp_path, "length_adaptive", "question_answering", schedule=quick)
    rows = factories.labelled_rows("question_answering", 16, 5)
    points = search_run(str(run), rows, "some/new.jsonl", SearchRequest(SearchPlan(1, 2, 2), 8))
    model = Predictor.load(run)
    encoded, tight = model.prepare(rows), model.settings(given={"lengths": (0.3, 0.2, 0.1)})
    short, full = (model.run(encoded, settings) for settings in (tight, model.settings(1.0)))
    assert short.macs.sum() < 0.6 * full.macs.sum() and points.points[-1].mac_share == pytest.approx(1.0)
    assert [logits.shape for logits in short.logits] == [logits.shape for logits in full.logits]
    at_tight, at_cheapest = model.finish(rows, encoded, short), model.predict(rows, budget=points.points[0].mac_share)
    for row, first, second in zip(rows, at_tight, at_cheapest, strict=True):
        assert all(one["answer"] and one["answer"] in row["context"] for one in (first, second))


def test_search_refuses_a_run_without_lengths(trained: Path) -> None:
    with pytest.raises(OfframpError, match="--method length_adaptive"):
        search(trained, SearchRequest(SMALL_PLAN))


def test_search_refuses_a_folder_that_is_no_run(base: str) -> None:
    with pytest.raises(OfframpError, match="offramp train"):
        search(Path(base), SearchRequest(SMALL_PLAN))
