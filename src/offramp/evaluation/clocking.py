"""The clock of a comparison: when all cells are done and the machine is quiet, every run is timed in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.bench import BenchOutput, BenchPlan, run_bench
from offramp.evaluation.plan import ComparisonCell
from offramp.utils.run_paths import is_run

BUDGETS = ("1.0", "max-loss=0.01")
PEERS = ("hf", "openvino")  # beside the plain model only: once for each data set


class _Nobody:
    """Nobody is told of single steps; the comparison tells of runs."""

    def phase(self, name: str, total: int) -> None:
        """A new part of the work."""

    def tick(self) -> None:
        """One step done."""


def time_runs(
    cells: list[ComparisonCell], out: Path, rows: int, command: str, tell: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Bench files beside the cells, none written twice; returns what could not be timed, by cell."""
    broken = {}
    for cell in cells:
        run, keep = out / "runs" / cell.name, out / "cells" / f"bench-{cell.name}.json"
        if not is_run(run) or keep.is_file():
            continue
        tell(f"timing {cell.name}")
        plain = cell.method == "full"
        against, budgets = (PEERS, BUDGETS[:1]) if plain else ((), BUDGETS)
        plan = BenchPlan((1, 32), budgets, ("auto",), against, ("fp32",), ("given",), 3, torch.get_num_threads(), False)
        fresh = keep.with_suffix(".part")
        try:
            given = read_rows(cell.data.report, limit=rows)
            with tempfile.TemporaryDirectory() as work:
                run_bench(str(run), given, cell.data.report, plan, BenchOutput(fresh, work, command), _Nobody())
            fresh.replace(keep)
        except OfframpError as error:
            broken[cell.name] = str(error)
    return broken
