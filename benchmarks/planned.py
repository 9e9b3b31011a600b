"""The papers' tables of planned depths, in small: score, compute, depth and speed of a setting's values, of runs that
were trained with other options, or of both. What differs names the lines; runs that differ in their seed alone are one
line, a mean with its spread.

    λ      python benchmarks/planned.py RUN --setting penalty --values 0,0.05,0.1,0.2 --data test.jsonl --json FILE
    γ      python benchmarks/planned.py RUN RUN-WITHOUT-REVPC --setting gamma --values 0,0.1,0.5,0.9 --data … --json …
    N      python benchmarks/planned.py N1-S1 N1-S2 N1-S3 N2-S1 … FULL-S1 --data test.jsonl --json FILE
    chosen python benchmarks/planned.py RUN… --max-loss 0.005 --data test.jsonl --json FILE

Files belong under results/planned. Runs whose method lacks the setting (`full`) get one line. All runs must answer the
same rows; they are timed in turn, batch by batch, on `--timed` of the rows, tokenised beforehand. `speed_up` is against
the first run's whole stack, with no token and no layer left out. Timings count only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from offramp import __version__, methods
from offramp.data.readers import read
from offramp.errors import OfframpError
from offramp.evaluation.contenders import Everything, ours
from offramp.evaluation.result_cells import Origin, evaluate_setting, hardware, model_name, place
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json

FULL = ("the whole stack", -1)
PROGRAM = "python benchmarks/planned.py"
Row = Mapping[str, Any]
Name = tuple[str, int]  # of a line, number of the run


@dataclass(frozen=True)
class Run:
    """A trained run, opened."""

    folder: str
    predictor: Predictor
    recipe: Mapping[str, Any]

    @property
    def seed(self) -> Any:
        """What it was trained with."""
        return self.recipe.get("schedule", {}).get("seed")

    def about(self) -> dict[str, Any]:
        """What lines may be named by."""
        model = self.predictor.model
        return {"model": model_name(model.base_model), "method": model.method.name, **asdict(model.options)}

    def known(self, given: Mapping[str, str]) -> dict[str, str]:
        """Those of some settings that its method has."""
        names = {field.name for field in fields(self.predictor.model.method.settings)}
        return {name: value for name, value in given.items() if name in names}


def names_of(runs: Sequence[Run]) -> list[str]:
    """Each run by the options that tell it from others; by its method if nothing does."""
    every = [run.about() for run in runs]
    keys = list(dict.fromkeys(key for one in every for key in one))
    telling = [key for key in keys if len({repr(one[key]) for one in every if key in one}) > 1]
    made = [", ".join(f"{key}={one[key]}" for key in telling if key in one) for one in every]
    for place_, name in enumerate(made):
        twin = next((n for n in range(place_) if made[n] == name and runs[n].seed == runs[place_].seed), None)
        if twin is not None:
            given = f"{runs[twin].folder} and {runs[place_].folder}, alike in options and seed"
            raise OfframpError("runs that differ", given, "give each run once, or runs of other seeds")
    return [name or one["method"] for name, one in zip(made, every, strict=True)]


def variants(runs: Sequence[Run], options: argparse.Namespace) -> dict[Name, Any]:
    """The settings of every line and run."""
    fixed = dict(item.split("=", 1) for item in options.set)
    for name in [*fixed, *([options.setting] if options.setting else [])]:
        if not any(run.known({name: ""}) for run in runs):  # says which there are
            method = runs[0].predictor.model.method
            methods.configure(method.settings, {name: ""}, method.name)
    made: dict[Name, Any] = {}
    for number, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        turned = [{options.setting: value} for value in options.values] if options.setting else []
        for one in [own for own in map(run.known, turned) if own] or [{}]:
            label = ", ".join([name, *(f"{key}={value}" for key, value in one.items())])
            made[label, number] = _settings(run, {**run.known(fixed), **one}, options.max_loss)
    return made


def _settings(run: Run, given: Mapping[str, str], max_loss: float | None) -> Any:
    if given:
        return run.predictor.settings(given=given)
    return run.predictor.model.method.settings() if max_loss is None else run.predictor.settings(max_loss=max_loss)


def timed(
    runs: Sequence[Run], made: Mapping[Name, Any], rows: Sequence[Row], size: int, rounds: int
) -> dict[Name, float]:
    """Rows a second of every variant, and of the first run's whole stack, all in turn."""
    encoded = [run.predictor.prepare(rows) for run in runs]
    order = sorted(range(len(encoded[0])), key=lambda i: len(encoded[0][i].ids))
    calls = [order[start : start + size] for start in range(0, len(order), size)]
    ways = {FULL: ours(runs[0].predictor, Everything())}
    ways |= {name: ours(runs[name[1]].predictor, settings) for name, settings in made.items()}

    def answer(name: Name, call: Sequence[int]) -> None:
        ways[name]([encoded[max(0, name[1])][i] for i in call])

    seconds = interleaved(answer, list(ways), calls, rounds)
    return {name: len(rows) / taken for name, taken in seconds.items()}


def lines_of(
    cells: Mapping[Name, dict[str, Any]], speeds: Mapping[str, Mapping[Name, float]], metric: str
) -> list[dict[str, Any]]:
    """Runs that go by one name as one line."""
    lines = []
    for label in dict.fromkeys(name for name, _ in cells):
        mine = [name for name in cells if name[0] == label]
        one = line(
            [cells[name] for name in mine], {s: [own[name] for name in mine] for s, own in speeds.items()}, metric
        )
        ratio = {size: round(one["rows_per_second"][size] / own[FULL], 4) for size, own in speeds.items()}
        lines.append({"name": label, **one, "speed_up": ratio, "cells": [cells[name] for name in mine]})
    return lines


def line(cells: Sequence[dict[str, Any]], speeds: Mapping[str, Sequence[float]], metric: str) -> dict[str, Any]:
    """One line of the table: means over runs, the spread of the score and of speeds."""
    depths = [sum(cell["tokens_by_layer"]) for cell in cells if "tokens_by_layer" in cell]
    return {
        "seeds": [cell["seed"] for cell in cells],
        "score": _mean([cell["metrics"][metric] for cell in cells]),
        "spread": _spread([cell["metrics"][metric] for cell in cells]),
        "mac_share": _mean([cell["macs"]["share_of_full"] for cell in cells]),
        "mean_exit_layer": _mean([cell["mean_exit_layer"] for cell in cells]),
        "mean_token_depth": _mean(depths) if depths else None,
        "mean_tokens_kept": _mean([cell["mean_tokens_kept"] for cell in cells]),
        "rows_per_second": {size: _mean(own) for size, own in speeds.items()},
        "rows_per_second_spread": {size: _spread(own) for size, own in speeds.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 6)


def _spread(values: Sequence[float]) -> float | None:
    """The standard deviation over runs; nothing of a single one."""
    return round(statistics.stdev(values), 6) if len(values) > 1 else None


def markdown(found: Mapping[str, Any]) -> str:
    """The lines as a table."""
    sizes = [str(size) for size in found["batch_sizes"]]
    numbers = [found["metric"], "share of MACs", "mean exit layer", "mean token depth", "tokens kept"]
    head = ["", *numbers, *(f"rows/s at batch {size}" for size in sizes)]
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for one in found["lines"]:
        score = f"{one['score']:.4f}" + (f" ± {one['spread']:.4f}" if one["spread"] is not None else "")
        depth = "" if one["mean_token_depth"] is None else f"{one['mean_token_depth']:.2f}"
        shown = [
            score,
            f"{one['mac_share']:.3f}",
            f"{one['mean_exit_layer']:.2f}",
            depth,
            f"{one['mean_tokens_kept']:.1f}",
        ]
        shown += [f"{one['rows_per_second'][size]:.1f} ({one['speed_up'][size]:.2f}×)" for size in sizes]
        text.append(f"| {' | '.join([one['name'], *shown])} |")
    full = [f"{found['whole_stack'][size]:.1f} (1.00×)" for size in sizes]
    return "\n".join([*text, f"| {' | '.join([FULL[0], *[''] * len(numbers), *full])} |"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything the file holds."""
    rows = read(options.data, limit=options.limit)
    data, split = place(options.data)
    runs = [Run(r, Predictor.load(r, options.engine, "fp32", options.threads), read_recipe(r)) for r in options.runs]
    metrics = {run.predictor.task.metric for run in runs}
    if len(metrics) > 1:
        raise OfframpError("runs of one task", f"metrics {', '.join(sorted(metrics))}", "give runs of the same data")
    made, cells = variants(runs, options), dict[Name, dict[str, Any]]()
    for name, settings in made.items():
        run = runs[name[1]]
        origin = Origin(data, split, command_line(PROGRAM), run.recipe)
        cells[name] = evaluate_setting(run.predictor, rows, settings, origin)
        print(f"{name[0]}, {Path(run.folder).name}: {cells[name]['metrics']}", file=sys.stderr, flush=True)
    some = rows[:: max(1, len(rows) // options.timed)][: options.timed]
    speeds = {str(size): timed(runs, made, some, size, options.rounds) for size in options.batch_sizes}
    about: dict[str, Any] = {"what": "planned depths", "data": data, "split": split, "rows": len(rows)}
    first, known = runs[0].predictor, [{"run": Path(run.folder).name, "seed": run.seed} for run in runs]
    about |= {"model": model_name(first.model.base_model), "runs": known, "metric": metrics.pop()}
    how = {"engine": first.engine_name, "precision": "fp32", "threads": options.threads, "rounds": options.rounds}
    how |= {"batch_sizes": options.batch_sizes, "timed_rows": len(some), "setting": options.setting}
    made_by = {"hardware": hardware(), "command": command_line(PROGRAM), "version": __version__}
    whole = {size: round(own[FULL], 3) for size, own in speeds.items()}
    table = {"whole_stack": whole, "lines": lines_of(cells, speeds, about["metric"])}
    return {**about, **how, **table, **made_by, "date": datetime.date.today().isoformat()}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", required=True, help="labelled rows to report on")
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--setting", help="a run-time setting to turn, e.g. gamma or penalty")
    parser.add_argument("--values", type=lambda text: text.split(","), default=[], help="its values, e.g. 0,0.5,0.9")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, for all runs")
    parser.add_argument("--max-loss", type=float, help="instead of settings: the point chosen in calibration")
    parser.add_argument("--batch-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 32])
    parser.add_argument("--timed", type=int, default=256, help="rows that are timed, spread over the data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    if bool(options.setting) != bool(options.values):
        parser.error("--setting and --values belong together")
    if options.max_loss is not None and (options.setting or options.set):
        parser.error("give settings or --max-loss, not both")
    if any("=" not in item for item in options.set):
        parser.error("write --set as name=value")
    try:
        found = measure(options)
    except OfframpError as error:
        sys.exit(str(error))
    if options.json:
        write_json(Path(options.json), found)
    print(markdown(found))


if __name__ == "__main__":
    main()
