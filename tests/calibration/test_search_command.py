"""A run's search over lengths: which points it writes, that it goes on where it stopped, and what is refused."""

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
    configuration_front,
    promising_configurations,
    score_found,
    search_lengths,
    split_search_rows,
)
from offramp.commands.calibrate import SearchRequest, calibrate_run, search_run, searched_settings
from offramp.errors import OfframpError
from offramp.inference.operating_points import pareto_front
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests import runs
from tests.calibration.test_length_search import SMALL, subject

pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture
def own(either: Path, tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(either, tmp_path / "own"))


def test_search_rows_and_scored_rows_are_never_the_same() -> None:
    for count, wanted in ((20, 5), (20, 500), (2, 1)):
        some, others = split_search_rows(count, wanted)
        assert sorted(some + others) == list(range(count)) and len(some) == min(wanted, count // 2)
    with pytest.raises(OfframpError, match="--rows 0"):
        split_search_rows(10, 0)


def go(own: Path, wish: SearchRequest, say: Callable[[SearchProgress], None] = lambda _: None) -> dict[str, Any]:
    search_run(str(own), runs.rows("classification", 30, 5), "some/new.jsonl", wish, say)
    made: dict[str, Any] = json.loads((own / "points.json").read_text())
    return made


def test_an_interrupted_search_goes_on_to_the_same_end(own: Path) -> None:
    expected = go(own, SearchRequest(SMALL, 12))
    assert expected["data"]["search_rows"] == 12 and expected["data"]["rows"] == 18
    state = json.loads((own / SEARCH_FILE).read_text())
    (own / SEARCH_FILE).unlink()
    heard: list[SearchProgress] = []

    def stop(news: SearchProgress) -> None:
        heard.append(news)
        if news.iteration == 1 and news.left == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(own, SearchRequest(SMALL, 12), stop)
    kept = len(json.loads((own / SEARCH_FILE).read_text())["found"])
    assert kept == len(heard)
    again: list[SearchProgress] = []
    assert go(own, SearchRequest(SMALL, 12, resume=True), again.append) == expected
    assert json.loads((own / SEARCH_FILE).read_text()) == state and len(again) == len(state["found"]) - kept


def test_points_are_what_the_scored_rows_show(own: Path) -> None:
    made, rows = go(own, SearchRequest(SMALL, 12)), runs.rows("classification", 30, 5)
    model = Predictor.load(own)
    others = [rows[i] for i in split_search_rows(30, 12)[1]]
    encoded = model.prepare(others)
    assert model.points is not None and "searched on 12 other rows" in (own / "README.md").read_text()
    for point in model.points.points:
        outcome = model.run(encoded, model.settings(given=point.settings), 4)
        answers = model.task.predictions(others, encoded, outcome.logits)
        assert model.task.metrics(others, answers)["accuracy"] == pytest.approx(point.seen)
        assert point.score <= point.seen  # a little is taken off for choosing
        assert outcome.macs.sum() / model.full_macs(encoded) == pytest.approx(point.mac_share)
    assert made["points"][-1]["mac_share"] == pytest.approx(1.0)
    model.predict(["a film"], budget=0.8)


def test_a_search_of_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(run, tmp_path / "own"))
    go(own, SearchRequest(SearchPlan(0), 12))
    state, points = json.loads((own / SEARCH_FILE).read_text()), (own / "points.json").read_text()
    for what in ("model", "rows", "search_rows", "seed"):
        (own / SEARCH_FILE).write_text(json.dumps({**state, what: "other"}))
        for resume in (True, False):
            with pytest.raises(OfframpError, match=r"other.*\n.*move search\.json away to start a new one"):
                go(own, SearchRequest(SearchPlan(0), 12, resume=resume))
    for damage in ("{", "[]", "7", json.dumps({**state, "found": [{}]})):
        (own / SEARCH_FILE).write_text(damage)
        with pytest.raises(OfframpError, match=r"damaged.*search\.json\n.*leave --resume out, or remove the file"):
            go(own, SearchRequest(SearchPlan(0), 12, resume=True))
    assert (own / "points.json").read_text() == points
    assert go(own, SearchRequest(SearchPlan(0), 12))["points"] == json.loads(points)["points"]


def test_the_same_search_is_not_begun_again_unasked(run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(run, tmp_path / "own"))
    go(own, SearchRequest(replace(SMALL, iterations=0), 12))  # how many there are to be is no other search
    before = runs.files(own)
    with pytest.raises(OfframpError, match=r"--resume to continue, or remove search\.json to start over"):
        go(own, SearchRequest(SMALL, 12))
    assert runs.files(own) == before
    (own / SEARCH_FILE).unlink()
    go(own, SearchRequest(SearchPlan(0), 11))


def test_a_lucky_configuration_does_not_drive_the_others_off(run: Path) -> None:
    """On few rows the shortest may look as good as all tokens; the rows it is scored on decide."""
    some = subject(run)
    tried = search_lengths(some, SearchPlan(0), [], lambda _: None)
    lucky = [replace(one, points=(replace(one.points[0], score=1.0 - 0.1 * n),)) for n, one in enumerate(tried)]
    assert len(configuration_front(lucky, True)) == 1
    best = promising_configurations(lucky, True)
    assert len(best) > len(tried) / 2, "one in every range of costs"
    told: list[tuple[int, int]] = []
    points = score_found(some, lucky, lambda *news: told.append(news))
    assert told[-1] == (len(best), len(best)), "all of them were scored, not one"
    fresh = [point for one in tried for point in one.points if one.gene in {kept.gene for kept, _ in best}]
    expected = pareto_front(fresh, points[-1], higher_is_better=True)
    assert [p.settings for p in points] == [p.settings for p in expected]


@pytest.mark.parametrize("risk", [None, 0.9])
def test_calibration_tries_what_a_search_found(own: Path, monkeypatch: pytest.MonkeyPatch, risk: float | None) -> None:
    """Calibrating again (for a time, a risk, other rows) does not throw the searched lengths away."""
    go(own, SearchRequest(SearchPlan(0), 12))
    made = json.loads((own / "points.json").read_text())
    made["points"][0]["settings"]["lengths"] = [0.97, 0.93, 0.91]
    (own / "points.json").write_text(json.dumps(made))
    tried: list[tuple[int, list[float]]] = []  # on how many rows, which lengths

    def heard(name: str) -> Callable[..., Any]:
        real = getattr(CalibrationContext, name)

        def noted(subject: CalibrationContext, settings: dict[str, Any], *more: Any) -> Any:
            tried.append((len(subject.data.rows), list(settings.get("lengths", ()))))
            return real(subject, settings, *more)

        return noted

    for name in ("run", "exits_at_lengths"):
        monkeypatch.setattr(CalibrationContext, name, heard(name))
    calibrate_run(str(own), runs.rows("classification", 30, 5), "a.jsonl", risk)
    assert {(30, True), *([(15, True)] if risk else [])} <= {(rows, own == [0.97, 0.93, 0.91]) for rows, own in tried}
    assert json.loads((own / "points.json").read_text())["data"].get("searched"), "nor when it is calibrated once more"
    (own / "points.json").write_text("{")
    assert searched_settings(own) == []


def test_a_task_without_a_score_has_no_search(base: str, tmp_path: Path) -> None:
    run = runs.train(base, tmp_path, "length_adaptive", "masked_lm", schedule=Schedule(epochs=1, batch_size=24))
    rows = runs.rows("masked_lm", 8, 5)
    with pytest.raises(OfframpError, match=r"masked_lm, which has no score.*\n.*--set lengths="):
        search_run(str(run), rows, "some/new.jsonl", SearchRequest(SMALL))


@pytest.mark.parametrize("points", ["{", '{"model": "another"}'])
def test_points_that_nobody_can_use_are_replaced(run: Path, tmp_path: Path, points: str) -> None:
    own = Path(shutil.copytree(run, tmp_path / "own"))
    (own / "points.json").write_text(points)
    go(own, SearchRequest(SearchPlan(0), 12))
    assert Predictor.load(own).points is not None


def test_scoring_tells_how_far_it_is(own: Path) -> None:
    told: list[tuple[int, int]] = []
    rows = runs.rows("classification", 30, 5)
    search_run(
        str(own),
        rows,
        "some/new.jsonl",
        SearchRequest(SearchPlan(0), 12),
        report_scoring=lambda *news: told.append(news),
    )
    assert len(told) > 1 and told == [(done, len(told) - 1) for done in range(len(told))]


def test_spans_are_answered_at_searched_lengths(base: str, tmp_path: Path) -> None:
    """Tokens come back at the end, so an answer is a piece of its context however few went all the way."""
    quick = Schedule(epochs=1, batch_size=24, lr=0.005)
    own = runs.train(base, tmp_path, "length_adaptive", "question_answering", schedule=quick)
    rows = runs.rows("question_answering", 16, 5)
    points = search_run(str(own), rows, "some/new.jsonl", SearchRequest(SearchPlan(1, 2, 2), 8))
    model = Predictor.load(own)
    encoded, tight = model.prepare(rows), model.settings(given={"lengths": (0.3, 0.2, 0.1)})
    short, full = (model.run(encoded, settings) for settings in (tight, model.settings(1.0)))
    assert short.macs.sum() < 0.6 * full.macs.sum() and points.points[-1].mac_share == pytest.approx(1.0)
    assert [logits.shape for logits in short.logits] == [logits.shape for logits in full.logits]
    answers = [model.finish(rows, encoded, short), model.predict(rows, budget=points.points[0].mac_share)]
    for row, *said in zip(rows, *answers, strict=True):
        assert all(one["answer"] and one["answer"] in row["context"] for one in said)


def test_a_run_without_lengths_is_refused(trained: Path, base: str) -> None:
    with pytest.raises(OfframpError, match="--method length_adaptive"):
        go(trained, SearchRequest(SMALL))
    with pytest.raises(OfframpError, match="offramp train"):  # a model nobody has trained yet
        go(Path(base), SearchRequest(SMALL))
