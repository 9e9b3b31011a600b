"""The search over lengths: who is bred, what is kept, what is refused, and that it goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.budget import calibrate
from offramp.budget import search as searching
from offramp.budget.ladder import ladder, length_macs
from offramp.budget.search import Found, News, Plan, children, cross, evaluate, front, mutate, search, shares
from offramp.budget.searched import FILE, Wish, parted, search_run
from offramp.budget.subject import Subject
from offramp.errors import OfframpError
from offramp.model.points import Point
from offramp.model.predictor import Predictor
from offramp.parts.batch import Data
from offramp.training.schedule import Schedule
from tests import runs

genes = st.lists(st.integers(1, 100), min_size=1, max_size=12).map(lambda parts: tuple(sorted(parts, reverse=True)))
SMALL = Plan(iterations=2, mutations=4, crossovers=4)


QUICK = Schedule(epochs=1, batch_size=24, lr=0.005)


@pytest.fixture(scope="module")
def run(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.train(base, tmp_path_factory.mktemp("run"), "length_adaptive", schedule=QUICK)


@pytest.fixture(scope="module")
def pair(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.train(base, tmp_path_factory.mktemp("pair"), "length_adaptive+branchynet", schedule=QUICK)


@pytest.fixture(params=["run", "pair"])
def either(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def own(either: Path, tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(either, tmp_path / "own"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small first population, few settings of exits."""
    monkeypatch.setattr(searching, "FIRST", 4)
    monkeypatch.setattr(calibrate, "EXITS", 6)


def subject(run: Path, count: int = 20) -> Subject:
    model, rows = Predictor.load(run), runs.rows("classification", count, 7)
    return Subject(model.network, model.model.method, Data(rows, model.prepare(rows)))


@given(genes, st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_children_never_grow_with_depth(gene: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    child = mutate(gene, rng)
    for made in (child, cross(gene, child)):
        assert list(made) == sorted(made, reverse=True) and len(made) == len(gene)
        assert all(1 <= part <= 100 for part in made)


def test_crossing_is_the_mean_rounded_up() -> None:
    assert cross((100, 50, 3), (80, 51, 2)) == (90, 51, 3)


def test_the_first_population_is_evenly_spread_in_cost(run: Path) -> None:
    given, model = subject(run), Predictor.load(run)
    lengths = searching._lengths(given)
    costs = [float(length_macs(model.network, step, lengths).sum()) for step in ladder(model.network, lengths, 5)]
    full = float(length_macs(model.network, (), lengths).sum())
    gaps = np.diff([*costs, full])
    assert (gaps > 0).all() and gaps.max() < 3 * gaps.mean()  # tokens are whole: rows cannot do every cost


def test_counted_costs_are_those_of_a_real_run(either: Path) -> None:
    """What a configuration was said to cost without running it, and what is kept of it, equal a fresh run."""
    given, tried = subject(either), []
    found = search(given, Plan(1, 3, 3), [], tried.append)
    model, answers = Predictor.load(either), given.predictions(given.run({}, None))
    for one in found[::3]:
        fresh = evaluate(given, one.gene, answers)
        assert [(p.mac_share, p.score) for p in fresh] == [(p.mac_share, p.score) for p in one.points]
        outcome = model.run(given.data.encoded, model.settings(given=one.points[-1].settings), batch_size=3)
        full = model.full_macs(given.data.encoded)
        assert outcome.macs.sum() / full == pytest.approx(one.points[-1].mac_share)
        if given.method.pair is None:
            counted = length_macs(model.network, shares(one.gene), searching._lengths(given))
            assert outcome.macs == pytest.approx(counted.numpy())
    assert [news.left for news in tried if news.iteration == 1] == list(range(len(found) - 6))[::-1]


def test_the_front_is_monotone_and_nothing_is_tried_twice(either: Path) -> None:
    heard: list[News] = []
    found = search(subject(either), SMALL, [], heard.append)
    assert len({one.gene for one in found}) == len(found) == len(heard)
    best = [point for _, point in front(found, True)]
    assert best == heard[-1].best
    for cheap, dear in pairwise(best):
        assert cheap.mac_share < dear.mac_share and cheap.score < dear.score
    for one in found:
        for point in one.points:
            assert any(b.mac_share <= point.mac_share and b.score >= point.score for b in best)


def test_a_saturated_population_ends_the_search(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "mutate", lambda gene, rng: gene)
    monkeypatch.setattr(searching, "cross", lambda mother, father: mother)
    found = search(subject(run, 8), Plan(50, 5, 5), [], lambda _: None)
    assert {one.iteration for one in found} == {0}


def test_nobody_is_bred_below_what_was_trained(run: Path) -> None:
    given = subject(run)
    before = search(given, Plan(0), [], lambda _: None)
    lengths = searching._lengths(given)
    least = length_macs(given.network, shares(before[0].gene), lengths).sum()
    made = children(given, before, Plan(1, 20, 20), 1)
    assert made and all(length_macs(given.network, shares(gene), lengths).sum() >= least for gene in made)
    assert not {one.gene for one in before} & set(made)


def test_search_rows_and_scored_rows_are_never_the_same() -> None:
    for count, wanted in ((20, 5), (20, 500), (2, 1)):
        some, others = parted(count, wanted)
        assert sorted(some + others) == list(range(count)) and len(some) == min(wanted, count // 2)
    with pytest.raises(OfframpError, match="--rows 0"):
        parted(10, 0)


def go(own: Path, wish: Wish, say: Callable[[News], None] = lambda _: None) -> dict[str, Any]:
    search_run(str(own), runs.rows("classification", 30, 5), "some/new.jsonl", wish, say)
    made: dict[str, Any] = json.loads((own / "points.json").read_text())
    return made


def test_an_interrupted_search_goes_on_to_the_same_end(own: Path) -> None:
    expected = go(own, Wish(SMALL, 12))
    assert expected["data"]["search_rows"] == 12 and expected["data"]["rows"] == 18
    state = json.loads((own / FILE).read_text())
    (own / FILE).unlink()
    heard: list[News] = []

    def stop(news: News) -> None:
        heard.append(news)
        if news.iteration == 1 and news.left == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(own, Wish(SMALL, 12), stop)
    kept = len(json.loads((own / FILE).read_text())["found"])
    assert kept == len(heard)
    again: list[News] = []
    assert go(own, Wish(SMALL, 12, resume=True), again.append) == expected
    assert json.loads((own / FILE).read_text()) == state and len(again) == len(state["found"]) - kept


def test_points_are_what_the_scored_rows_show(own: Path) -> None:
    made, rows = go(own, Wish(SMALL, 12)), runs.rows("classification", 30, 5)
    model = Predictor.load(own)
    others = [rows[i] for i in parted(30, 12)[1]]
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
    go(own, Wish(Plan(0), 12))
    state, points = json.loads((own / FILE).read_text()), (own / "points.json").read_text()
    for what in ("model", "rows", "search_rows", "seed"):
        (own / FILE).write_text(json.dumps({**state, what: "other"}))
        with pytest.raises(OfframpError, match=r"other.*\n.*leave --resume out"):
            go(own, Wish(Plan(0), 12, resume=True))
    for damage in ("{", "[]", "7", json.dumps({**state, "found": [{}]})):
        (own / FILE).write_text(damage)
        with pytest.raises(OfframpError, match=r"damaged.*search\.json\n.*leave --resume out, or remove the file"):
            go(own, Wish(Plan(0), 12, resume=True))
    assert (own / "points.json").read_text() == points
    assert go(own, Wish(Plan(0), 12))["points"] == json.loads(points)["points"]


def test_the_same_search_is_not_begun_again_unasked(run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(run, tmp_path / "own"))
    go(own, Wish(replace(SMALL, iterations=0), 12))  # how many there are to be is no other search
    before = runs.files(own)
    with pytest.raises(OfframpError, match=r"--resume to go on, or remove search\.json to start over"):
        go(own, Wish(SMALL, 12))
    assert runs.files(own) == before
    go(own, Wish(Plan(0), 11))  # another search takes its place
    (own / FILE).unlink()
    go(own, Wish(Plan(0), 11))


@pytest.mark.parametrize("points", ["{", '{"model": "another"}'])
def test_points_that_nobody_can_use_are_replaced(run: Path, tmp_path: Path, points: str) -> None:
    own = Path(shutil.copytree(run, tmp_path / "own"))
    (own / "points.json").write_text(points)
    go(own, Wish(Plan(0), 12))
    assert Predictor.load(own).points is not None


def test_scoring_tells_how_far_it_is(own: Path) -> None:
    told: list[tuple[int, int]] = []
    rows = runs.rows("classification", 30, 5)
    search_run(str(own), rows, "some/new.jsonl", Wish(Plan(0), 12), scoring=lambda *news: told.append(news))
    assert len(told) > 1 and told == [(done, len(told) - 1) for done in range(len(told))]


def test_spans_are_answered_at_searched_lengths(base: str, tmp_path: Path) -> None:
    """Tokens come back at the end, so an answer is a piece of its context however few went all the way."""
    own = runs.train(base, tmp_path, "length_adaptive", "span", schedule=QUICK)
    rows = runs.rows("span", 16, 5)
    points = search_run(str(own), rows, "some/new.jsonl", Wish(Plan(1, 2, 2), 8))
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
        go(trained, Wish(SMALL))
    with pytest.raises(OfframpError, match="offramp train"):  # a model nobody has trained yet
        go(Path(base), Wish(SMALL))


def test_the_front_forgets_what_is_dominated() -> None:
    def one(gene: int, share: float, score: float) -> Found:
        return Found((gene,), 0, (Point({}, share, score, 1.0),))

    found = [one(1, 0.2, 0.5), one(2, 0.5, 0.9), one(3, 0.4, 0.5), one(4, 1.0, 0.8)]
    assert [owner.gene for owner, _ in front(found, True)] == [(1,), (2,)]
    assert [owner.gene for owner, _ in front(found, False)] == [(1,)]


def test_exits_of_a_pair_are_scored_on_rows_they_were_not_found_on(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, scored = [], []
    real_search, real_pointer = calibrate.search_exits, calibrate.pointer
    monkeypatch.setattr(calibrate, "FEW", 20)
    monkeypatch.setattr(calibrate, "search_exits", lambda s, *a: found.append(s.data.rows) or real_search(s, *a))
    monkeypatch.setattr(calibrate, "pointer", lambda s, *a: scored.append(s.data.rows) or real_pointer(s, *a))
    given = subject(pair)
    points = calibrate.explore(given, given.record())
    assert points and found and len(found) == len(scored)
    whole = [id(row) for row in given.data.rows]
    for some, others in zip(found, scored, strict=True):
        assert sorted([*map(id, some), *map(id, others)]) == sorted(whole)
