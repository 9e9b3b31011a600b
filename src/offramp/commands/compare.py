"""`offramp compare` as a function: train, calibrate and evaluate every cell of a plan, none of them twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offramp.commands.train import TrainRequest, run_training
from offramp.data.readers import read
from offramp.errors import OfframpError
from offramp.evaluation.baselines import tfidf
from offramp.evaluation.plan import TFIDF, Cell, Plan
from offramp.evaluation.point_sweep import sweep
from offramp.evaluation.result_cells import Origin, place
from offramp.evaluation.rules import measured, settle
from offramp.inference import run_folder as folders
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.training.schedule import Schedule
from offramp.utils.files import write_json

Tell = Callable[["Progress"], None]


@dataclass
class Progress:
    """How far a comparison has come."""

    cells: list[Cell]
    done: list[str] = field(default_factory=list)  # run now or before
    collected: dict[str, str] = field(default_factory=dict)  # cell → the file that already holds it
    broken: dict[str, str] = field(default_factory=dict)  # cell → what went wrong
    current: str = ""
    spent: list[float] = field(default_factory=list)
    stopped: bool = False  # the time limit came first

    @property
    def left(self) -> int:
        """Cells that still have to run."""
        return len(self.cells) - len(self.done) - len(self.collected) - len(self.broken)

    @property
    def seconds_left(self) -> float | None:
        """An estimate, once a cell has run."""
        return self.left * sum(self.spent) / len(self.spent) if self.spent else None


@dataclass(frozen=True)
class Place:
    """Where a comparison writes and what it need not run again."""

    out: Path
    collect: str | None = None
    time_limit: float | None = None
    command: str = "offramp compare"


def check_free(out: str, resume: bool) -> None:
    """A folder with cells is only gone on with when asked."""
    if not resume and Path(out).is_dir() and any(Path(out).glob("cells/*.json")):
        way = "say --resume to go on, or choose another --out"
        raise OfframpError(f"to compare into {out}", "finished cells there", way)


def compare(plan: Plan, where: Place, tell: Tell = lambda _: None) -> Progress:
    """Run what is missing. A broken cell is remembered and the rest goes on; Ctrl-C keeps all that is finished."""
    started, progress = time.monotonic(), Progress(plan.cells())
    settle(plan, where.out)
    known = measured(where.collect, plan)
    for cell in progress.cells:
        kept = where.out / "cells" / f"{cell.name}.json"
        if kept.is_file():
            progress.done.append(cell.name)
        elif cell.name in known:  # it stands in the report beside the others
            write_json(kept, list(known[cell.name].cells))
            progress.collected[cell.name] = known[cell.name].files[0]
    for cell in progress.cells:
        if cell.name in progress.done or cell.name in progress.collected:
            continue
        if _too_late(progress, started, where.time_limit):
            progress.stopped = True
            break
        progress.current = cell.name
        tell(progress)
        _attempt(cell, plan, where, progress)
    progress.current = ""
    tell(progress)
    return progress


def _too_late(progress: Progress, started: float, limit: float | None) -> bool:
    """Whether another cell, as long as the mean, would not fit."""
    mean = sum(progress.spent) / len(progress.spent) if progress.spent else 0.0
    return limit is not None and time.monotonic() - started + mean > limit


def _attempt(cell: Cell, plan: Plan, where: Place, progress: Progress) -> None:
    began = time.monotonic()
    try:
        made = run_cell(cell, plan, where)
    except Exception as error:  # whatever breaks one cell must not take the others along; it is named and reported
        progress.broken[cell.name] = f"{type(error).__name__}: {error}"
        return
    write_json(where.out / "cells" / f"{cell.name}.json", made)
    progress.done.append(cell.name)
    progress.spent.append(time.monotonic() - began)


def run_cell(cell: Cell, plan: Plan, where: Place) -> Any:
    """Result cells of one method on one data set."""
    if cell.method == TFIDF:
        files, limit = (cell.data.train, cell.data.report), cell.data.rows
        return tfidf(read(cell.data.train, limit=limit), read(cell.data.report), files, where.command)
    run = trained(cell, plan, where.out)
    predictor, rows = Predictor.load(run, "torch"), read(cell.data.report)
    return sweep(predictor, rows, Origin(*place(cell.data.report), where.command, read_recipe(run)))


def trained(cell: Cell, plan: Plan, out: Path) -> str:
    """The run folder of a cell, trained if it is not there; all methods start from the plain fine-tuned one."""
    run = out / "runs" / cell.name
    if not folders.is_run(run):
        plain = Cell(cell.data, cell.model, "full", {}, cell.seed)
        init = None if cell.method == "full" else trained(plain, plan, out)
        data = cell.data
        request = TrainRequest(
            cell.model,
            data.train,
            str(run),
            data.task,
            cell.method,
            init=init,
            max_length=data.max_length,
            limit=data.rows,
            options=dict(cell.options),
            schedule=Schedule(**plan.training, seed=cell.seed),
        )
        run_training(request)
    return str(run)
