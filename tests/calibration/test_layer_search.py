"""A number for every layer: the search finds what one number for all layers cannot reach."""

from __future__ import annotations

from offramp.calibration.layer_search import KEPT, RUNS, STARTS, Values, search_layer_values
from offramp.inference.operating_points import OperatingPoint

FULL = OperatingPoint({}, 1.0, 0.9, 4.0)


def point(values: Values) -> OperatingPoint:
    """Every layer saves what its value says; only the first layer's saving costs accuracy."""
    return OperatingPoint({"scales": values}, 1.0 - 0.1 * sum(min(v, 2.0) for v in values), 0.9 - 0.02 * values[0], 4.0)


def test_search_leaves_the_harmful_layer_alone() -> None:
    runs: list[Values] = []
    found = search_layer_values(lambda v: runs.append(v) or point(v), [2.0, 1.0, 0.5], 4, FULL, 0.05)  # type: ignore[func-returns-value]
    assert len(runs) <= RUNS + STARTS and len(set(runs)) == len(runs) and 0 < len(found) <= KEPT
    best = max(found, key=lambda values: point(values).score - point(values).mac_share)
    assert best[0] < min(best[1:]), "the layers that cost nothing save the most"
    uniform = point((1.0,) * 4)
    assert any(point(v).mac_share < uniform.mac_share and point(v).score > uniform.score for v in found)
    assert found == search_layer_values(point, [2.0, 1.0, 0.5], 4, FULL, 0.05), "the search is deterministic"


def test_search_returns_nothing_where_every_start_is_useless() -> None:
    bad = OperatingPoint({}, 0.5, 0.5, 4.0)
    assert search_layer_values(lambda _: bad, [1.0], 4, FULL, 0.05) == []
    assert search_layer_values(point, [], 4, FULL, 0.05) == []
