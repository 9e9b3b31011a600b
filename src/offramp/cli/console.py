"""What commands print: progress while training, tables afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from offramp.commands.train import TrainedRun, interrupted
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.operating_points import OperatingPoints
from offramp.utils.files import write_json

out = Console()
err = Console(stderr=True)


def say_plainly(text: str) -> None:
    """A line to standard error as it is: brackets in names are no markup."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


class TrainingConsole:
    """Live progress: stage, epoch, loss, metric, time left. Quiet on all processes but the first."""

    def __init__(self, run: str, epochs: int) -> None:
        self.run, self.epochs = run, epochs
        self.main = int(os.environ.get("RANK", "0")) == 0
        told = (TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
        loss = TextColumn("loss {task.fields[loss]:.4f}")
        columns = (TextColumn("{task.description}"), BarColumn(), *told, loss)
        self.progress = Progress(*columns, console=err, disable=not self.main)
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> TrainingConsole:
        if self.main and interrupted(self.run):
            say_plainly(f"going on with the unfinished run beside {self.run}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars:
            self.progress.stop()

    def say(self, **news: Any) -> None:
        """Called by the trainer with whatever happened."""
        if not self.main:
            return
        if news.get("done"):
            metrics = {k: v for k, v in news.items() if k not in ("done", "stage", "epoch", "loss")}
            listed = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            say_plainly(f"{news['stage']}, epoch {news['epoch']}: loss {news['loss']:.4f}, dev {listed}")
        elif "steps" in news:
            self._advance(news)
        elif "choosing" in news:
            say_plainly(f"choosing operating points on {news['choosing']} rows")
        else:
            cut = f", {news['cut']} truncated to {news['max_length']} tokens" if news["cut"] else ""
            say_plainly(f"{news['rows']} rows to train on, {news['dev']} to choose on{cut}")

    def _advance(self, news: dict[str, Any]) -> None:
        name, total = news["stage"], news["steps"] * self.epochs
        if not self.bars:
            self.progress.start()
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(name, total=total, loss=0.0)
        done = news["epoch"] * news["steps"] + news["step"]
        self.progress.update(self.bars[name], completed=done, loss=news["loss"])


def points_table(points: OperatingPoints) -> Table:
    """Operating points as a table."""
    title = f"operating points on {points.data['rows']} rows of {points.data['name']}"
    table = Table(title=title, title_justify="left")
    for column in ("share of MACs", points.metric, "mean exit layer", "settings"):
        table.add_column(column, justify="right")
    for point in [*points.points[: -1 : -(-len(points.points) // 14)], points.full_point]:
        numbers = f"{point.mac_share:.3f}", f"{point.score:.4f}", f"{point.mean_exit_layer:.2f}"
        table.add_row(*numbers, ", ".join(f"{k}={_short(v)}" for k, v in point.settings.items() if v not in ((), [])))
    return table


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_short, value))  # as --set takes it
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def summary(finished: TrainedRun, run: str) -> None:
    """After training: the points and what to type next."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    out.print(points_table(finished.points))
    budget = " --budget 0.5" if len(finished.points.points) > 1 else ""
    out.print(f"written to {run}; next: offramp eval {run} --data FILE{budget}", markup=False, soft_wrap=True)


def check_wish(budget: float | None, max_loss: float | None) -> None:
    """Refuse, before any work, what `show_points` could not answer."""
    if budget is not None and max_loss is not None:
        raise OfframpError("one point to show", "both --budget and --max-loss", "give one of them")
    if budget is not None:
        operating.check_budget(budget)
    if max_loss is not None and not max_loss >= 0.0:
        raise OfframpError("how much of the metric may be lost", f"--max-loss {max_loss}", "give 0 or more, e.g. 0.01")


def show_points(points: OperatingPoints, budget: float | None, max_loss: float | None) -> None:
    """After calibration: the points, the one asked for, and what was proven."""
    out.print(points_table(points))
    if budget is not None or max_loss is not None:
        loss = operating.TOLERANCE if max_loss is None else max_loss
        point = points.choose(budget, loss)
        found = f"{point.mac_share:.3f} of the full compute, {points.metric} {point.score:.4f}"
        out.print(f"for {f'budget {budget}' if budget is not None else f'a loss of at most {max_loss}'}: {found}")
    for proven in points.guarantees:
        promise = f"with confidence {proven.confidence:g}, at most {proven.risk:g} departs from the full model"
        out.print(f"{promise} at {proven.mac_share:.3f} of its compute ({proven.found:.4f} on {proven.rows} rows)")
    for timed in points.latencies:
        promise = f"{timed.percentile:g} % of single answers within {timed.milliseconds:g}ms on {' '.join(timed.how)}"
        found = f"predicted {timed.predicted:.3g}ms, measured {timed.measured:.3g}ms"
        out.print(f"{promise}: {points.metric} {timed.score:.4f} at {timed.mac_share:.3f} of the compute ({found})")


def show_cell(cell: dict[str, Any], keep: str | None = None) -> None:
    """A result cell in a few lines; the whole of it as JSON where `keep` says."""
    if keep:
        write_json(Path(keep), cell)
    table = Table(title=f"{cell['method']} on {cell['rows']} rows of {cell['data']}/{cell['split']}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in cell["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    table.add_row("share of full MACs", f"{cell['macs']['share_of_full']:.4f}")
    table.add_row("mean exit layer", f"{cell['mean_exit_layer']:.2f}")
    left = {layer: count for layer, count in cell["exit_histogram"].items() if count}
    table.add_row("rows that left after layer", ", ".join(f"{layer}: {count}" for layer, count in left.items()))
    table.add_row("tokens kept a row", f"{cell['mean_tokens_kept']:.1f}")
    table.add_row("seconds", f"{cell['seconds']:.2f}")
    if cell.get("truncated_rows"):
        table.add_row("truncated rows", str(cell["truncated_rows"]))
    out.print(table)


def show_curve(cells: list[dict[str, Any]], keep: str | None = None) -> None:
    """Chosen points on new rows beside what calibration expected; all cells as JSON where `keep` says."""
    if keep:
        write_json(Path(keep), cells)
    first = cells[0]
    table = Table(title=f"{first['method']} on {first['rows']} rows of {first['data']}/{first['split']}")
    for column in ("chosen by", *first["metrics"], "share of full MACs", "expected share", "mean exit layer"):
        table.add_column(column, justify="right")
    for cell in cells:
        chosen, found = cell["chosen"], [f"{value:.4f}" for value in cell["metrics"].values()]
        name = chosen["by"] if chosen["value"] is None else f"{chosen['by']} {chosen['value']:g}"
        shares = f"{cell['macs']['share_of_full']:.4f}", f"{chosen['expected']['mac_share']:.4f}"
        table.add_row(name, *found, *shares, f"{cell['mean_exit_layer']:.2f}")
    curve = first.get("curve", [])
    for spot in curve[:: max(1, -(-len(curve) // 14))]:
        found = [f"{value:.4f}" for value in spot["metrics"].values()]
        shares = f"{spot['share_of_full']:.4f}", f"{spot['expected']['mac_share']:.4f}"
        table.add_row("point", *found, *shares, f"{spot['mean_exit_layer']:.2f}")
    out.print(table)


def show_run(run: str) -> None:
    """What a run folder holds."""
    spec = folders.read_description(run)
    base = model_name(spec["base_model"])
    out.print(f"{run}: {spec['method']} for {spec['task']['name']}, from {base}", markup=False)
    layers = ["layers"] if spec.get("layers") else []  # most methods have nothing to tell of them
    for name in ("options", "task", "max_length", *layers, "versions"):
        out.print(f"  {name}: {spec[name]}", markup=False, highlight=False, soft_wrap=True)
    if (Path(run) / "points.json").is_file():
        points = operating.load_points(Path(run))
        show_points(points, None, None)


def show_environment() -> None:
    """Versions and hardware, for bug reports."""
    import accelerate
    import torch
    import transformers

    from offramp import __version__

    for name, value in {
        "offramp": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hardware": hardware(),
    }.items():
        out.print(f"{name:12} {value}", markup=False, highlight=False)
