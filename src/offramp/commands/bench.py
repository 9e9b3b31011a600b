"""What `offramp bench` does with its options: measure, show, write."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from offramp import __version__, engines
from offramp.cli import bench_view as benchview
from offramp.cli import console
from offramp.errors import OfframpError
from offramp.evaluation.bench import Plan, Where, bench
from offramp.evaluation.bench_file import versions
from offramp.evaluation.contenders import known, predictor
from offramp.evaluation.course import check_task
from offramp.evaluation.growth import Setup, growth, overhead, startup
from offramp.evaluation.peers import Ground, Variant
from offramp.evaluation.result_cells import model_name, place
from offramp.inference.predictor import Predictor
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

KINDS = ("speed", "growth", "startup", "overhead")


@dataclass(frozen=True)
class Request:
    """A command as it was given."""

    run: str
    rows: Sequence[Mapping[str, Any]]
    source: str
    plan: Plan
    command: str


def check(what: str) -> None:
    """Refuse a measurement that there is not."""
    if what not in KINDS:
        raise OfframpError("something to measure", f"--what {what}", f"use one of: {', '.join(KINDS)}")


def words(text: str) -> tuple[str, ...]:
    """`a,b` as a tuple, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """`1,8,32` as whole numbers."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError as error:
        raise OfframpError(f"whole numbers for {flag}", repr(text), f"write {flag} 1,8,32") from error


def speed(request: Request, json: str | None, png: str | None) -> None:
    """Everybody at every batch size: the table, the picture, the file."""
    with tempfile.TemporaryDirectory() as work, benchview.BenchConsole() as watch:
        where = Where(Path(json) if json else None, work, request.command)
        made = bench(request.run, request.rows, request.source, request.plan, where, watch)
    benchview.show(made)
    if not made["rows"]:
        raise OfframpError("something to show", "nobody could be measured; the reasons are above", "install an engine")
    if png:
        benchview.draw(made, Path(png))


def aside(request: Request, what: str, json: str | None) -> None:
    """Growth, start-up or overhead of each engine and precision asked for."""
    plan, found = request.plan, []
    if not request.rows:
        raise OfframpError("rows to measure on", f"none in {request.source}", "give a file with rows")
    known(plan.engines, [engines.AUTO, *engines.names()], "engines of ours")
    torch.set_num_threads(plan.threads)
    model = Predictor.load(request.run, "torch")
    check_task(model)
    model.task.check_inputs(request.rows, request.source)
    ground = Ground(request.run, model.task.auto_class, "", plan.threads)
    for engine in dict.fromkeys(engines.choose(name, torch.device("cpu")) for name in plan.engines):
        setup = Setup(ground, Variant(engine, plan.precisions[0]), plan.budgets[0], max(plan.batch_sizes), plan.rounds)
        found.append({"engine": engine, "precision": setup.variant.precision, **_one(setup, request, what)})
    made = {
        "hardware": hardware(),
        "data": "/".join(place(request.source)),
        "model": model_name(model.model.base_model),
        "method": model.model.method.name,
        "measured": found,
        "budget": plan.budgets[0],
        "batch_size": max(plan.batch_sizes),
        "threads": plan.threads,
        "command": request.command,
        "version": __version__,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }
    if json:
        write_json(Path(json), made)
    for one in found:
        console.out.print(_table(one))
    console.out.print(f"hardware: {made['hardware']}", markup=False, highlight=False, soft_wrap=True)


def _one(setup: Setup, request: Request, what: str) -> dict[str, Any]:
    if what == "growth":
        return growth(setup, request.rows)
    if what == "startup":
        return startup(setup, request.rows)
    return overhead(predictor(setup.ground, setup.variant), request.rows, setup.rounds)


def _table(found: Mapping[str, Any]) -> Table:
    made = Table(title=f"{found['what']} of {found['engine']} {found['precision']}", title_justify="left")
    made.add_column("what")
    made.add_column("value", justify="right")
    for name, value in found.items():
        if name not in ("what", "engine", "precision"):
            made.add_row(name.replace("_", " "), str(value))
    return made
