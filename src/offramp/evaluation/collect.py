"""Result files of a folder as one list of trained models: what `compare` and `report` read.

Every JSON file below the folder is read, whatever the layout: result cells, bench files and files of speed by length.
Methods that are trained once for each cost (a penalty, a number of layers) get one curve over several runs
(`join_families`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.inference.operating_points import TOLERANCE, score_loss

NEEDED = ("method", "model", "data", "split", "rows", "metrics", "macs", "hardware", "command", "version", "date")
METRICS = ("entity_f1", "span_f1", "pearson", "bleu", "accuracy", "f1")  # a data set is reported by the first it has
LOWER_IS_BETTER = ("perplexity",)  # metrics of cells that were written before they had the field
BY_DATA = {"mrpc": "f1", "cola": "matthews"}
LOSSES = (0.005, 0.01, 0.02)  # reports quote the cheapest point that loses at most this much
FULL_DEPTH = "full"  # how a cell of the full model was chosen
SETTING = re.compile(r"(?:--|\b)(budget|max[-_]loss|risk|latency|max[-_]disagreement)[ =]['\"]?([\w.]+)")
Cell = dict[str, Any]


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve: a score at a share of the full model's MACs."""

    share: float
    score: float


@dataclass(frozen=True)
class ModelResult:
    """One trained model on one report split: its full depth, its chosen points and its curve."""

    method: str
    variant: str  # options that give it a row of its own in a table, e.g. k=2
    model: str
    data: str
    split: str
    seed: int | None
    metric: str
    full: CurvePoint | None  # all points are measured on the report rows; None: the full model was not measured
    chosen: Mapping[str, CurvePoint]  # "0.005" → the point that was chosen on calibration rows for this loss
    curve: tuple[CurvePoint, ...]
    cells: tuple[Cell, ...]
    files: tuple[str, ...]
    others: Mapping[str, CurvePoint] = field(default_factory=dict)  # "budget 0.1" → its point
    several_splits: bool = False  # other results of the data set are about another file
    higher_is_better: bool = True  # of the metric

    @property
    def section(self) -> str:
        """The experiment that it belongs to; empty for files directly under `<data>/<method>`."""
        return section_of(self.files[0], self.data, self.method)

    @property
    def table(self) -> str:
        """The title of the table that compares it with others."""
        data = f"{self.data}/{self.split}" if self.several_splits else self.data
        return f"{self.section}: {data}" if self.section else data

    @property
    def key(self) -> tuple[str, ...]:
        """What results of several seeds have in common."""
        return self.section, self.data, self.split, self.model, self.method, self.variant

    @property
    def largest_share(self) -> float:
        """The share of the full model, or of the most expensive point where that was not measured."""
        return self.full.share if self.full is not None else max(point.share for point in self.curve)

    def loss_of(self, score: float, full: float) -> float:
        """Return what a score loses of the full model's, as operating points count it."""
        return score_loss(score, full, self.higher_is_better, 100.0 / metric_scale(self.metric))

    def lowest_share(self, full: float, loss: float) -> float | None:
        """Return the smallest share on the curve that loses at most `loss` of a full score; None if no point does."""
        fitting = (point.share for point in self.curve if self.loss_of(point.score, full) <= loss + TOLERANCE)
        return min(fitting, default=None)

    @property
    def from_fine_tuned(self) -> bool:
        """Whether it was trained from a run that was already fine-tuned."""
        return (self.cells[0].get("trained") or {}).get("init") is not None


def metric_scale(metric: str) -> float:
    """Return what a metric is multiplied with in tables: 100 for shares of one, 1 for BLEU and perplexity."""
    return 1.0 if metric in ("bleu", "perplexity") else 100.0


def section_of(file: str, data: str, method: str) -> str:
    """Return the folders of a file below the searched one, without the leading `<data>/<method>` of `results/`."""
    folders = Path(file).parent.parts
    for own in (data, method):
        folders = folders[1:] if folders[:1] == (own,) else folders
    return "/".join(folders)


@dataclass
class CollectedResults:
    """The results of a folder, and the files that could not be read."""

    entries: list[ModelResult] = field(default_factory=list)
    benches: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lengths: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # speed by length
    others: list[str] = field(default_factory=list)  # valid JSON of another kind
    damaged: list[tuple[str, str]] = field(default_factory=list)  # file, what is wrong


def collect_results(folder: str | Path) -> CollectedResults:
    """Read every JSON file below a folder; damaged files and files of another kind are named and left out."""
    root = Path(folder)
    if not root.is_dir():
        raise OfframpError("a folder of results", f"{folder}, which is not a folder", "give the folder compare wrote")
    found = CollectedResults()
    for path in sorted(root.rglob("*.json")):
        name = path.relative_to(root).as_posix()
        try:
            _add(json.loads(path.read_text(encoding="utf-8")), name, found)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            found.damaged.append((name, f"{type(error).__name__}: {error}"))
    pooled = [_pooled(group) for group in _by_model(found.entries)]
    splits: dict[tuple[str, str], set[str]] = {}
    for one in pooled:
        splits.setdefault((one.section, one.data), set()).add(one.split)
    found.entries = [replace(one, several_splits=len(splits[one.section, one.data]) > 1) for one in pooled]
    return found


def _by_model(entries: list[ModelResult]) -> list[list[ModelResult]]:
    """Group files that hold one point each of one trained model."""
    groups: dict[Any, list[ModelResult]] = {}
    for entry in entries:
        single = len(entry.cells) == 1
        key = (*entry.key, entry.split, entry.seed, entry.from_fine_tuned)
        groups.setdefault(key if single else entry.files, []).append(entry)
    return list(groups.values())


def _pooled(group: list[ModelResult]) -> ModelResult:
    """Join single points to one result; of points whose setting is unknown the most expensive is the full model."""
    if len(group) == 1:
        return group[0]
    cells = sorted((cell for one in group for cell in one.cells), key=lambda c: -float(c["macs"]["share_of_full"]))
    return model_result(cells, *(file for one in group for file in one.files))


def _add(content: Any, name: str, found: CollectedResults) -> None:
    cells = content if isinstance(content, list) else [content]
    if cells and all(isinstance(c, dict) and all(key in c for key in NEEDED) for c in cells):
        listed = list(dict.fromkeys(cell["method"] for cell in cells))  # a study may add a baseline on the same rows
        found.entries += [model_result([cell for cell in cells if cell["method"] == one], name) for one in listed]
    elif isinstance(content, dict) and "what" in content:  # a study of its own
        found.others.append(name)
    elif isinstance(content, dict) and isinstance(content.get("rows"), list) and "hardware" in content:
        _check_timed(content, content["rows"], ("engine", "precision", "batch_size"))
        found.benches.append((name, content))
    elif isinstance(content, dict) and isinstance(content.get("lengths"), list) and "hardware" in content:
        _check_timed(content, content["lengths"], ("mean_tokens", "ms", "ms_full"))
        found.lengths.append((name, content))
    else:
        found.others.append(name)


def _check_timed(content: Cell, rows: list[Any], needed: tuple[str, ...]) -> None:
    """Refuse a file of timings that lacks a field in its header or in a row."""
    for row, keys in [(content, ("data", "method", "model")), *((row, needed) for row in rows)]:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ValueError(f"no {', '.join(missing)} in {str(row)[:60]}")


def metric_of(cell: Cell) -> str:
    """Return the metric that a data set is reported by."""
    if not cell["metrics"]:
        raise ValueError("a cell without metrics")
    named = BY_DATA.get(cell["data"], "")
    known = [name for name in (named, *METRICS) if name in cell["metrics"]]
    return known[0] if known else next(iter(cell["metrics"]))


def direction_of(content: Mapping[str, Any], metric: str) -> bool:
    """Return whether more of a metric is better in a cell or a bench file."""
    return bool(content.get("higher_is_better", metric not in LOWER_IS_BETTER))


def model_result(cells: list[Cell], *files: str) -> ModelResult:
    """Join the cells of one trained model on one split, full depth first."""
    first, metric = cells[0], metric_of(cells[0])
    settings = [setting_of(cell) for cell in cells]
    full = next((cell for cell, (by, _) in zip(cells, settings, strict=True) if by == FULL_DEPTH), None)
    points = {setting: _cell_point(cell, metric) for setting, cell in reversed(list(zip(settings, cells, strict=True)))}
    chosen = {str(value): point for (by, value), point in points.items() if by == "max_loss"}
    others = {_in_words(*one): point for one, point in points.items() if one[0] not in (FULL_DEPTH, "max_loss", "risk")}
    curve = [_point(s["share_of_full"], s["metrics"][metric]) for c in cells for s in c.get("curve", ())]
    label = variant_label(trained_options(first))
    named = (first["method"], label, first["model"], first["data"], first["split"], first.get("seed"))
    ordered = tuple(sorted(curve or [_cell_point(c, metric) for c in cells], key=lambda point: point.share))
    at_full = None if full is None else _cell_point(full, metric)
    higher = direction_of(first, metric)
    return ModelResult(*named, metric, at_full, chosen, ordered, tuple(cells), files, others, higher_is_better=higher)


def setting_of(cell: Cell) -> tuple[str, Any]:
    """Return how the point of a cell was chosen: `("full", None)`, `("budget", 0.1)`, `("max_loss", 0.01)` …

    Cells that were written before they had the field name it in their command, or are of the full model.
    """
    if "chosen" in cell:
        by = cell["chosen"].get("by") or f"max_{cell['chosen']['kind']}"
        value = cell["chosen"]["value"]
        return by, variant_label(value) if isinstance(value, dict) else value
    found = SETTING.search(str(cell["command"]))
    if found is None:
        return FULL_DEPTH, None
    by, value = found[1].replace("-", "_"), _as_number(found[2])
    if by == "budget" and value is not None and value >= 1.0:
        return FULL_DEPTH, None
    return by, found[2] if value is None else value


def _in_words(by: str, value: Any) -> str:
    return by if value is None else f"{by} {value:g}" if isinstance(value, float) else f"{by} {value}"


def _cell_point(cell: Cell, metric: str) -> CurvePoint:
    return _point(cell["macs"]["share_of_full"], cell["metrics"][metric])


def _point(share: Any, score: Any) -> CurvePoint:
    if not (math.isfinite(share) and math.isfinite(score)):
        raise ValueError(f"a score of {score} at a share of {share}")
    return CurvePoint(share, score)


def trained_options(cell: Cell) -> Cell:
    """Return the options that a model was trained with."""
    return (cell.get("trained") or {}).get("options") or {}


def variant_label(options: Mapping[str, Any]) -> str:
    """Return options as tables name them."""
    return ", ".join(f"{key}={value}" for key, value in sorted(options.items()))


def join_families(entries: Sequence[ModelResult]) -> list[ModelResult]:
    """Join results that differ in a single number they were trained with, if that number sets the cost."""
    groups: dict[Any, list[ModelResult]] = {}
    for one in entries:
        options = trained_options(one.cells[0])
        for option in sorted(key for key, value in options.items() if _as_number(value) is not None):
            rest = {key: str(value) for key, value in options.items() if key != option}
            place = (one.section, one.data, one.split, one.model, one.method, one.seed, one.from_fine_tuned)
            groups.setdefault((option, *place, str(sorted(rest.items()))), []).append(one)
    costs = {key: len({round(one.largest_share, 4) for one in group}) for key, group in groups.items()}
    return [_joined(group, key[0]) for key, group in groups.items() if costs[key] > 1]


def _joined(group: Sequence[ModelResult], option: str) -> ModelResult:
    """Join runs to one curve; its full depth is that of the most expensive run, and points are chosen among all."""
    group = sorted(group, key=lambda one: _as_number(trained_options(one.cells[0])[option]) or 0.0)
    most_expensive = max(group, key=lambda one: one.largest_share)
    others = {key: value for key, value in trained_options(most_expensive.cells[0]).items() if key != option}
    values = " or ".join(str(trained_options(one.cells[0])[option]) for one in group)
    ordered = (most_expensive, *(one for one in group if one is not most_expensive))
    return replace(
        most_expensive,
        variant=variant_label({**others, option: values}),
        chosen=_choose_in_family(group, most_expensive),
        curve=tuple(sorted((point for one in group for point in one.curve), key=lambda point: point.share)),
        cells=tuple(cell for one in ordered for cell in one.cells),
        files=tuple(file for one in group for file in one.files),
    )


def _choose_in_family(group: Sequence[ModelResult], most_expensive: ModelResult) -> dict[str, CurvePoint]:
    """Return the cheapest point of any run that loses little against the most expensive one, on calibration rows."""
    full = next((expected for expected, point in _expected(most_expensive) if point == most_expensive.full), None)
    points = [pair for one in group for pair in _expected(one)]
    if full is None:
        return {}
    chosen = {}
    for loss in LOSSES:
        lost = [most_expensive.loss_of(expected["score"], full["score"]) for expected, _ in points]
        fitting = [(e["mac_share"], n) for n, (e, _) in enumerate(points) if lost[n] <= loss + TOLERANCE]
        chosen[str(loss)] = points[min(fitting)[1]][1]
    return chosen


def _expected(one: ModelResult) -> list[tuple[dict[str, float], CurvePoint]]:
    """Return, for each point of the curve, what calibration expected and what the report rows show."""
    return [
        (point["expected"], CurvePoint(point["share_of_full"], point["metrics"][one.metric]))
        for cell in one.cells
        for point in cell.get("curve", ())
        if "expected" in point
    ]


def _as_number(text: Any) -> float | None:
    """Return the number that an option holds, perhaps as text; None for anything else. A bool is not a number."""
    try:
        return None if isinstance(text, bool) else float(text)
    except (TypeError, ValueError):
        return None
