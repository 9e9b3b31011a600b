"""From a budget to a setting, and which settings are worth keeping."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front

DATA = {"name": "dev", "rows": 100, "fingerprint": "0"}


def point(share: float, score: float) -> OperatingPoint:
    return OperatingPoint({"threshold": round(1 - share, 3)}, share, score, share * 6)


def points(*pairs: tuple[float, float], higher: bool = True) -> OperatingPoints:
    return OperatingPoints("accuracy" if higher else "perplexity", higher, DATA, tuple(point(*pair) for pair in pairs))


CURVE = points((0.1, 0.80), (0.3, 0.896), (0.5, 0.91), (0.7, 0.905), (1.0, 0.90))


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        (1.0, 1.0),  # the loosest setting, though others score higher
        (0.99, 0.5),  # the most accurate within the budget, not the dearest
        (0.5, 0.5),
        (0.49, 0.3),
        (0.1, 0.1),
        (None, 0.3),  # the cheapest within 0.5 points of the loosest
    ],
)
def test_budget_to_point(budget: float | None, share: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CURVE.choose(Budget.parse(budget)).mac_share == share


def test_cheaper_than_all_is_the_cheapest_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"0\.05.*0\.100"):
        assert CURVE.choose(Budget.share(0.05)).mac_share == 0.1


def test_exactly_half_a_point_is_within_half_a_point() -> None:
    assert points((0.2, 0.895), (1.0, 0.90)).choose(Budget.default()).mac_share == 0.2
    assert points((0.2, 0.8949), (1.0, 0.90)).choose(Budget.default()).mac_share == 1.0


def test_lower_is_better() -> None:
    curve = points((0.1, 30.0), (0.4, 10.04), (0.6, 9.0), (1.0, 10.0), higher=False)
    assert curve.choose(Budget.share(0.99)).mac_share == 0.6
    assert curve.choose(Budget.share(0.5)).mac_share == 0.4
    assert curve.choose(Budget.default()).mac_share == 0.4  # within half a percent of the loosest perplexity
    assert points((0.4, 10.06), (1.0, 10.0), higher=False).choose(Budget.default()).mac_share == 1.0


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.0001, 50.0, float("nan"), float("inf")])
def test_budgets_that_are_no_share(budget: float) -> None:
    with pytest.raises(OfframpError, match="above 0 and at most 1"):
        CURVE.choose(Budget.parse(budget))


def test_pareto_keeps_what_nothing_beats() -> None:
    loosest = point(1.0, 0.9)
    tried = [point(0.5, 0.8), point(0.2, 0.7), point(0.4, 0.85), point(0.3, 0.7), point(1.2, 0.95), point(0.2, 0.6)]
    assert [(p.mac_share, p.score) for p in pareto_front(tried, loosest, True)] == [(0.2, 0.7), (0.4, 0.85), (1.0, 0.9)]
    assert pareto_front([], loosest, True) == (loosest,)


scores = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 2))


@given(st.lists(st.tuples(st.floats(0.01, 1.3), scores), max_size=20), scores, st.booleans())
def test_no_tried_point_beats_the_front(pairs: list[tuple[float, float]], full: float, higher: bool) -> None:
    tried, loosest, sign = [point(*pair) for pair in pairs], point(1.0, full), 1 if higher else -1
    front = pareto_front(tried, loosest, higher)
    assert front[-1] is loosest
    shares, kept = [p.mac_share for p in front], [sign * p.score for p in front[:-1]]
    assert shares == sorted(shares) and kept == sorted(set(kept))
    for p in tried:
        if p.mac_share < 1.0:
            assert any(q.mac_share <= p.mac_share and sign * q.score >= sign * p.score for q in front)


def test_round_trip_and_damage(tmp_path: Path) -> None:
    operating.save_points(tmp_path, CURVE)
    assert operating.load_points(tmp_path) == CURVE
    (tmp_path / "points.json").write_text('{"metric": "accuracy", "points": [{"share": 1}]}')
    with pytest.raises(OfframpError, match=r"points\.json"):
        operating.load_points(tmp_path)
    (tmp_path / "points.json").write_text('{"metric": "accuracy", "higher_is_better": true, "data": {}, "points": []}')
    with pytest.raises(OfframpError, match=r"points\.json"):
        operating.load_points(tmp_path)
    assert replace(CURVE, points=CURVE.points[-1:]).choose(Budget.default()) == CURVE.full_point


def weights(folder: Path, fill: int) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes([fill]) * 500_000)
    return folder


def test_points_of_another_model_are_refused(tmp_path: Path) -> None:
    ours, theirs = weights(tmp_path / "ours", 1), weights(tmp_path / "theirs", 2)
    operating.save_points(ours, CURVE)
    assert operating.load_points(ours) == CURVE
    (theirs / "points.json").write_text((ours / "points.json").read_text())
    with pytest.raises(OfframpError, match=r"another model[\s\S]*offramp calibrate"):
        operating.load_points(theirs)


def test_points_without_a_mark_are_read_as_before(tmp_path: Path) -> None:
    folder = weights(tmp_path / "old", 1)
    operating.save_points(folder, CURVE)
    raw = json.loads((folder / "points.json").read_text())
    for name in ("model", "warnings"):
        del raw[name]
    for one in raw["points"]:
        del one["seen"], one["error"]
    (folder / "points.json").write_text(json.dumps(raw))
    assert operating.load_points(folder) == CURVE


def test_the_mark_sees_a_change_anywhere_and_is_quick(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", 1)
    before = operating.weights_fingerprint(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    for place in (0, 250_000, 499_999):
        changed = bytearray(content)
        changed[place] = 9
        (folder / "model.safetensors").write_bytes(changed)
        assert operating.weights_fingerprint(folder) != before
    (folder / "model.safetensors").write_bytes(content)
    assert operating.weights_fingerprint(folder) == before
    (folder / "offramp.safetensors").write_bytes(b"more")
    assert operating.weights_fingerprint(folder) != before
