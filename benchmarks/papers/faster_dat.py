"""Faster-DAT and ALBERTA: tables of planned depths, and the depths of words.

`table` reports score, compute, depth and speed of a setting's values, of runs trained with different options, or of
both. A line is named by what differs; runs that differ only in their seed share a line, a mean with its spread.

    λ      python benchmarks/papers/faster_dat.py table RUN --setting penalty --values 0,0.05,0.1,0.2 --data test.jsonl
    γ      python benchmarks/papers/faster_dat.py table RUN RUN-WITHOUT-REVPC --setting gamma --values 0,0.5,0.9 …
    N      python benchmarks/papers/faster_dat.py table N1-S1 N1-S2 N1-S3 N2-S1 … FULL-S1 --data test.jsonl
    chosen python benchmarks/papers/faster_dat.py table RUN… --max-loss 0.005 --data test.jsonl --json FILE

Runs whose method lacks the setting (`full`) get one line. All runs must answer the same rows; they are timed in turn,
batch by batch, on `--timed` of the rows, tokenised beforehand. `speed_up` is relative to the first run with every token
in every layer. Timings are meaningful only on an idle machine.

`words` shows how deep each word of a sentence goes, and the histogram of all words, as text and as a picture:

    python benchmarks/papers/faster_dat.py words RUN "a sentence in quotes" --png depths.png
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

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from offramp import __version__, methods
from offramp.core.loop import State
from offramp.data.readers import read_rows
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.evaluation.contenders import EveryLayer, predictor_runner
from offramp.evaluation.result_cells import Origin, data_and_split, evaluate_setting, hardware, model_name
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.methods.faster_dat.policy import WORD_DEPTH
from offramp.methods.faster_dat.word_depths import WORD_DEPTHS, WordDepths, word_depths_of
from offramp.nn.batches import pack_rows
from offramp.nn.words import words_of
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import atomic_replace, write_json

PROGRAM = "python benchmarks/papers/faster_dat.py"
FULL = ("the whole stack", -1)
DIFFERENT, RUNNING = "#9db8d9", "#2f6db3"
BLOCK = 256  # rows whose depths are looked up at once
Row = Mapping[str, Any]
LineKey = tuple[str, int]  # the name of a line, the number of the run


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenRun:
    """A trained run, loaded."""

    folder: str
    predictor: Predictor
    recipe: Mapping[str, Any]

    @property
    def seed(self) -> Any:
        """The seed it was trained with."""
        return self.recipe.get("schedule", {}).get("seed")

    def description(self) -> dict[str, Any]:
        """Return what lines may be named by."""
        model = self.predictor.model
        return {"model": model_name(model.base_model), "method": model.method.name, **asdict(model.options)}

    def known(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return those of some settings that its method has."""
        names = {field.name for field in fields(self.predictor.model.method.settings)}
        return {name: value for name, value in given.items() if name in names}


def line_names(runs: Sequence[OpenRun]) -> list[str]:
    """Name each run by the options in which the runs differ; by its method if they differ in none."""
    descriptions = [run.description() for run in runs]
    keys = list(dict.fromkeys(key for one in descriptions for key in one))
    differing = [key for key in keys if len({repr(one[key]) for one in descriptions if key in one}) > 1]
    names = [", ".join(f"{key}={one[key]}" for key in differing if key in one) for one in descriptions]
    for number, name in enumerate(names):
        twin = next((n for n in range(number) if names[n] == name and runs[n].seed == runs[number].seed), None)
        if twin is not None:
            given = f"{runs[twin].folder} and {runs[number].folder}, alike in options and seed"
            raise OfframpError("runs that differ", given, "give each run once, or runs of other seeds")
    return [name or one["method"] for name, one in zip(names, descriptions, strict=True)]


def line_settings(runs: Sequence[OpenRun], options: argparse.Namespace) -> dict[LineKey, Any]:
    """Return the settings of every line and run."""
    fixed = key_values(options.set, "--set")
    for name in [*fixed, *([options.setting] if options.setting else [])]:
        if not any(run.known({name: ""}) for run in runs):
            method = runs[0].predictor.model.method
            methods.configure(method.settings, {name: ""}, method.name)  # raises, and lists the settings there are
    settings: dict[LineKey, Any] = {}
    for number, (run, name) in enumerate(zip(runs, line_names(runs), strict=True)):
        varied = [{options.setting: value} for value in options.values] if options.setting else []
        for one in [own for own in map(run.known, varied) if own] or [{}]:
            label = ", ".join([name, *(f"{key}={value}" for key, value in one.items())])
            settings[label, number] = _settings(run, {**run.known(fixed), **one}, options.max_loss)
    return settings


def _settings(run: OpenRun, given: Mapping[str, str], max_loss: float | None) -> Any:
    if given:
        return run.predictor.settings(given=given)
    return run.predictor.model.method.settings() if max_loss is None else run.predictor.settings(max_loss=max_loss)


def rows_per_second(
    runs: Sequence[OpenRun], settings: Mapping[LineKey, Any], rows: Sequence[Row], size: int, rounds: int
) -> dict[LineKey, float]:
    """Return the speed of every line, and of the first run with every layer, all timed in turn."""
    encoded = [run.predictor.prepare(rows) for run in runs]
    order = sorted(range(len(encoded[0])), key=lambda i: len(encoded[0][i].ids))
    calls = [order[start : start + size] for start in range(0, len(order), size)]
    runners = {FULL: predictor_runner(runs[0].predictor, EveryLayer())}
    runners |= {key: predictor_runner(runs[key[1]].predictor, one) for key, one in settings.items()}

    def work(key: LineKey, call: Sequence[int]) -> None:
        runners[key]([encoded[max(0, key[1])][i] for i in call])

    seconds = interleaved(work, list(runners), calls, rounds)
    return {key: len(rows) / taken for key, taken in seconds.items()}


def average_lines(
    cells: Mapping[LineKey, dict[str, Any]], speeds: Mapping[str, Mapping[LineKey, float]], metric: str
) -> list[dict[str, Any]]:
    """Join runs of the same name to one line."""
    lines = []
    for label in dict.fromkeys(name for name, _ in cells):
        keys = [key for key in cells if key[0] == label]
        own_speeds = {size: [own[key] for key in keys] for size, own in speeds.items()}
        line = mean_line([cells[key] for key in keys], own_speeds, metric)
        ratio = {size: round(line["rows_per_second"][size] / own[FULL], 4) for size, own in speeds.items()}
        lines.append({"name": label, **line, "speed_up": ratio, "cells": [cells[key] for key in keys]})
    return lines


def mean_line(cells: Sequence[dict[str, Any]], speeds: Mapping[str, Sequence[float]], metric: str) -> dict[str, Any]:
    """Return the means over runs, with the spread of the score and of the speeds."""
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
    """Return the standard deviation over runs; None for a single run."""
    return round(statistics.stdev(values), 6) if len(values) > 1 else None


def markdown(table: Mapping[str, Any]) -> str:
    """Return the lines as a Markdown table."""
    sizes = [str(size) for size in table["batch_sizes"]]
    numbers = [table["metric"], "share of MACs", "mean exit layer", "mean token depth", "tokens kept"]
    head = ["", *numbers, *(f"rows/s at batch {size}" for size in sizes)]
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for line in table["lines"]:
        score = f"{line['score']:.4f}" + (f" ± {line['spread']:.4f}" if line["spread"] is not None else "")
        depth = "" if line["mean_token_depth"] is None else f"{line['mean_token_depth']:.2f}"
        columns = [
            score,
            f"{line['mac_share']:.3f}",
            f"{line['mean_exit_layer']:.2f}",
            depth,
            f"{line['mean_tokens_kept']:.1f}",
        ]
        columns += [f"{line['rows_per_second'][size]:.1f} ({line['speed_up'][size]:.2f}×)" for size in sizes]
        text.append(f"| {line['name']} | {' | '.join(columns)} |")
    blanks = " | ".join("" for _ in numbers)
    full = " | ".join(f"{table['whole_stack'][size]:.1f} (1.00×)" for size in sizes)
    return "\n".join([*text, f"| {FULL[0]} | {blanks} | {full} |"])


def measure_table(options: argparse.Namespace) -> dict[str, Any]:
    """Score and time every line; return what the JSON file holds."""
    rows = read_rows(options.data, limit=options.limit)
    data, split = data_and_split(options.data)
    runs = [
        OpenRun(run, Predictor.load(run, options.engine, "fp32", options.threads), read_recipe(run))
        for run in options.runs
    ]
    metrics = {run.predictor.task.metric for run in runs}
    if len(metrics) > 1:
        raise OfframpError("runs of one task", f"metrics {', '.join(sorted(metrics))}", "give runs of the same data")
    settings, cells = line_settings(runs, options), dict[LineKey, dict[str, Any]]()
    for key, one in settings.items():
        run = runs[key[1]]
        cells[key] = evaluate_setting(run.predictor, rows, one, Origin(data, split, command_line(PROGRAM), run.recipe))
        print(f"{key[0]}, {Path(run.folder).name}: {cells[key]['metrics']}", file=sys.stderr, flush=True)
    timed = rows[:: max(1, len(rows) // options.timed)][: options.timed]
    speeds = {str(size): rows_per_second(runs, settings, timed, size, options.rounds) for size in options.batch_sizes}
    first, metric = runs[0].predictor, metrics.pop()
    return {
        "what": "planned depths",
        "data": data,
        "split": split,
        "rows": len(rows),
        "model": model_name(first.model.base_model),
        "runs": [{"run": Path(run.folder).name, "seed": run.seed} for run in runs],
        "metric": metric,
        "engine": first.engine_name,
        "precision": "fp32",
        "threads": options.threads,
        "rounds": options.rounds,
        "batch_sizes": options.batch_sizes,
        "timed_rows": len(timed),
        "setting": options.setting,
        "whole_stack": {size: round(own[FULL], 3) for size, own in speeds.items()},
        "lines": average_lines(cells, speeds, metric),
        "hardware": hardware(),
        "command": command_line(PROGRAM),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


# --- depths of words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthHistogram:
    """Depths of a sentence's words and of all words. The first entry of a histogram is depth 1."""

    layers: int
    words: list[str]  # of the sentence
    depths: list[int]
    different: list[int]  # distinct words of the training rows by depth
    running: list[int]  # occurrences, in the training rows or in the rows given

    @property
    def mean(self) -> float:
        """The mean depth of running words."""
        return sum(depth * n for depth, n in enumerate(self.running, 1)) / max(1, sum(self.running))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        return {**asdict(self), "mean_depth": self.mean}


def word_depths(predictor: Predictor, texts: Sequence[str], settings: Any, rows: Sequence[Row] = ()) -> DepthHistogram:
    """Return the depths of a text's words, and of all words: those of `rows`, or else of the training rows."""
    table = _depth_table(predictor)
    cap = min(int(settings.cap) or table.layers, table.layers)
    planned, _ = table.depths_for(table.penalty if settings.penalty < 0 else settings.penalty)
    planned = planned.clamp(max=cap).cpu()
    different, running = (_histogram(planned, weights, table.layers) for weights in (None, table.counts.cpu()))
    if rows:
        encoded = predictor.prepare(rows, "the rows")
        blocks = [encoded[start : start + BLOCK] for start in range(0, len(encoded), BLOCK)]
        running = _histogram(torch.cat([_look_up(predictor, b, settings) for b in blocks]), None, table.layers)
    words: list[str] = []
    depths = torch.zeros(0, dtype=torch.int64)
    if texts:
        item = predictor.prepare([_row(predictor, texts)])[0]
        words, depths = _spelled(predictor, item), _look_up(predictor, [item], settings)
    return DepthHistogram(table.layers, words, depths.tolist(), different, running)


def _depth_table(predictor: Predictor) -> WordDepths:
    if WORD_DEPTHS not in predictor.network.added:
        given = f"a run of {predictor.model.method.name!r}"
        raise OfframpError("depths planned by word", given, "give a run of faster_dat")
    return word_depths_of(predictor.network)


def _row(predictor: Predictor, texts: Sequence[str]) -> Row:
    names = predictor.task.input_columns
    if len(texts) != len(names):
        raise OfframpError(f"a text for each of: {', '.join(names)}", f"{len(texts)} texts", "give each in quotes")
    return {name: text.split() if name == "tokens" else text for name, text in zip(names, texts, strict=True)}


def _look_up(predictor: Predictor, encoded: Sequence[Encoded], settings: Any) -> Tensor:
    """Return the depth of every word, as the method's own policy writes it."""  # [words]
    packed = pack_rows(predictor.task, encoded).to(predictor.network.device)
    state = State(packed, packed, predictor.network, predictor.network.depth)
    with torch.inference_mode():
        predictor.model.method.policy(predictor.network, settings).on_embeddings(state)
    return state.packed.tokens[WORD_DEPTH][words_of(packed).first].cpu()


def _spelled(predictor: Predictor, item: Encoded) -> list[str]:
    """Return the words of an encoded text as people read them."""
    words: list[list[int]] = []
    for before, word, token in zip([-1, *item.words], item.words, item.ids, strict=False):
        if word >= 0 and word != before:
            words.append([])
        if word >= 0:
            words[-1].append(token)
    return [str(predictor.model.tokenizer.decode(pieces)).strip() for pieces in words]


def _histogram(depths: Tensor, weights: Tensor | None, layers: int) -> list[int]:
    return [int(n) for n in torch.bincount(depths, weights, minlength=layers + 1)[1:]]


def histogram_lines(histogram: DepthHistogram) -> list[str]:
    """Return the depths as lines of text."""
    width = max([len(word) for word in histogram.words] + [5])
    sentence = zip(histogram.words, histogram.depths, strict=True)
    lines = [f"{word:<{width}}  {depth:>2}  {'█' * depth}" for word, depth in sentence]
    lines += [""] if lines else []
    lines.append("depth  different words  running words")
    totals = (max(1, sum(histogram.different)), max(1, sum(histogram.running)))
    for depth, counts in enumerate(zip(histogram.different, histogram.running, strict=True), 1):
        columns = (f"  {n:>7} {n / total:6.1%}" for n, total in zip(counts, totals, strict=True))
        lines.append(f"{depth:>5}" + "".join(columns))
    return [*lines, f"mean depth of running words: {histogram.mean:.2f} of {histogram.layers} layers"]


def draw_word_depths(histogram: DepthHistogram, title: str, path: Path) -> None:
    """Write the picture as a PNG: the histogram, and below it the sentence if there is one."""
    rows = 2 if histogram.words else 1
    figure = Figure(figsize=(max(7.2, 2.0 + 0.3 * len(histogram.words)), 3.2 * rows), dpi=150, layout="constrained")
    _draw_histogram(figure.add_subplot(rows, 1, 1), histogram, title)
    if histogram.words:
        _draw_sentence(figure.add_subplot(rows, 1, 2), histogram)
    canvas = FigureCanvasAgg(figure)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def _draw_histogram(axes: Axes, histogram: DepthHistogram, title: str) -> None:
    kinds = (
        (histogram.different, DIFFERENT, "different words", -0.2),
        (histogram.running, RUNNING, "running words", 0.2),
    )
    for counts, colour, name, shift in kinds:
        positions, total = [depth + shift for depth in range(1, histogram.layers + 1)], max(1, sum(counts))
        axes.bar(positions, [n / total for n in counts], width=0.4, color=colour, label=f"{name} ({sum(counts):,})")
    axes.set_title(f"{title}\nmean depth of running words: {histogram.mean:.2f}", fontsize=10, loc="left")
    axes.set_xlabel("planned depth (layers)")
    axes.set_ylabel("share")
    axes.set_xticks(range(1, histogram.layers + 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_sentence(axes: Axes, histogram: DepthHistogram) -> None:
    axes.bar(range(len(histogram.words)), histogram.depths, width=0.7, color=RUNNING)
    axes.set_xticks(range(len(histogram.words)))
    axes.set_xticklabels([word.replace("$", r"\$") for word in histogram.words], rotation=60, ha="right", fontsize=9)
    axes.set_ylim(0, histogram.layers)
    axes.set_xlim(-0.7, len(histogram.words) - 0.3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("depth (layers)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# --- the command -----------------------------------------------------------------------------------------------------


def run_table(options: argparse.Namespace) -> None:
    """Measure a table, write it as JSON and print it as Markdown."""
    table = measure_table(options)
    if options.json:
        write_json(Path(options.json), table)
    print(markdown(table))


def run_words(options: argparse.Namespace) -> None:
    """Print the depths of words, and write the picture and the numbers."""
    predictor = Predictor.load(options.run)
    method, given = predictor.model.method, key_values(options.set, "--set")
    settings = methods.configure(method.settings, given, method.name)
    rows = (
        read_rows(options.data, columns=key_values(options.column, "--column"), limit=options.limit)
        if options.data
        else []
    )
    histogram = word_depths(predictor, options.text, settings, rows)
    print("\n".join(histogram_lines(histogram)))
    name = Path(options.run).name
    if options.png:
        draw_word_depths(histogram, f"word depths of {name} ({method.name})", Path(options.png))
    if options.json:
        write_json(Path(options.json), {"run": name, "settings": given, **histogram.to_json()})


def build_parser() -> argparse.ArgumentParser:
    """Return the options of both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    table = parts.add_parser("table", help="score, compute, depth and speed of settings and runs")
    table.add_argument("runs", nargs="+")
    table.add_argument("--data", required=True, help="labelled rows to report on")
    table.add_argument("--setting", help="a run-time setting to vary, e.g. gamma or penalty")
    table.add_argument("--values", type=lambda text: text.split(","), default=[], help="its values, e.g. 0,0.5,0.9")
    table.add_argument("--max-loss", type=float, help="instead of settings: the point chosen in calibration")
    table.add_argument("--batch-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 32])
    table.add_argument("--timed", type=int, default=256, help="rows that are timed, spread over the data")
    table.add_argument("--rounds", type=int, default=5)
    table.add_argument("--engine", default="torch")
    table.add_argument("--threads", type=int)
    words = parts.add_parser("words", help="how deep each word of a sentence goes")
    words.add_argument("run")
    words.add_argument("text", nargs="*", help="a sentence in quotes; two for a task on pairs")
    words.add_argument("--data", help="count the words of these rows instead of the training rows")
    words.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column")
    words.add_argument("--png", help="draw the picture here")
    for part in (table, words):
        part.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
        part.add_argument("--limit", type=int, help="use only the first N rows")
        part.add_argument("--json", help="write the numbers here")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the parts."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.part == "table":
        if bool(options.setting) != bool(options.values):
            parser.error("--setting and --values belong together")
        if options.max_loss is not None and (options.setting or options.set):
            parser.error("give settings or --max-loss, not both")
    try:
        run_table(options) if options.part == "table" else run_words(options)
    except OfframpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
