"""Result files of a folder as one list: what `compare` and `report` read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.evaluation.curve import CurvePoint

NEEDED = ("method", "model", "data", "split", "rows", "metrics", "macs", "hardware", "command", "version", "date")
METRICS = ("entity_f1", "span_f1", "pearson", "bleu", "accuracy", "f1")  # what a data set is known by, in this order
BY_DATA = {"mrpc": "f1"}
LOSSES = (0.005, 0.01, 0.02)  # what reports ask: the cheapest point that loses at most so much
Cell = dict[str, Any]


@dataclass(frozen=True)
class ModelResult:
    """One trained model on one report split: its full depth, its chosen points and its whole curve."""

    method: str
    variant: str  # options that make it another row of a table, e.g. k=2
    model: str
    data: str
    split: str
    seed: int | None
    metric: str
    full: CurvePoint  # on the report rows, as all of these
    chosen: Mapping[str, CurvePoint]  # "0.005" → what the point chosen on calibration rows came to
    curve: tuple[CurvePoint, ...]
    cells: tuple[Cell, ...]
    files: tuple[str, ...]

    @property
    def section(self) -> str:
        """The experiment that it belongs to; nothing for what lies directly under `<data>/<method>`."""
        return section_of(self.files[0], self.data, self.method)

    @property
    def table(self) -> str:
        """What all that is compared with it stands under."""
        return f"{self.section}: {self.data}" if self.section else self.data

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What seeds are averaged over."""
        return self.section, self.data, self.model, self.method, self.variant

    @property
    def begun(self) -> bool:
        """Whether it was trained from a run that was fine-tuned already."""
        return (self.cells[0].get("trained") or {}).get("init") is not None


def section_of(file: str, data: str, method: str) -> str:
    """Return the folders of a file below the searched one, without the leading `<data>/<method>` of `results/`."""
    folders = Path(file).parent.parts
    for own in (data, method):
        folders = folders[1:] if folders[:1] == (own,) else folders
    return "/".join(folders)


@dataclass
class CollectedResults:
    """Everything found, and what could not be read."""

    entries: list[ModelResult] = field(default_factory=list)
    benches: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lengths: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # speed against length
    others: list[str] = field(default_factory=list)  # sound JSON of another kind
    damaged: list[tuple[str, str]] = field(default_factory=list)  # file, what is wrong


def collect_results(folder: str | Path) -> CollectedResults:
    """Every JSON file below a folder; damaged and foreign ones are named, skipped and counted."""
    root = Path(folder)
    if not root.is_dir():
        raise OfframpError("a folder of results", f"{folder}, which is none", "give the folder compare wrote")
    found = CollectedResults()
    for path in sorted(root.rglob("*.json")):
        name = path.relative_to(root).as_posix()
        try:
            _sort(json.loads(path.read_text(encoding="utf-8")), name, found)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            found.damaged.append((name, f"{type(error).__name__}: {error}"))
    found.entries = [_pooled(own) for own in _same_model(found.entries)]
    return found


def _same_model(entries: list[ModelResult]) -> list[list[ModelResult]]:
    """Files that hold one point each of one trained model belong together."""
    groups: dict[Any, list[ModelResult]] = {}
    for one in entries:
        alone = len(one.cells) == 1
        groups.setdefault((*one.key, one.split, one.seed, one.begun) if alone else one.files, []).append(one)
    return list(groups.values())


def _pooled(own: list[ModelResult]) -> ModelResult:
    """Single points as one entry; the dearest of them stands for full depth."""
    if len(own) == 1:
        return own[0]
    cells = sorted((cell for one in own for cell in one.cells), key=lambda c: -float(c["macs"]["share_of_full"]))
    return model_result(cells, *(file for one in own for file in one.files))


def _sort(content: Any, name: str, found: CollectedResults) -> None:
    cells = content if isinstance(content, list) else [content]
    if cells and all(isinstance(c, dict) and all(key in c for key in NEEDED) for c in cells):
        found.entries.append(model_result(cells, name))
    elif isinstance(content, dict) and isinstance(content.get("rows"), list) and "hardware" in content:
        _check(content, content["rows"], ("engine", "precision", "batch_size"))
        found.benches.append((name, content))
    elif isinstance(content, dict) and isinstance(content.get("lengths"), list) and "hardware" in content:
        _check(content, content["lengths"], ("mean_tokens", "ms", "ms_full"))
        found.lengths.append((name, content))
    else:
        found.others.append(name)


def _check(content: Cell, rows: list[Any], needed: tuple[str, ...]) -> None:
    """What was timed must say of what, and in every row by whom."""
    for row, keys in [(content, ("data", "method", "model")), *((row, needed) for row in rows)]:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ValueError(f"no {', '.join(missing)} in {str(row)[:60]}")


def metric_of(cell: Cell) -> str:
    """The metric a data set is known by."""
    if not cell["metrics"]:
        raise ValueError("a cell without metrics")
    named = BY_DATA.get(cell["data"], "")
    known = [name for name in (named, *METRICS) if name in cell["metrics"]]
    return known[0] if known else next(iter(cell["metrics"]))


def model_result(cells: list[Cell], *files: str) -> ModelResult:
    """Cells that are all of one trained model on one split, full depth first."""
    first, metric = cells[0], metric_of(cells[0])
    full = next((c for c in cells if c.get("chosen", {}).get("by", "full") == "full"), first)
    chosen = {str(c["chosen"]["value"]): _spot(c, metric) for c in cells if c.get("chosen", {}).get("by") == "max_loss"}
    curve = [_at(s["share_of_full"], s["metrics"][metric]) for c in cells for s in c.get("curve", ())]
    said = variant_label(trained_options(first))
    named = (first["method"], said, first["model"], first["data"], first["split"], first.get("seed"))
    spots = tuple(sorted(curve or [_spot(c, metric) for c in cells], key=lambda s: s.share))
    return ModelResult(*named, metric, _spot(full, metric), chosen, spots, tuple(cells), files)


def _spot(cell: Cell, metric: str) -> CurvePoint:
    return _at(cell["macs"]["share_of_full"], cell["metrics"][metric])


def _at(share: Any, score: Any) -> CurvePoint:
    if not (math.isfinite(share) and math.isfinite(score)):
        raise ValueError(f"a score of {score} at a share of {share}")
    return CurvePoint(share, score)


def trained_options(cell: Cell) -> Cell:
    """What the trainer was told beyond the method's name."""
    return (cell.get("trained") or {}).get("options") or {}


def variant_label(options: Mapping[str, Any]) -> str:
    """Options as tables name them."""
    return ", ".join(f"{key}={value}" for key, value in sorted(options.items()))


def lowest_share(spots: Iterable[CurvePoint], full: float, lost: float) -> float | None:
    """The smallest share on a curve that loses at most `lost`; None if no place does."""
    fitting = [spot.share for spot in spots if full - spot.score <= lost + 1e-9]
    return min(fitting, default=None)
