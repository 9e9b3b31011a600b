"""Bounds on losses: exact where that is known, simultaneous over settings, and used by `max_loss`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from offramp import methods
from offramp.calibration import calibrate
from offramp.calibration.calibrate import find_operating_points
from offramp.calibration.loss_bounds import (
    MeasuredPoint,
    bound_losses,
    loss_bounds,
    mean_upper_bounds,
    stored_points,
)
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import (
    LossBounds,
    OperatingPoint,
    OperatingPoints,
    load_points,
    pareto_front,
    save_points,
)
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import factories


@pytest.mark.parametrize("lost", [0, 3, 40])
def test_bound_of_zeros_and_ones_is_the_exact_binomial_bound(lost: int) -> None:
    losses = np.zeros((1, 200))
    losses[0, :lost] = 1.0
    found = mean_upper_bounds(losses, np.array([0.9]))[0]
    assert found == pytest.approx(beta.ppf(0.9, lost + 1, 200 - lost), abs=1e-9)


def test_bound_far_out_is_no_smaller_than_the_exact_one() -> None:
    """A quantile that few of the drawn values lie beyond: enough are drawn."""
    losses = np.zeros((1, 200))
    losses[0, :3], losses[0, 3] = 1.0, -1.0
    rng = np.random.default_rng(5)
    lost, gained, equal = (
        rng.standard_gamma(4, 2_000_000),
        rng.standard_gamma(1, 2_000_000),
        rng.standard_gamma(196, 2_000_000),
    )
    exact = np.quantile((lost - gained) / (lost + gained + equal), 0.999)
    assert mean_upper_bounds(losses, np.array([0.999]))[0] == pytest.approx(exact, rel=0.02)


def test_bound_is_broken_in_at_most_one_case_in_ten() -> None:
    rng, worse, better = np.random.default_rng(1), 0.03, 0.02
    broken = 0
    for _ in range(150):
        drawn = rng.choice([1.0, -1.0, 0.0], size=(1, 400), p=[worse, better, 1 - worse - better])
        broken += mean_upper_bounds(drawn, np.array([0.9]))[0] < worse - better
    assert broken <= 0.1 * 150


def measured(share: float, losses: np.ndarray, family: str = "") -> MeasuredPoint:
    return MeasuredPoint({"t": share}, share, 0.9 - float(losses.mean()), 1.0, row_losses=losses, family=family)


def test_a_bound_is_at_least_those_of_costlier_settings_of_its_family() -> None:
    rng = np.random.default_rng(0)
    noisy = [measured(0.1 * n, rng.choice([1.0, 0.0, -1.0], 300, p=[0.05, 0.9, 0.05])) for n in range(1, 9)]
    bounds = [point.loss_upper for point in bound_losses(noisy, 0.9)]
    assert bounds == sorted(bounds, key=lambda upper: -(upper or 0.0))


def test_families_share_the_error_probability() -> None:
    losses = np.zeros(100)
    (alone,) = bound_losses([measured(0.5, losses)], 0.9)
    both = bound_losses([measured(0.5, losses, "a"), measured(0.4, losses, "b")], 0.9)
    assert all((point.loss_upper or 0.0) > (alone.loss_upper or 0.0) for point in both)


def test_settings_of_one_threshold_have_nine_tenths_of_the_error_probability() -> None:
    losses = np.zeros(100)
    (alone,) = bound_losses([measured(0.5, losses)], 0.91)
    single, searched = bound_losses([measured(0.5, losses), measured(0.4, losses, "searched")], 0.9)
    assert single.loss_upper == alone.loss_upper and (searched.loss_upper or 0.0) > (single.loss_upper or 0.0)
    both = [1.0 - beta.cdf(point.loss_upper or 0.0, 1, 100) for point in (single, searched)]
    assert sum(both) == pytest.approx(0.1, abs=0.01)


def test_a_metric_that_is_no_mean_of_rows_has_no_bounds() -> None:
    points = [replace(measured(0.5, np.zeros(9)), row_losses=None)]
    assert bound_losses(points, 0.9)[0].loss_upper is None and loss_bounds(points, 0.9).rows is None


def bounded(rows: int | None, *triples: tuple[float, float, float | None]) -> OperatingPoints:
    listed = tuple(OperatingPoint({"t": s}, s, score, 1.0, loss_upper=upper) for s, score, upper in triples)
    data = {"name": "dev", "rows": rows or 50, "fingerprint": "0"}
    return OperatingPoints("accuracy", True, data, listed, bounds=LossBounds(0.9, rows))


def test_max_loss_is_chosen_by_the_bound_and_not_by_the_estimate() -> None:
    points = bounded(2000, (0.2, 0.899, 0.012), (0.5, 0.899, 0.004), (1.0, 0.9, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert points.choose(Budget.loss(0.005)).mac_share == 0.5
        assert points.choose(Budget.default()).mac_share == 0.5
        assert points.choose(Budget.loss(0.02)).mac_share == 0.2
        assert points.choose(Budget.loss(0.003)).mac_share == 1.0
        assert points.choose(Budget.share(0.4)).mac_share == 0.2, "a budget keeps its meaning"


def test_a_share_is_chosen_by_the_bound_and_without_bounds_by_the_score() -> None:
    triples = (0.2, 0.905, 0.012), (0.4, 0.896, 0.004), (0.5, 0.899, 0.004), (0.6, 0.899, 0.004), (1.0, 0.9, 0.0)
    assert bounded(2000, *triples).choose(Budget.share(0.7)).mac_share == 0.5, "the first has the luckiest score"
    unbounded = [(share, score, None) for share, score, _ in triples]
    assert bounded(None, *unbounded).choose(Budget.share(0.7)).mac_share == 0.2


def test_too_few_rows_use_the_estimate_and_name_the_rows_that_are_needed() -> None:
    points = bounded(500, (0.2, 0.899, 0.0062), (1.0, 0.9, 0.0))
    with pytest.warns(UserWarning, match=r"estimate and not proven: 500 .* 6\d\d are needed"):
        assert points.choose(Budget.loss(0.005)).mac_share == 0.2
    with pytest.warns(UserWarning, match="no confidence bound"):
        assert bounded(None, (0.2, 0.899, None), (1.0, 0.9, 0.0)).choose(Budget.loss(0.005)).mac_share == 0.2


def test_an_estimate_is_no_cheaper_than_what_is_proven_for_a_larger_loss() -> None:
    points = bounded(500, (0.2, 0.898, 0.012), (0.5, 0.899, 0.008), (0.7, 0.899, 0.006), (1.0, 0.9, 0.0))
    with pytest.warns(UserWarning, match="estimate and not proven: 500"):
        assert points.choose(Budget.loss(0.005)).mac_share == 0.7
    assert points.choose(Budget.loss(0.01)).mac_share == 0.5


def test_too_few_rows_use_the_full_model_where_a_larger_loss_needs_it() -> None:
    points = bounded(500, (0.2, 0.899, 0.012), (1.0, 0.9, 0.0))
    assert points.choose(Budget.loss(0.01)).mac_share == 1.0
    with pytest.warns(UserWarning, match=r"answered with the full model: 500 .* 6\d\d are needed"):
        assert points.choose(Budget.loss(0.005)).mac_share == 1.0


@given(
    rows=st.one_of(st.none(), st.integers(1, 5000)),
    losses=st.lists(st.tuples(st.floats(-0.02, 0.1), st.floats(0.0, 0.1)), max_size=8),
    limits=st.lists(st.floats(0.0, 0.2), min_size=2, max_size=2),
)
def test_a_smaller_loss_never_gives_a_cheaper_point(
    rows: int | None, losses: list[tuple[float, float]], limits: list[float]
) -> None:
    listed = [
        ((number + 1) / 10, 0.9 - loss, None if rows is None else max(0.0, loss) + width)
        for number, (loss, width) in enumerate(losses)
    ]
    points = bounded(rows, *listed, (1.0, 0.9, 0.0))
    smaller, larger = (points.within_loss(loss)[0].mac_share for loss in sorted(limits))
    assert smaller >= larger


def test_points_without_bounds_are_chosen_by_the_estimate() -> None:
    points = replace(bounded(2000, (0.2, 0.899, None), (1.0, 0.9, None)), bounds=None)
    assert points.choose(Budget.loss(0.005)).mac_share == 0.2


def test_front_keeps_a_costlier_point_with_a_lower_bound() -> None:
    listed = bounded(900, (0.2, 0.9, 0.02), (0.5, 0.9, 0.01), (0.6, 0.9, 0.01)).points
    full = OperatingPoint({}, 1.0, 0.9, 6.0)
    assert [point.mac_share for point in pareto_front(listed, full, True)] == [0.2, 0.5, 1.0]


def test_max_loss_is_kept_on_new_rows_in_nine_of_ten_calibrations() -> None:
    """Settings lose from 0 to 3 points; the cheapest that seems to fit is lucky every second time."""
    true = np.linspace(0.03, 0.0, 13)
    rng, rows, broken, by_estimate, shares = np.random.default_rng(3), 1500, 0, 0, []
    for _ in range(60):
        ranks = rng.random(rows)
        tried: list[OperatingPoint] = []
        for number, loss in enumerate(true):
            losses = np.where(ranks < loss + 0.01, 1.0, np.where(ranks > 0.99, -1.0, 0.0))
            tried.append(measured((number + 1) / 14, losses))
        full = OperatingPoint({"t": 1.0}, 1.0, 0.9, 6.0)
        front = stored_points(pareto_front(bound_losses(tried, 0.9), full, True))
        points = OperatingPoints("accuracy", True, {}, front, bounds=loss_bounds(tried, 0.9))
        real = {(number + 1) / 14: loss for number, loss in enumerate(true)} | {1.0: 0.0}
        chosen = points.choose(Budget.loss(0.01))
        broken += real[chosen.mac_share] > 0.01
        shares.append(chosen.mac_share)
        by_estimate += real[replace(points, bounds=None).choose(Budget.loss(0.01)).mac_share] > 0.01
    assert broken <= 6 < by_estimate
    assert np.mean(shares) < 0.95, "the full model would keep every promise"


def test_searched_thresholds_keep_their_part_of_the_error_where_none_survives() -> None:
    losses = np.zeros(300)
    (alone,), (beside,) = (bound_losses([measured(0.5, losses)], 0.9, searched) for searched in (False, True))
    assert beside.loss_upper is not None and alone.loss_upper is not None and beside.loss_upper > alone.loss_upper
    assert loss_bounds([beside], 0.9).family_confidence == pytest.approx(0.91)


def test_values_of_single_layers_keep_their_part_of_the_error_where_none_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the search finds any depends on the rows, so the share of the others may not."""
    lengths = [4] * calibrate.FEW_ROWS
    network, data = factories.network("adapler"), factories.data(lengths)
    found = []
    for search in (lambda *_: [], calibrate._search_layers):
        monkeypatch.setattr(calibrate, "_search_layers", search)
        context = calibrate.CalibrationContext(network, methods.get("adapler"), data)
        *tried, _ = calibrate.explore_settings(context, context.record())
        found.append([point.loss_upper for point in tried if not point.settings["scales"]])
        assert loss_bounds(tried, 0.9).family_confidence == pytest.approx(0.91)
    assert found[0] == found[1]


def test_rows_needed_count_shared_errors_and_rows_that_only_find() -> None:
    """A pair of ten lengths on 680 rows, half of which measure: each family has a tenth of the error."""
    tried = bound_losses([measured(0.5, np.zeros(340), str(length)) for length in range(10)], 0.9)
    bounds = loss_bounds(tried, 0.9, 680)
    assert bounds.family_confidence == pytest.approx(0.99) and bounds.smallest_loss > 0.01
    assert (bounds.rows_needed(0.01) or 0) > 2 * (LossBounds(0.9, 340).rows_needed(0.01) or 0)


def test_a_loss_of_points_without_bounds_is_called_an_estimate() -> None:
    points = OperatingPoints("agreement", True, {"rows": 9, "name": "x"}, (
        OperatingPoint({"t": 1}, 0.4, 0.995, 1.0), OperatingPoint({"t": 0}, 1.0, 1.0, 2.0)))  # fmt: skip
    with pytest.warns(UserWarning, match="an estimate and not proven(.|\n)*other than the full model's"):
        assert points.choose(Budget.loss(0.01)).mac_share == 0.4


def test_calibration_writes_bounds_that_are_read_again(trained: Path, tmp_path: Path) -> None:
    model, rows = Predictor.load(trained), factories.labelled_rows("classification", 60, 5)
    data = Data(rows, model.prepare(rows))
    points = find_operating_points(model.network, model.model.method, data, "rows", "0", loss_confidence=0.8)
    assert points.bounds == LossBounds(0.8, 60, pytest.approx(0.8), 60)  # type: ignore[arg-type]  # about
    assert all(point.loss_upper is not None for point in points.points) and points.full_point.loss_upper == 0.0
    save_points(tmp_path, points)
    assert load_points(tmp_path).bounds == points.bounds
    stricter = find_operating_points(model.network, model.model.method, data, "rows", "0", loss_confidence=0.99)
    assert (stricter.points[0].loss_upper or 0.0) > (points.points[0].loss_upper or 0.0)


def test_training_sets_the_confidence_and_the_model_card_shows_the_bounds(base: str, tmp_path: Path) -> None:
    run = factories.run_folder(base, tmp_path, "branchynet", loss_confidence=0.8)
    points = load_points(run)
    assert points.bounds is not None and points.bounds.confidence == 0.8
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "| loses at most |" in card and "with 80 % confidence" in card and "| 0.00 points |" in card
    with pytest.raises(OfframpError, match="confidence"):
        factories.run_folder(base, tmp_path, "branchynet", loss_confidence=1.5)


def test_model_card_of_a_metric_without_bounds_calls_losses_estimates(base: str, tmp_path: Path) -> None:
    run = factories.run_folder(base, tmp_path, "berxit", "regression")
    assert "pearson has no confidence bound" in (run / "README.md").read_text(encoding="utf-8")
