"""Operating points: which one a budget chooses, which settings are kept, and how they are stored."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import (
    DisagreementPoint,
    LatencyPoint,
    OperatingPoint,
    OperatingPoints,
    RiskGuarantee,
    load_points,
    pareto_front,
    save_points,
    weights_fingerprint,
)

DATA = {"name": "dev", "rows": 100, "fingerprint": "0"}


def point(share: float, score: float) -> OperatingPoint:
    return OperatingPoint({"threshold": round(1 - share, 3)}, share, score, share * 6)


def points(*pairs: tuple[float, float], higher: bool = True) -> OperatingPoints:
    return OperatingPoints("accuracy" if higher else "perplexity", higher, DATA, tuple(point(*pair) for pair in pairs))


CURVE = points((0.1, 0.80), (0.3, 0.896), (0.5, 0.91), (0.7, 0.905), (1.0, 0.90))


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        (Budget.share(1.0), 1.0),  # the full setting, though others score higher
        (Budget.share(0.99), 0.5),  # the most accurate within the budget, not the costliest
        (Budget.share(0.5), 0.5),
        (Budget.share(0.49), 0.3),
        (Budget.share(0.1), 0.1),
        (Budget.default(), 0.3),  # the cheapest within 0.5 points of the full setting
    ],
)
def test_choose_returns_the_point_for_a_budget(budget: Budget, share: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CURVE.choose(budget).mac_share == share


def test_choose_says_that_a_loss_without_bounds_is_an_estimate() -> None:
    with pytest.warns(UserWarning, match="estimate"):
        assert CURVE.choose(Budget.loss(0.1)).mac_share == 0.1


def test_choose_warns_if_even_the_cheapest_point_costs_more() -> None:
    with pytest.warns(UserWarning, match=r"0\.05.*0\.100"):
        assert CURVE.choose(Budget.share(0.05)).mac_share == 0.1


def test_choose_counts_exactly_half_a_point_as_within_half_a_point() -> None:
    assert points((0.2, 0.895), (1.0, 0.90)).choose(Budget.default()).mac_share == 0.2
    assert points((0.2, 0.8949), (1.0, 0.90)).choose(Budget.default()).mac_share == 1.0


def test_choose_where_lower_is_better() -> None:
    curve = points((0.1, 30.0), (0.4, 10.04), (0.6, 9.0), (1.0, 10.0), higher=False)
    assert curve.choose(Budget.share(0.99)).mac_share == 0.6
    assert curve.choose(Budget.share(0.5)).mac_share == 0.4
    assert curve.choose(Budget.default()).mac_share == 0.4  # within half a percent of the full setting's perplexity
    assert points((0.4, 10.06), (1.0, 10.0), higher=False).choose(Budget.default()).mac_share == 1.0


def test_choose_with_only_the_full_point() -> None:
    assert replace(CURVE, points=CURVE.points[-1:]).choose(Budget.default()) == CURVE.full_point


def test_pareto_front_keeps_what_nothing_beats() -> None:
    full = point(1.0, 0.9)
    tried = [point(0.5, 0.8), point(0.2, 0.7), point(0.4, 0.85), point(0.3, 0.7), point(1.2, 0.95), point(0.2, 0.6)]
    assert [(p.mac_share, p.score) for p in pareto_front(tried, full, True)] == [(0.2, 0.7), (0.4, 0.85), (1.0, 0.9)]
    assert pareto_front([], full, True) == (full,)


scores = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 2))


@given(st.lists(st.tuples(st.floats(0.01, 1.3), scores), max_size=20), scores, st.booleans())
def test_pareto_front_is_beaten_by_no_point(pairs: list[tuple[float, float]], full_score: float, higher: bool) -> None:
    tried, full, sign = [point(*pair) for pair in pairs], point(1.0, full_score), 1 if higher else -1
    front = pareto_front(tried, full, higher)
    assert front[-1] is full
    shares, kept = [p.mac_share for p in front], [sign * p.score for p in front[:-1]]
    assert shares == sorted(shares) and kept == sorted(set(kept))
    for p in tried:
        if p.mac_share < 1.0:
            assert any(q.mac_share <= p.mac_share and sign * q.score >= sign * p.score for q in front)


def guarantee(risk: float, share: float, engine: str | None = None, precision: str | None = None) -> RiskGuarantee:
    return RiskGuarantee(risk, 0.95, {"threshold": share}, 300, 0.0, share, engine, precision)


def test_guarantee_for_returns_the_cheapest_that_suffices() -> None:
    proven = replace(CURVE, guarantees=(guarantee(0.01, 0.8), guarantee(0.02, 0.6), guarantee(0.05, 0.3)))
    assert proven.guarantee_for(0.03, "torch", "fp32").mac_share == 0.6
    with pytest.raises(OfframpError, match=r"0\.005(.|\n)*0\.01, 0\.02, 0\.05(.|\n)*--risk 0\.005"):
        proven.guarantee_for(0.005, "torch", "fp32")


@pytest.mark.parametrize(
    ("proven_on", "used_on", "holds"),
    [
        ((None, None), ("torch", "fp32"), True),  # format 1
        ((None, None), ("openvino", "fp32"), True),
        ((None, None), ("openvino", "int8"), False),
        (("torch", "fp32"), ("openvino", "fp32"), True),  # in float32 all engines decide alike
        (("torch", "fp32"), ("torch", "bf16"), False),
        (("openvino", "int8"), ("openvino", "int8"), True),
        (("openvino", "int8"), ("native", "int8"), False),
        (("openvino", "int8"), ("openvino", "fp32"), False),
    ],
)
def test_guarantee_holds_on_the_numerics_it_was_proven_for(
    proven_on: tuple[str | None, str | None], used_on: tuple[str, str], holds: bool
) -> None:
    proven = replace(CURVE, guarantees=(guarantee(0.01, 0.5, *proven_on),))
    if holds:
        assert proven.guarantee_for(0.01, *used_on).mac_share == 0.5
    else:
        with pytest.raises(OfframpError, match=used_on[1]):
            proven.guarantee_for(0.01, *used_on)


@pytest.mark.parametrize(("kind", "value"), [("risk", 0.01), ("latency", 0.005), ("disagreement", 0.01)])
def test_choose_refuses_a_default_that_has_no_point(kind: str, value: float) -> None:
    with pytest.raises(OfframpError, match="give a budget"):
        replace(CURVE, default={"kind": kind, "value": value}).choose()


def test_choose_takes_the_longest_time_within_a_default_latency() -> None:
    timed = [LatencyPoint(ms, 95.0, {"threshold": ms}, ms, ms, 0.9, ms / 10, "torch", "fp32", None, "here")
             for ms in (2.0, 4.0, 8.0)]  # fmt: skip
    known = replace(CURVE, default={"kind": "latency", "value": 0.005}, latencies=tuple(timed))
    assert known.choose().mac_share == 0.4


def test_disagreement_point_for_returns_the_cheapest_that_suffices() -> None:
    stored = tuple(DisagreementPoint(limit, {}, share, limit, 500) for limit, share in ((0.001, 0.9), (0.01, 0.4)))
    assert replace(CURVE, disagreements=stored).disagreement_point_for(0.02).mac_share == 0.4
    assert replace(CURVE, disagreements=stored).disagreement_point_for(0.001).mac_share == 0.9
    with pytest.raises(OfframpError, match="none"):
        CURVE.disagreement_point_for(0.01)


def test_save_and_load_return_the_same_points(tmp_path: Path) -> None:
    stored = replace(
        CURVE,
        guarantees=(guarantee(0.01, 0.5, "torch", "fp32"),),
        disagreements=(DisagreementPoint(0.01, {"threshold": 0.2}, 0.4, 0.004, 500),),
        engine="torch",
        precision="fp32",
    )
    save_points(tmp_path, stored)
    assert load_points(tmp_path) == stored


@pytest.mark.parametrize(
    "content",
    [
        '{"metric": "accuracy", "points": [{"share": 1}]}',
        '{"metric": "accuracy", "higher_is_better": true, "data": {}, "points": []}',
    ],
)
def test_load_refuses_damaged_points(tmp_path: Path, content: str) -> None:
    (tmp_path / "points.json").write_text(content)
    with pytest.raises(OfframpError, match=r"points\.json"):
        load_points(tmp_path)


def weights_folder(folder: Path, fill: int) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes([fill]) * 500_000)
    return folder


def test_load_refuses_points_of_another_model(tmp_path: Path) -> None:
    first, second = weights_folder(tmp_path / "first", 1), weights_folder(tmp_path / "second", 2)
    save_points(first, CURVE)
    assert load_points(first) == CURVE
    (second / "points.json").write_text((first / "points.json").read_text())
    with pytest.raises(OfframpError, match=r"another model[\s\S]*offramp calibrate"):
        load_points(second)


def test_load_reads_points_without_the_newer_fields(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "old", 1)
    save_points(folder, CURVE)
    stored = json.loads((folder / "points.json").read_text())
    for name in ("model", "warnings", "disagreements", "engine", "precision", "scale"):
        del stored[name]
    for one in stored["points"]:
        del one["seen"], one["error"]
    (folder / "points.json").write_text(json.dumps(stored))
    assert load_points(folder) == CURVE


@pytest.mark.parametrize("place", [0, 250_000, 499_999])
def test_weights_fingerprint_changes_with_any_part_of_a_file(tmp_path: Path, place: int) -> None:
    folder = weights_folder(tmp_path / "run", 1)
    before, content = weights_fingerprint(folder), bytearray((folder / "model.safetensors").read_bytes())
    content[place] = 9
    (folder / "model.safetensors").write_bytes(content)
    assert weights_fingerprint(folder) != before
    content[place] = 1
    (folder / "model.safetensors").write_bytes(content)
    assert weights_fingerprint(folder) == before


def test_weights_fingerprint_changes_with_another_file(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "run", 1)
    before = weights_fingerprint(folder)
    (folder / "offramp.safetensors").write_bytes(b"more")
    assert weights_fingerprint(folder) != before
