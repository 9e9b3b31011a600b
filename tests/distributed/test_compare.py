"""`compare` on a Ray node: cells run as tasks, a broken one stops no other, and none runs twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offramp.commands.compare import ComparisonOutput, run_plan
from offramp.evaluation.comparison import ComparisonPlan, find_data_sets
from tests import factories


def small_plan(folder: Path, base: str) -> ComparisonPlan:
    """Return a plan of four methods on one data set, one of them with an option that does not exist."""
    for split, count, seed in (("train", 24, 0), ("test", 8, 1)):
        factories.write_jsonl(folder / f"{split}.jsonl", factories.labelled_rows("classification", count, seed))
    methods: list[tuple[str, dict[str, str]]] = [
        ("full", {}),
        ("tfidf", {}),
        ("branchynet", {}),
        ("truncate", {"z": "1"}),
    ]
    return ComparisonPlan(
        find_data_sets(str(folder), None), [base], methods, [42], {"epochs": 1, "batch_size": 8, "lr": 0.01}
    )


def test_cells_run_as_tasks_and_only_once(ray_node: Any, base: str, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    plan, output = small_plan(tmp_path / "words", base), ComparisonOutput(tmp_path / "out", cluster="auto")
    first = run_plan(plan, output)
    names = {cell.method: cell.name for cell in plan.cells()}
    assert set(first.done) == {names[method] for method in ("full", "tfidf", "branchynet")} and len(first.spent) == 3
    assert list(first.broken) == [names["truncate"]] and first.broken[names["truncate"]].startswith("OfframpError")
    cells = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").iterdir()}
    assert set(cells) == set(first.done)
    again = run_plan(ComparisonPlan(plan.sets, plan.models, plan.methods[:3], plan.seeds, plan.training), output)
    assert again.spent == [] and set(again.done) == set(first.done)


def test_a_time_limit_starts_no_task(ray_node: Any, base: str, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    plan = small_plan(tmp_path / "words", base)
    progress = run_plan(plan, ComparisonOutput(tmp_path / "out", time_limit=0.0, cluster="auto"))
    assert progress.stopped and not progress.done and not progress.broken
