"""`offramp compare` as a function: train, calibrate and evaluate every method on every data set, none of them twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offramp.commands.report import report
from offramp.commands.train import TrainRequest, model_source, run_training
from offramp.data.readers import read_rows
from offramp.distributed.cluster import connected, run_tasks
from offramp.errors import OfframpError
from offramp.evaluation.baselines import tfidf
from offramp.evaluation.comparison import (
    TFIDF,
    ComparisonCell,
    ComparisonPlan,
    collected_cells,
    find_data_sets,
    parse_duration,
    parse_methods,
    time_runs,
    write_rules,
)
from offramp.evaluation.curves import sweep_points
from offramp.evaluation.result_cells import Origin, data_and_split
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.training.schedule import Schedule
from offramp.utils.command_line import check_given_with, python_call
from offramp.utils.files import write_json
from offramp.utils.run_paths import is_run

ComparisonListener = Callable[["ComparisonProgress"], None]


@dataclass
class ComparisonProgress:
    """How far a comparison has come."""

    cells: list[ComparisonCell]
    done: list[str] = field(default_factory=list)  # run now or before
    collected: dict[str, str] = field(default_factory=dict)  # cell → the file that already holds it
    broken: dict[str, str] = field(default_factory=dict)  # cell → what went wrong
    current: str = ""
    spent: list[float] = field(default_factory=list)  # seconds of the cells that ran now
    stopped: bool = False  # by the time limit

    @property
    def left(self) -> int:
        """The number of cells that still have to run."""
        return len(self.cells) - len(self.done) - len(self.collected) - len(self.broken)

    @property
    def seconds_left(self) -> float | None:
        """An estimate of the seconds that the rest takes, once a cell has run."""
        return self.left * sum(self.spent) / len(self.spent) if self.spent else None


@dataclass(frozen=True)
class ComparisonOutput:
    """Where a comparison writes and what it need not run again."""

    out: Path
    collect: str | None = None
    time_limit: float | None = None
    command: str = "offramp compare"
    cluster: str | None = None  # address of a Ray cluster: cells run there, several at a time
    threads: int = 1  # processors of a cell on the cluster


@dataclass(frozen=True)
class Comparison:
    """A finished or interrupted comparison: its cells, and the report if there is something to report."""

    progress: ComparisonProgress
    report: Path | None


def compare(
    data: str,
    out: str,
    *,
    methods: str = "all",
    models: str = "minilm",
    seeds: int = 1,
    rows: int | None = None,
    epochs: int = 3,
    batch_size: int = 32,
    lr: float = 1e-4,
    time_limit: str | None = None,
    collect: str | None = "results",
    bench: int = 0,
    resume: bool = False,
    cluster: str | None = None,
    threads: int | None = None,
    listener: ComparisonListener = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    command: str | None = None,
) -> Comparison:
    """Train, calibrate and evaluate every method on every data set under the same rules; then write the report.

    Args:
        data: a folder of data sets, NAME/train.jsonl and NAME/test.jsonl.
        out: where cells, runs and the report are written.
        methods: "all", or names with options, "branchynet,truncate:k=2".
        models: folders or hub names, with commas between them. Of two with the same name, cells have folders around
            it in front.
        seeds: how many seeds, from 42 on.
        rows: only the first training rows.
        epochs, batch_size, lr: of each stage, the same for all methods.
        time_limit: start no cell that would end later, "90m" or "2h".
        collect: a folder of earlier results; cells found there do not run again.
        bench: at the end time every run on so many rows; 0 times none.
        resume: continue a comparison that is in `out` already.
        cluster: run cells as tasks of a Ray cluster, "auto", an address or "local"; all nodes must share `data`, `out`
            and the models under the same paths.
        threads: processors of a cell on the cluster, 1 by default.
        listener: is called before every cell and at the end.
        note: is called with a line for every run that is timed.
    """
    check_given_with("--cluster", cluster is not None, {"--threads": threads})
    limit = parse_duration(time_limit) if time_limit else None
    _check_free(out, resume)
    named = [model_source(name.strip()) for name in models.split(",") if name.strip()]
    if not named:
        raise OfframpError("models to compare", f"--models {models!r}", "give folders or names on the hub, or minilm")
    training = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    plan = ComparisonPlan(find_data_sets(data, rows), named, parse_methods(methods), range(42, 42 + seeds), training)
    command = command or python_call("compare", data, out, methods=methods, models=models, seeds=seeds)
    progress = run_plan(plan, ComparisonOutput(Path(out), collect, limit, command, cluster, threads or 1), listener)
    if bench:
        progress.broken.update(time_runs(progress.cells, Path(out), bench, command, note))
    written = None
    if progress.done or progress.collected:
        written = report(Path(out) / "cells", out=out).written[0]
    return Comparison(progress, written)


def _check_free(out: str, resume: bool) -> None:
    """Refuse a folder with finished cells unless they shall be kept."""
    if not resume and Path(out).is_dir() and any(Path(out).glob("cells/*.json")):
        fix = "give --resume to go on, or choose another --out"
        raise OfframpError(f"to compare into {out}", "finished cells there", fix)


def run_plan(
    plan: ComparisonPlan, where: ComparisonOutput, listener: ComparisonListener = lambda _: None
) -> ComparisonProgress:
    """Run the missing cells of a plan. A broken cell is remembered and the rest goes on; Ctrl-C keeps finished ones."""
    started, progress = time.monotonic(), ComparisonProgress(plan.cells())
    write_rules(plan, where.out)
    known = collected_cells(where.collect, plan)
    for cell in progress.cells:
        kept = where.out / "cells" / f"{cell.name}.json"
        if kept.is_file():
            progress.done.append(cell.name)
        elif cell.name in known:  # so that it is in the report beside the others
            write_json(kept, list(known[cell.name].cells))
            progress.collected[cell.name] = known[cell.name].files[0]
    pending = [cell for cell in progress.cells if cell.name not in {*progress.done, *progress.collected}]
    if where.cluster is not None and pending:
        _run_on_cluster(pending, plan, where, progress, listener)
        pending = []
    for cell in pending:
        if _too_late(progress, started, where.time_limit):
            progress.stopped = True
            break
        progress.current = cell.name
        listener(progress)
        _attempt(cell, plan, where, progress)
    progress.current = ""
    listener(progress)
    return progress


@dataclass(frozen=True)
class ClusterTask:
    """One cell as a Ray task, or only the training of a plain model that other cells start from."""

    cell: ComparisonCell
    plan: ComparisonPlan
    where: ComparisonOutput
    folder: str  # in which relative paths of the plan are meant
    only_train: bool = False


def run_cluster_task(task: ClusterTask) -> tuple[float, Any]:
    """Run a cell on a node and return its seconds and result cells; none if it was only trained."""
    os.chdir(task.folder)
    began = time.monotonic()
    result: Any = None
    if task.only_train:
        trained_run(task.cell, task.plan, task.where.out)
    else:
        result = run_cell(task.cell, task.plan, task.where)
    return time.monotonic() - began, result


def _run_on_cluster(
    pending: Sequence[ComparisonCell],
    plan: ComparisonPlan,
    where: ComparisonOutput,
    progress: ComparisonProgress,
    listener: ComparisonListener,
) -> None:
    """Run cells as Ray tasks: first the plain models, because all others start from them, then the rest."""
    started, folder = time.monotonic(), str(Path.cwd())
    plain = {cell.name: _plain_cell(cell) for cell in pending if cell.method != TFIDF}
    missing = {one.name: one for one in plain.values() if not is_run(where.out / "runs" / one.name)}
    listed = {cell.name: cell for cell in pending}
    first = [ClusterTask(cell, plan, where, folder, name not in listed) for name, cell in missing.items()]
    later = [ClusterTask(cell, plan, where, folder) for cell in pending if cell.name not in missing]
    failed: set[str] = set()
    with connected(where.cluster or "auto"):
        for wave in (first, later):
            tasks = [task for task in wave if plain.get(task.cell.name, task.cell).name not in failed]
            for task in wave:
                if task not in tasks:
                    progress.broken[task.cell.name] = "the plain model that it starts from could not be trained"
            progress.current = f"{len(tasks)} cells on the cluster"
            listener(progress)
            ended = 0
            for task, result, error in run_tasks(
                run_cluster_task,
                tasks,
                where.cluster or "auto",
                where.threads,
                lambda: not _too_late(progress, started, where.time_limit),
            ):
                ended += 1
                if error is not None:
                    failed.add(task.cell.name)
                    progress.broken[task.cell.name] = f"{type(error).__name__}: {error}"
                elif not task.only_train:
                    write_json(where.out / "cells" / f"{task.cell.name}.json", result[1])
                    progress.done.append(task.cell.name)
                    progress.spent.append(result[0])
                listener(progress)
            if ended < len(tasks):
                progress.stopped = True
                return


def _plain_cell(cell: ComparisonCell) -> ComparisonCell:
    """Return the cell of plain fine-tuning that a cell starts from."""
    return replace(cell, method="full", options={})


def _too_late(progress: ComparisonProgress, started: float, limit: float | None) -> bool:
    """Return whether another cell of mean length would end after the limit."""
    mean = sum(progress.spent) / len(progress.spent) if progress.spent else 0.0
    return limit is not None and time.monotonic() - started + mean > limit


def _attempt(cell: ComparisonCell, plan: ComparisonPlan, where: ComparisonOutput, progress: ComparisonProgress) -> None:
    began = time.monotonic()
    try:
        cells = run_cell(cell, plan, where)
    except Exception as error:  # one broken cell must not stop the others; it is named and reported
        progress.broken[cell.name] = f"{type(error).__name__}: {error}"
        return
    write_json(where.out / "cells" / f"{cell.name}.json", cells)
    progress.done.append(cell.name)
    progress.spent.append(time.monotonic() - began)


def run_cell(cell: ComparisonCell, plan: ComparisonPlan, where: ComparisonOutput) -> Any:
    """Return the result cells of one method on one data set."""
    if cell.method == TFIDF:
        files, limit = (cell.data.train, cell.data.report), cell.data.rows
        return tfidf(read_rows(cell.data.train, limit=limit), read_rows(cell.data.report), files, where.command)
    run = trained_run(cell, plan, where.out)
    predictor, rows = Predictor.load(run, "torch"), read_rows(cell.data.report)
    cells = sweep_points(predictor, rows, Origin(*data_and_split(cell.data.report), where.command, read_recipe(run)))
    return [{**one, "model": cell.model_in_results} for one in cells]


def trained_run(cell: ComparisonCell, plan: ComparisonPlan, out: Path) -> str:
    """Return the run folder of a cell, trained first if need be; all methods start from the plain fine-tuned model."""
    run = out / "runs" / cell.name
    if not is_run(run):
        init = None if cell.method == "full" else trained_run(_plain_cell(cell), plan, out)
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
