"""The search over lengths: which configurations are bred and tried, and which are kept."""

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
from offramp.calibration.grids import cliff_lengths, length_macs
from offramp.calibration.length_search import (
    SearchPlan,
    SearchProgress,
    TriedConfiguration,
    breed,
    configuration_front,
    crossover,
    evaluate_configuration,
    first_population,
    kept_shares,
    mutate,
    promising_configurations,
    row_lengths,
    search_lengths,
)
from offramp.inference.operating_points import OperatingPoint
from offramp.inference.predictor import Predictor
from offramp.methods import PairMethod
from offramp.nn.batches import Data
from tests import factories

genes = st.lists(st.integers(1, 100), min_size=1, max_size=12).map(lambda parts: tuple(sorted(parts, reverse=True)))
SMALL_PLAN = SearchPlan(iterations=2, mutations=4, crossovers=4)
pytestmark = pytest.mark.usefixtures("small_search")


def context_of(run: Path, count: int = 20) -> CalibrationContext:
    model, rows = Predictor.load(run), factories.labelled_rows("classification", count, 7)
    return CalibrationContext(model.network, model.model.method, Data(rows, model.prepare(rows)))


def configuration(gene: int, share: float, score: float) -> TriedConfiguration:
    return TriedConfiguration((gene,), 0, (OperatingPoint({}, share, score, 1.0),))


def search(context: CalibrationContext, plan: SearchPlan) -> list[TriedConfiguration]:
    return search_lengths(context, plan, [], lambda _: None)


@given(genes, st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_children_never_grow_with_depth(gene: tuple[int, ...], seed: int) -> None:
    mutated = mutate(gene, np.random.default_rng(seed))
    for child in (mutated, crossover(gene, mutated)):
        assert list(child) == sorted(child, reverse=True) and len(child) == len(gene)
        assert all(1 <= percentage <= 100 for percentage in child)


def test_crossover_is_the_mean_rounded_up() -> None:
    assert crossover((100, 50, 3), (80, 51, 2)) == (90, 51, 3)


def test_first_population_contains_every_cliff_and_all_tokens(run: Path) -> None:
    context = context_of(run)
    population = set(first_population(context))
    cliffs = cliff_lengths(context.network, 99)
    assert {tuple(math.ceil(100 * share - 1e-9) for share in one) for one in cliffs} <= population
    assert (100,) * context.network.depth in population


def test_bfloat16_scores_are_close_to_float32_ones(run_or_pair: Path) -> None:
    exact = context_of(run_or_pair, 60)
    rough, full = replace(exact, bfloat16=True), exact.predictions(exact.run({}, None))
    gene = list(first_population(exact))[1]
    exact_points, rough_points = (evaluate_configuration(context, gene, full) for context in (exact, rough))
    for one, other in zip(exact_points, rough_points, strict=True):
        assert other.score == pytest.approx(one.score, abs=0.1)
        if not isinstance(exact.method, PairMethod):
            assert other.mac_share == one.mac_share


def test_points_of_a_search_equal_those_of_a_new_run(run_or_pair: Path) -> None:
    context = context_of(run_or_pair)
    found = search(context, SearchPlan(1, 3, 3))
    model, full = Predictor.load(run_or_pair), context.predictions(context.run({}, None))
    for one in found[::3]:
        points = evaluate_configuration(context, one.gene, full)
        assert [(p.mac_share, p.score) for p in points] == [(p.mac_share, p.score) for p in one.points]
        output = model.run(context.data.encoded, model.settings(given=one.points[-1].settings), batch_size=3)
        share = output.macs.sum() / model.full_macs(context.data.encoded)
        assert share == pytest.approx(one.points[-1].mac_share)
        if not isinstance(context.method, PairMethod):
            counted = length_macs(model.network, kept_shares(one.gene), row_lengths(context))
            assert output.macs == pytest.approx(counted.numpy())


def test_search_reports_how_many_configurations_are_left(run: Path) -> None:
    progress: list[SearchProgress] = []
    found = search_lengths(context_of(run), SearchPlan(1, 3, 3), [], progress.append)
    later = sum(one.iteration == 1 for one in found)
    assert [one.left for one in progress if one.iteration == 1] == list(range(later))[::-1]


def test_search_returns_a_monotone_front_and_tries_nothing_twice(run_or_pair: Path) -> None:
    progress: list[SearchProgress] = []
    found = search_lengths(context_of(run_or_pair), SMALL_PLAN, [], progress.append)
    assert len({one.gene for one in found}) == len(found) == len(progress)
    best = [point for _, point in configuration_front(found, True)]
    assert best == progress[-1].best
    for cheap, costly in pairwise(best):
        assert cheap.mac_share < costly.mac_share and cheap.score < costly.score
    for one in found:
        for point in one.points:
            assert any(b.mac_share <= point.mac_share and b.score >= point.score for b in best)


def test_search_ends_if_nothing_new_can_be_bred(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "mutate", lambda gene, rng: gene)
    monkeypatch.setattr(searching, "crossover", lambda first, second: first)
    assert {one.iteration for one in search(context_of(run, 8), SearchPlan(50, 5, 5))} == {0}


def test_breed_returns_nothing_cheaper_than_trained_for(run: Path) -> None:
    context = context_of(run)
    before, lengths = search(context, SearchPlan(0)), row_lengths(context)
    least = length_macs(context.network, kept_shares(before[0].gene), lengths).sum()
    children = breed(context, before, SearchPlan(1, 20, 20), 1)
    assert children and all(length_macs(context.network, kept_shares(c), lengths).sum() >= least for c in children)
    assert not {one.gene for one in before} & set(children)


def test_breed_skips_children_that_keep_the_same_tokens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows of a few tokens a hundredth less often keeps the same ones."""
    context = context_of(run)
    before, lengths = search(context, SearchPlan(0)), row_lengths(context)
    known = [length_macs(context.network, kept_shares(one.gene), lengths).tolist() for one in before]
    monkeypatch.setattr(searching, "mutate", lambda gene, rng: tuple(percentage - 1 for percentage in gene))
    children = breed(context, before, SearchPlan(1, 20, 0), 1)
    costs = [length_macs(context.network, kept_shares(gene), lengths).tolist() for gene in children]
    assert all(cost not in known for cost in costs)
    assert len(children) < len(before) - 1


@pytest.mark.parametrize(("higher_is_better", "genes"), [(True, [(1,), (2,)]), (False, [(1,)])])
def test_configuration_front_drops_dominated_points(higher_is_better: bool, genes: list[tuple[int, ...]]) -> None:
    found = [configuration(*one) for one in ((1, 0.2, 0.5), (2, 0.5, 0.9), (3, 0.4, 0.5), (4, 1.0, 0.8))]
    assert [one.gene for one, _ in configuration_front(found, higher_is_better)] == genes


def test_promising_configurations_are_the_best_of_every_range_of_costs() -> None:
    lucky = configuration(1, 0.2, 0.95)
    others = [configuration(*one) for one in ((2, 0.51, 0.8), (3, 0.52, 0.9), (4, 0.53, 0.9), (5, 1.0, 0.92))]
    assert [one.gene for one, _ in configuration_front([lucky, *others], True)] == [(1,)]
    assert [one.gene for one, _ in promising_configurations([lucky, *others], True)] == [(1,), (3,), (5,)]
    assert [one.gene for one, _ in promising_configurations([lucky, *others], False)] == [(1,), (2,), (5,)]
    assert [one.gene for one, _ in promising_configurations([lucky], True)] == [(1,)]


def test_exits_of_a_pair_are_scored_on_rows_they_were_not_found_on(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, scored = [], []
    search, evaluator = calibrate.search_exit_settings, calibrate.point_evaluator
    monkeypatch.setattr(calibrate, "FEW_ROWS", 20)
    monkeypatch.setattr(calibrate, "search_exit_settings", lambda c, *a: found.append(c.data.rows) or search(c, *a))
    monkeypatch.setattr(calibrate, "point_evaluator", lambda c, *a: scored.append(c.data.rows) or evaluator(c, *a))
    context = context_of(pair)
    assert calibrate.explore_settings(context, context.record())
    assert found and len(found) == len(scored)
    all_rows = sorted(id(row) for row in context.data.rows)
    for some, others in zip(found, scored, strict=True):
        assert sorted([*map(id, some), *map(id, others)]) == all_rows
