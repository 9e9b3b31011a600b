"""Methods that are trained once for each cost (a penalty, a number of layers) have their curve over several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offramp.evaluation.collect import LOSSES, ModelResult, trained_options, variant_label
from offramp.evaluation.curve import CurvePoint


def join_families(entries: Sequence[ModelResult]) -> list[ModelResult]:
    """One entry for all that differ in a single number they were trained with, where that number sets the cost."""
    groups: dict[Any, list[ModelResult]] = {}
    for one in entries:
        options = trained_options(one.cells[0])
        for option in sorted(key for key, value in options.items() if _number(value) is not None):
            rest = {key: str(value) for key, value in options.items() if key != option}
            place = (one.section, one.data, one.split, one.model, one.method, one.seed, one.begun)
            groups.setdefault((option, *place, str(sorted(rest.items()))), []).append(one)
    priced = {key: own for key, own in groups.items() if len({round(one.full.share, 4) for one in own}) > 1}
    return [_joined(own, key[0]) for key, own in priced.items()]


def _joined(own: Sequence[ModelResult], option: str) -> ModelResult:
    """One curve of all; its full depth is that of the dearest, and choices are made over all of them."""
    own = sorted(own, key=lambda one: _number(trained_options(one.cells[0])[option]) or 0.0)
    dearest = max(own, key=lambda one: one.full.share)
    others = {key: value for key, value in trained_options(dearest.cells[0]).items() if key != option}
    said = {**others, option: " or ".join(str(trained_options(one.cells[0])[option]) for one in own)}
    return replace(
        dearest,
        variant=variant_label(said),
        chosen=_chosen(own, dearest),
        curve=tuple(sorted((spot for one in own for spot in one.curve), key=lambda spot: spot.share)),
        cells=tuple(cell for one in (dearest, *(o for o in own if o is not dearest)) for cell in one.cells),
        files=tuple(file for one in own for file in one.files),
    )


def _chosen(own: Sequence[ModelResult], dearest: ModelResult) -> dict[str, CurvePoint]:
    """The cheapest place of any run that promises, on calibration rows, to lose so little against the dearest."""
    full = next((e for e, s in _promises(dearest) if s == dearest.full), None)
    places = [place for one in own for place in _promises(one)]
    if full is None:
        return {}
    chosen = {}
    for loss in LOSSES:
        kept = [(e["mac_share"], n) for n, (e, _) in enumerate(places) if full["score"] - e["score"] <= loss]
        chosen[str(loss)] = places[min(kept)[1]][1]
    return chosen


def _promises(one: ModelResult) -> list[tuple[dict[str, float], CurvePoint]]:
    """What calibration expected of each place on the curve, and what came of it."""
    return [
        (spot["expected"], CurvePoint(spot["share_of_full"], spot["metrics"][one.metric]))
        for cell in one.cells
        for spot in cell.get("curve", ())
        if "expected" in spot
    ]


def _number(text: Any) -> float | None:
    """What a number says; options are kept as they were typed. Neither yes nor no is one."""
    try:
        return None if isinstance(text, bool) else float(text)
    except (TypeError, ValueError):
        return None
