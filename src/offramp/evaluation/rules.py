"""The rules of a comparison, kept: cells that others measured count only if they were trained under the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.evaluation.collect import ModelResult, collect_results
from offramp.evaluation.plan import TFIDF, ComparisonCell, ComparisonPlan
from offramp.evaluation.result_cells import data_and_split, model_name
from offramp.training.schedule import Schedule
from offramp.utils.files import read_json, write_json

FILE = "rules.json"
SCHEDULE = ("epochs", "batch_size", "lr")
Key = tuple[Any, ...]


def write_rules(plan: ComparisonPlan, out: Path) -> None:
    """Write the rules down; a folder whose cells were measured under others is refused."""
    mine = {"training": dict(plan.training), "sets": {one.name: asdict(one) for one in plan.sets}}
    path = out / FILE
    there = read_json(path) if path.is_file() else {"training": mine["training"], "sets": {}}
    known = {name: about for name, about in there["sets"].items() if name in mine["sets"]}
    if there["training"] != mine["training"] or any(about != mine["sets"][name] for name, about in known.items()):
        way = "give the same --data, --rows, --epochs, --batch-size and --lr, or choose another --out"
        raise OfframpError(f"to go on with the comparison in {out}", "cells there under other rules", way)
    write_json(path, {**mine, "sets": {**there["sets"], **mine["sets"]}})


def collected_cells(folder: str | None, plan: ComparisonPlan) -> dict[str, ModelResult]:
    """Cells of a plan that other experiments have committed, by name. Counting words is too quick to be collected."""
    if folder is None or not Path(folder).is_dir():
        return {}
    known = {_entry_key(one): one for one in collect_results(folder).entries}
    found = {cell.name: known.get(_key(cell, plan)) for cell in plan.cells() if cell.method != TFIDF}
    return {name: one for name, one in found.items() if one is not None}


def _entry_key(one: ModelResult) -> Key:
    trained: Mapping[str, Any] = one.cells[0].get("trained") or {}
    schedule = trained.get("schedule") or {}
    rules = (trained.get("limit"), trained.get("max_length"), *(schedule.get(name) for name in SCHEDULE))
    return one.data, one.split, one.model, one.method, one.variant, one.seed, one.begun, *rules


def _key(cell: ComparisonCell, plan: ComparisonPlan) -> Key:
    variant = ", ".join(f"{key}={value}" for key, value in sorted(cell.options.items()))
    schedule = asdict(Schedule(**plan.training))
    rules = (cell.data.rows, cell.data.max_length, *(schedule[name] for name in SCHEDULE))
    named = (*data_and_split(cell.data.report), model_name(cell.model), cell.method, variant, cell.seed)
    return *named, cell.method != "full", *rules
