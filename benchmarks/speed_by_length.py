"""Speed against the length of a text: what a setting saves on short rows and on long rows, measured.

    python benchmarks/speed_by_length.py RUN --data rows.jsonl --budget 0.5 --json lengths.json

Rows are grouped by their number of tokens. Each group is timed in turn at the full settings and at the chosen ones;
tokenising is not timed. Timings are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.evaluation.contenders import full_settings, predictor_runner
from offramp.evaluation.result_cells import Origin, data_and_split, hardware, model_name
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import write_json

PROGRAM = "python benchmarks/speed_by_length.py"
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens; the longest row of each group


@dataclass(frozen=True)
class LengthTiming:
    """How many rows are timed, and how often."""

    batch_size: int = 32
    rows: int = 128  # of each group, at most
    rounds: int = 5


def time_by_length(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], settings: Any, origin: Origin, timing: LengthTiming
) -> dict[str, Any]:
    """Return, for each group of lengths, milliseconds a row at the full and the chosen settings, compute and depth."""
    groups: dict[int, list[Encoded]] = {}
    for item in predictor.prepare(rows, origin.data):
        edge = next((edge for edge in EDGES if len(item.ids) <= edge), len(item.ids))
        groups.setdefault(edge, []).append(item)
    if not groups:
        raise OfframpError("rows to time", "none", "give --data with at least one row")
    both = (full_settings(predictor), settings)
    return {
        "method": predictor.model.method.name,
        "model": model_name(predictor.model.base_model),
        "settings": {**asdict(predictor.model.options), **asdict(settings)},
        "data": origin.data,
        "split": origin.split,
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "batch_size": timing.batch_size,
        "lengths": [_time_group(predictor, groups[edge][: timing.rows], both, timing) for edge in sorted(groups)],
        "hardware": hardware(),
        "command": origin.command,
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _time_group(
    predictor: Predictor, items: Sequence[Encoded], both: tuple[Any, Any], timing: LengthTiming
) -> dict[str, Any]:
    """Time one group of rows at the full and at the chosen settings, in turn."""
    size, ordered = timing.batch_size, sorted(items, key=lambda item: len(item.ids))
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    runners = {"full": predictor_runner(predictor, both[0]), "chosen": predictor_runner(predictor, both[1])}

    def work(name: str, batch: Sequence[Encoded]) -> None:
        runners[name](batch)

    seconds = interleaved(work, list(runners), batches, timing.rounds)
    outcome = predictor.run(ordered, both[1], size)
    return {
        "tokens": [len(ordered[0].ids), len(ordered[-1].ids)],
        "rows": len(ordered),
        "mean_tokens": round(sum(len(item.ids) for item in ordered) / len(ordered), 2),
        "ms_full": round(1000 * seconds["full"] / len(ordered), 4),
        "ms": round(1000 * seconds["chosen"] / len(ordered), 4),
        "speed_up": round(seconds["full"] / seconds["chosen"], 3),
        "mac_share": round(float(outcome.macs.sum()) / predictor.full_macs(ordered, outcome), 6),
        "mean_exit_layer": round(float(outcome.exit_layer.mean()), 4),
    }


def length_table(found: Mapping[str, Any]) -> Table:
    """Return the groups as a table."""
    data = f"{found['data']}/{found['split']}"
    title = f"{found['method']} on {data}, {found['engine']}, batches of {found['batch_size']}"
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "rows", "full, ms", "ms", "speed-up", "share of MACs", "mean exit layer"):
        table.add_column(column, justify="right")
    for group in found["lengths"]:
        numbers = (f"{group[name]:.3f}" for name in ("ms_full", "ms", "speed_up", "mac_share", "mean_exit_layer"))
        table.add_row("–".join(map(str, group["tokens"])), str(group["rows"]), *numbers)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Time a run, write the numbers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a folder that `offramp train` wrote")
    parser.add_argument("--data", required=True, help="rows of many lengths; labels are not needed")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--budget", type=float, help="share of the full model's compute")
    parser.add_argument("--max-loss", type=float, help="instead of a budget: what the metric may lose")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=128, help="rows timed of each group")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured; the median counts")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    try:
        predictor = Predictor.load(options.run, options.engine, options.precision, options.threads)
        settings = predictor.settings(options.budget, key_values(options.set, "--set"), options.max_loss)
        rows = read_rows(options.data, columns=key_values(options.column, "--column"), limit=options.limit)
        origin = Origin(*data_and_split(options.data), command_line(PROGRAM), read_recipe(options.run))
        timing = LengthTiming(options.batch_size, options.rows, options.rounds)
        found = time_by_length(predictor, rows, settings, origin, timing)
    except OfframpError as error:
        sys.exit(str(error))
    if options.json:
        write_json(Path(options.json), found)
    Console().print(length_table(found))


if __name__ == "__main__":
    main()
