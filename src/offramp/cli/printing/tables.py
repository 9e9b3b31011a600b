"""Results as tables: operating points, result cells, run folders, comparisons, the demo."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from offramp.cli.printing.console import out, print_line, print_table
from offramp.evaluation.collect import collect_results
from offramp.evaluation.curves import BATCH
from offramp.evaluation.tables import COLUMNS, table_lines
from offramp.inference.budget import DEFAULT_LOSS, Budget
from offramp.inference.operating_points import EXACT, DisagreementPoint, OperatingPoints
from offramp.utils.command_line import model_name

if TYPE_CHECKING:
    from offramp.commands.attach import AttachedRun
    from offramp.commands.compare import Comparison
    from offramp.commands.info import RunInfo
    from offramp.commands.train import TrainedRun

MAX_POINTS = 14  # operating points shown; the full model's always is


def points_table(points: OperatingPoints) -> Table:
    """Return operating points as a table; its settings can be typed back with --set."""
    title = f"operating points on {points.data['rows']} rows of {points.data['name']}"
    default = DEFAULT_LOSS if points.default_budget.kind == "default" else None
    unproven = "" if default is None else points.within_loss(default)[1]
    table = Table(title=title, title_justify="left", caption=unproven or None, caption_justify="left")
    bounded = points.bounds is not None and points.bounds.rows is not None
    bound = [f"loss ≤ ({100 * points.bounds.confidence:g} %)"] if bounded and points.bounds is not None else []
    for column in ("share of MACs", points.metric, *bound, "mean exit layer", "settings"):
        table.add_column(column, justify="right")
    for point in [*points.points[: -1 : -(-len(points.points) // MAX_POINTS)], points.full_point]:
        upper = ["" if point.loss_upper is None else f"{point.loss_upper:.4f}"] if bound else []
        numbers = (
            f"{point.mac_share:.3f}",
            f"{points.shown_score(point.score):.4f}",
            *upper,
            f"{point.mean_exit_layer:.2f}",
        )
        table.add_row(*numbers, ", ".join(f"{k}={_text(v)}" for k, v in point.settings.items() if v not in ((), [])))
    return table


def _text(value: Any) -> str:
    """Return a setting as --set takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def print_points(points: OperatingPoints, budget: Budget | None = None) -> None:
    """Print operating points, the one for a budget unless that is the default, and what was proven and timed."""
    print_table(points_table(points))
    if points.disagreements:
        out.print(disagreements_table(points.disagreements))
    default = points.default_budget
    used = f"max_loss={DEFAULT_LOSS:g}" if default.kind == "default" else str(default)
    print_line(f"found on {points.engine or 'torch'} {points.precision or EXACT}; without a budget {used} holds")
    if budget is not None and budget.kind != "default":
        point = points.choose(budget)
        score = points.shown_score(point.score)
        unproven = budget.kind == "loss" and point != points.full_point and bool(points.within_loss(budget.value)[1])
        print_line(
            f"for {budget}: {point.mac_share:.3f} of the full compute, {points.metric} {score:.4f}"
            + " (estimate, not proven)" * unproven
        )
    for proven in points.guarantees:
        promise = f"with confidence {proven.confidence:g}, at most {proven.risk:g} disagrees with the full model"
        out.print(f"{promise} at {proven.mac_share:.3f} of its compute ({proven.found:.4f} on {proven.rows} rows)")
    for timed in points.latencies:
        promise = f"{timed.percentile:g} % of single answers within {timed.milliseconds:g}ms on {' '.join(timed.how)}"
        times = f"predicted {timed.predicted:.3g}ms, measured {timed.measured:.3g}ms"
        score = points.shown_score(timed.score)
        out.print(f"{promise}: {points.metric} {score:.4f} at {timed.mac_share:.3f} of the compute ({times})")


def disagreements_table(points: Sequence[DisagreementPoint]) -> Table:
    """Return what each disagreement with the full model costs; engine and precision, where some are not torch's."""
    table, elsewhere = Table(box=None, pad_edge=False), any(not point.holds_on("torch", EXACT) for point in points)
    for name in ("limit", "found", "bound", "share of MACs", "mean layer", *["on"] * elsewhere):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        bound = f"≤ {100 * (point.upper or 1.0):.2f} %" + ("" if point.proven else " (estimate)")
        layer = "" if point.mean_exit_layer is None else f"{point.mean_exit_layer:.2f}"
        on = [f"{point.engine} {point.precision}"] * elsewhere
        table.add_row(
            f"{100 * point.limit:g} %", f"{100 * point.found:.2f} %", bound, f"{point.mac_share:.3f}", layer, *on
        )
    return table


def print_trained(trained: TrainedRun, run: str) -> None:
    """Print the operating points of a new run and the command to type next; only the first process prints."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    print_table(points_table(trained.points))
    budget = " --budget 0.5" if len(trained.points.points) > 1 else ""
    print_line(f"written to {run}; next: offramp eval {run} --data FILE{budget}")


def print_attached(run: AttachedRun) -> None:
    """Print what was attached and what each disagreement costs."""
    summary = run.summary
    console = Console()
    layers = [*summary["exits"]]
    places = [*(["the embeddings"] if 0 in layers else []), *(f"layer {layer}" for layer in layers if layer)]
    console.print(f"exits after {', '.join(places)}: {summary['why']}")
    console.print(f"what each disagreement with the full model costs, on {summary['held_out']} held-out texts:")
    console.print(disagreements_table(run.points.disagreements))
    if "labelled" in summary:
        scores = summary["labelled"]
        metric = next(iter(scores["full"]))
        console.print(
            f"on {scores['rows']} labelled rows: {metric} {scores['full'][metric]:.4f} in full, "
            f"{scores['default'][metric]:.4f} at the default, which costs {scores['mac_share']:.3f} of the MACs"
        )
    seconds = summary["seconds"]
    console.print(
        f"{run.folder}: one pass {seconds['one_pass']} s, heads {seconds['heads']} s, all {seconds['all']} s; "
        f"default {run.points.default_budget}"
    )


def print_cell(cell: Mapping[str, Any]) -> None:
    """Print a result cell in a few lines."""
    table = Table(title=f"{cell['method']} on {cell['rows']} rows of {cell['data']}/{cell['split']}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in cell["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    table.add_row("share of full MACs", f"{cell['macs']['share_of_full']:.4f}")
    table.add_row("mean exit layer", f"{cell['mean_exit_layer']:.2f}")
    exits = {layer: count for layer, count in cell["exit_histogram"].items() if count}
    table.add_row("rows that left after layer", ", ".join(f"{layer}: {count}" for layer, count in exits.items()))
    table.add_row("tokens kept a row", f"{cell['mean_tokens_kept']:.1f}")
    table.add_row("seconds", f"{cell['seconds']:.2f}")
    if cell.get("truncated_rows"):
        table.add_row("truncated rows", str(cell["truncated_rows"]))
    print_table(table)


def print_curve(cells: Sequence[Mapping[str, Any]]) -> None:
    """Print chosen operating points on new rows beside what calibration expected of them."""
    first = cells[0]
    table = Table(title=f"{first['method']} on {first['rows']} rows of {first['data']}/{first['split']}")
    for column in ("chosen by", *first["metrics"], "share of full MACs", "expected share", "mean exit layer"):
        table.add_column(column, justify="right")
    for cell in cells:
        chosen, metrics = cell["chosen"], [f"{value:.4f}" for value in cell["metrics"].values()]
        name = chosen["by"] if chosen["value"] is None else f"{chosen['by']} {chosen['value']:g}"
        shares = f"{cell['macs']['share_of_full']:.4f}", f"{chosen['expected']['mac_share']:.4f}"
        table.add_row(name, *metrics, *shares, f"{cell['mean_exit_layer']:.2f}")
    curve = first.get("curve", [])
    for spot in curve[:: max(1, -(-len(curve) // MAX_POINTS))]:
        metrics = [f"{value:.4f}" for value in spot["metrics"].values()]
        shares = f"{spot['share_of_full']:.4f}", f"{spot['expected']['mac_share']:.4f}"
        table.add_row("point", *metrics, *shares, f"{spot['mean_exit_layer']:.2f}")
    print_table(table)


def print_run(run: str, about: RunInfo) -> None:
    """Print what a run folder holds."""
    spec = about.spec
    print_line(f"{run}: {spec['method']} for {spec['task']['name']}, from {model_name(spec['base_model'])}")
    layers = ["layers"] if spec.get("layers") else []  # most methods have nothing to say about them
    for name in ("options", "task", "max_length", *layers, "versions"):
        print_line(f"  {name}: {spec[name]}")
    if about.points is not None:
        print_points(about.points)


def print_environment(facts: Mapping[str, str]) -> None:
    """Print versions and hardware, one a line."""
    for name, value in facts.items():
        print_line(f"{name:12} {value}")


def cells_table(folder: Path) -> Table:
    """Return the finished cells of a comparison as a table."""
    table = Table("data", *COLUMNS)
    if folder.is_dir():
        for line in table_lines(collect_results(folder).entries):
            table.add_row(line.data, *line.cells)
    return table


def print_comparison(comparison: Comparison, out_folder: str) -> None:
    """Print the finished cells, where the report is, what was collected and what broke."""
    if comparison.report is not None:
        print_table(cells_table(Path(out_folder) / "cells"))
        print_line(f"report: {comparison.report}")
    for name, file in comparison.progress.collected.items():
        print_line(f"{name}: already in {file}, not run again")
    for name, reason in comparison.progress.broken.items():
        out.print(f"broken: {name}: {reason}", markup=False, soft_wrap=True, style="red")
    if comparison.progress.stopped:
        out.print(f"stopped by the time limit with {comparison.progress.left} cells left; go on with --resume")


DEMO_COLUMNS = ("may\ndiffer", "differ", "accuracy", "mean\nlayers", "share\nof MACs", "ms in a\nbatch", "speed-up",
                "ms\nalone", "speed-up")  # fmt: skip
DEMO_NEXT = """
attached  exits {exits}, learned in one pass over {texts} unlabelled sentences: {seconds:.0f} s
differ    answers that differ from the full model's: allowed (held-out sentences chose the setting), and found here
ms        a sentence from text to prediction, in batches of {batch} or alone; medians of {rounds} rounds
speed-up  against the same model in plain transformers (plain HF); all below it: Offramp's engine {engine}
hardware  {hardware}
files     {out}/demo.json has all numbers, {out}/curve.png the curve

Next:
  echo 'a gem of a film' | offramp predict {out} --input - --max-disagreement 0.01
  offramp eval {out} --data {out}-data/test.jsonl --budget 0.5
  offramp attach YOUR_FINE_TUNED_MODEL --text texts.txt --out runs/mine
  offramp train --model minilm --train my.csv --method branchynet --out runs/mine   # columns: text, label"""


def print_demo(found: Mapping[str, Any], run: str) -> None:
    """Print what each disagreement saves, and which commands to type next."""
    size, tested = found["size"], found["rows"][0]["cell"]["rows"]
    title = f"{tested} test sentences, after plain fine-tuning on {size['schedule']['epochs']} × {size['train']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in DEMO_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    plain, full = found.get("transformers_ms"), found["rows"][0]
    if plain:  # demos of earlier versions have none
        ours = full["cell"]["metrics"]["accuracy"]
        times = [f"{plain['batch']:.2f}", "", f"{plain['alone']:.2f}", ""]
        table.add_row("plain HF", "", f"{ours:.4f}", "6.00", "1.000", *times)
    for row in found["rows"]:
        cell, ms, differ = row["cell"], row["ms"], row["disagreement"]
        speed_up = row["speed_up"] if plain is None else {how: plain[how] / ms[how] for how in ms}
        table.add_row(
            "full" if row["budget"] == "budget=1" else f"{100 * differ['allowed']:g} %",
            f"{100 * differ['found']:.1f} %",
            f"{cell['metrics']['accuracy']:.4f}",
            f"{cell['mean_exit_layer']:.2f}",
            f"{cell['macs']['share_of_full']:.3f}",
            f"{ms['batch']:.2f}",
            f"{speed_up['batch']:.2f}×",
            f"{ms['alone']:.2f}",
            f"{speed_up['alone']:.2f}×",
        )
    print_table(table)
    rounds = size["effort"]["rounds"]
    attached = found["attached"]
    print_line(
        DEMO_NEXT.format(
            out=run.rstrip("/"),
            batch=BATCH,
            rounds=rounds,
            hardware=found["hardware"],
            engine=found.get("engine", "auto"),
            exits=", ".join(str(layer) for layer in attached["exits"]),
            texts=attached["texts"] + attached["held_out"],
            seconds=attached["seconds"]["all"],
        )
    )
