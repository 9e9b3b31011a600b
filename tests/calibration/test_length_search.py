"""The search over lengths: who is bred, what is tried, and what is kept of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.calibration import calibrate
from offramp.calibration import length_search as searching
from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.grids import cliff_lengths, constant_length_grid, length_macs
from offramp.calibration.length_search import (
    SearchPlan,
    SearchProgress,
    TriedConfiguration,
    breed,
    configuration_front,
    crossover,
    evaluate_configuration,
    kept_shares,
    mutate,
    promising_configurations,
    search_lengths,
)
from offramp.inference.operating_points import OperatingPoint
from offramp.inference.predictor import Predictor
from offramp.methods._base import PairMethod
from offramp.methods._shared.lengths import cliffs, shortest_lengths
from offramp.nn.batches import Data
from tests import runs

genes = st.lists(st.integers(1, 100), min_size=1, max_size=12).map(lambda parts: tuple(sorted(parts, reverse=True)))
SMALL = SearchPlan(iterations=2, mutations=4, crossovers=4)
pytestmark = pytest.mark.usefixtures("few")


def subject(run: Path, count: int = 20) -> CalibrationContext:
    model, rows = Predictor.load(run), runs.rows("classification", count, 7)
    return CalibrationContext(model.network, model.model.method, Data(rows, model.prepare(rows)))


@given(genes, st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_children_never_grow_with_depth(gene: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    child = mutate(gene, rng)
    for made in (child, crossover(gene, child)):
        assert list(made) == sorted(made, reverse=True) and len(made) == len(gene)
        assert all(1 <= part <= 100 for part in made)


def test_crossing_is_the_mean_rounded_up() -> None:
    assert crossover((100, 50, 3), (80, 51, 2)) == (90, 51, 3)


def test_the_first_population_is_evenly_spread_in_cost(run: Path) -> None:
    given, model = subject(run), Predictor.load(run)
    lengths = searching.row_lengths(given)
    costs = [
        float(length_macs(model.network, step, lengths).sum())
        for step in constant_length_grid(model.network, lengths, 5)
    ]
    full = float(length_macs(model.network, (), lengths).sum())
    gaps = np.diff([*costs, full])
    assert (gaps > 0).all() and gaps.max() < 3 * gaps.mean()  # tokens are whole: rows cannot do every cost


def test_the_first_population_has_cliffs_none_of_them_below_what_was_trained(run: Path) -> None:
    network = Predictor.load(run).network
    made = cliff_lengths(network, 99)
    assert made == cliffs(shortest_lengths(network)) and made
    assert cliff_lengths(network, 1) == made[:1]
    first = list(searching.first_population(subject(run)))
    assert {tuple(math.ceil(100 * share - 1e-9) for share in one) for one in made} <= set(first)


def test_rough_answers_rank_as_precise_ones_do(either: Path) -> None:
    """Searching in bfloat16 may turn single answers, not costs of lengths, nor what is found good."""
    exact = subject(either, 60)
    rough, full = replace(exact, bfloat16=True), exact.predictions(exact.run({}, None))
    gene = list(searching.first_population(exact))[1]
    for one, other in zip(
        evaluate_configuration(exact, gene, full), evaluate_configuration(rough, gene, full), strict=True
    ):
        assert other.score == pytest.approx(one.score, abs=0.1)
        if not isinstance(exact.method, PairMethod):
            assert other.mac_share == one.mac_share


def test_counted_costs_are_those_of_a_real_run(either: Path) -> None:
    """What a configuration was said to cost without running it, and what is kept of it, equal a fresh run."""
    given, tried = subject(either), []
    found = search_lengths(given, SearchPlan(1, 3, 3), [], tried.append)
    model, answers = Predictor.load(either), given.predictions(given.run({}, None))
    for one in found[::3]:
        fresh = evaluate_configuration(given, one.gene, answers)
        assert [(p.mac_share, p.score) for p in fresh] == [(p.mac_share, p.score) for p in one.points]
        outcome = model.run(given.data.encoded, model.settings(given=one.points[-1].settings), batch_size=3)
        full = model.full_macs(given.data.encoded)
        assert outcome.macs.sum() / full == pytest.approx(one.points[-1].mac_share)
        if not isinstance(given.method, PairMethod):
            counted = length_macs(model.network, kept_shares(one.gene), searching.row_lengths(given))
            assert outcome.macs == pytest.approx(counted.numpy())
    later = sum(one.iteration == 1 for one in found)
    assert [news.left for news in tried if news.iteration == 1] == list(range(later))[::-1]


def test_the_front_is_monotone_and_nothing_is_tried_twice(either: Path) -> None:
    heard: list[SearchProgress] = []
    found = search_lengths(subject(either), SMALL, [], heard.append)
    assert len({one.gene for one in found}) == len(found) == len(heard)
    best = [point for _, point in configuration_front(found, True)]
    assert best == heard[-1].best
    for cheap, dear in pairwise(best):
        assert cheap.mac_share < dear.mac_share and cheap.score < dear.score
    for one in found:
        for point in one.points:
            assert any(b.mac_share <= point.mac_share and b.score >= point.score for b in best)


def test_a_saturated_population_ends_the_search(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "mutate", lambda gene, rng: gene)
    monkeypatch.setattr(searching, "crossover", lambda mother, father: mother)
    found = search_lengths(subject(run, 8), SearchPlan(50, 5, 5), [], lambda _: None)
    assert {one.iteration for one in found} == {0}


def test_nobody_is_bred_below_what_was_trained(run: Path) -> None:
    given = subject(run)
    before = search_lengths(given, SearchPlan(0), [], lambda _: None)
    lengths = searching.row_lengths(given)
    least = length_macs(given.network, kept_shares(before[0].gene), lengths).sum()
    made = breed(given, before, SearchPlan(1, 20, 20), 1)
    assert made and all(length_macs(given.network, kept_shares(gene), lengths).sum() >= least for gene in made)
    assert not {one.gene for one in before} & set(made)


def test_what_keeps_as_many_tokens_of_every_row_is_not_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows of a few tokens a hundredth more or less keeps the same ones."""
    given = subject(run)
    lengths = searching.row_lengths(given)
    before = search_lengths(given, SearchPlan(0), [], lambda _: None)
    known = [length_macs(given.network, kept_shares(one.gene), lengths).tolist() for one in before]
    monkeypatch.setattr(searching, "mutate", lambda gene, rng: tuple(part - 1 for part in gene))
    made = breed(given, before, SearchPlan(1, 20, 0), 1)
    costs = [length_macs(given.network, kept_shares(gene), lengths).tolist() for gene in made]
    assert all(cost not in known for cost in costs), "one hundredth less was often nothing less"
    assert len(made) < len(before) - 1


def test_the_front_forgets_what_is_dominated() -> None:
    def one(gene: int, share: float, score: float) -> TriedConfiguration:
        return TriedConfiguration((gene,), 0, (OperatingPoint({}, share, score, 1.0),))

    found = [one(1, 0.2, 0.5), one(2, 0.5, 0.9), one(3, 0.4, 0.5), one(4, 1.0, 0.8)]
    assert [owner.gene for owner, _ in configuration_front(found, True)] == [(1,), (2,)]
    assert [owner.gene for owner, _ in configuration_front(found, False)] == [(1,)]


def test_the_best_of_every_range_of_costs_may_breed() -> None:
    def one(gene: int, share: float, score: float) -> TriedConfiguration:
        return TriedConfiguration((gene,), 0, (OperatingPoint({}, share, score, 1.0),))

    lucky = one(1, 0.2, 0.95)
    others = [one(2, 0.51, 0.8), one(3, 0.52, 0.9), one(4, 0.53, 0.9), one(5, 1.0, 0.92)]
    assert [owner.gene for owner, _ in configuration_front([lucky, *others], True)] == [(1,)]
    assert [owner.gene for owner, _ in promising_configurations([lucky, *others], True)] == [(1,), (3,), (5,)]
    assert [owner.gene for owner, _ in promising_configurations([lucky, *others], False)] == [(1,), (2,), (5,)]
    assert [owner.gene for owner, _ in promising_configurations([lucky], True)] == [(1,)]


def test_exits_of_a_pair_are_scored_on_rows_they_were_not_found_on(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, scored = [], []
    real_search, real_pointer = calibrate.search_exit_settings, calibrate.point_evaluator
    monkeypatch.setattr(calibrate, "FEW_ROWS", 20)
    monkeypatch.setattr(
        calibrate, "search_exit_settings", lambda s, *a: found.append(s.data.rows) or real_search(s, *a)
    )
    monkeypatch.setattr(calibrate, "point_evaluator", lambda s, *a: scored.append(s.data.rows) or real_pointer(s, *a))
    given = subject(pair)
    points = calibrate.explore_settings(given, given.record())
    assert points and found and len(found) == len(scored)
    whole = [id(row) for row in given.data.rows]
    for some, others in zip(found, scored, strict=True):
        assert sorted([*map(id, some), *map(id, others)]) == sorted(whole)
