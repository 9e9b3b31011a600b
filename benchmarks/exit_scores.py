"""The score of every exit of a run if all rows exit there, to compare joint, two-stage and alternating training.

python benchmarks/exit_scores.py --data test.jsonl --json exits.json RUN…
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.calibration.replay import record_exits
from offramp.data.readers import read_rows
from offramp.evaluation.result_cells import data_and_split, hardware, model_name
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.nn.batches import Data
from offramp.utils.files import write_json


def exit_scores(run: str, source: str) -> dict[str, Any]:
    """Return the task's metric after every layer that has an exit."""
    predictor, rows = Predictor.load(run, "torch"), read_rows(source)
    network, task = predictor.network, predictor.task
    task.check_rows(rows, source)
    data = Data(rows, predictor.prepare(rows, source))
    recorded = record_exits(network, data).logits
    lengths = [len(e.ids) for e in data.encoded]
    found = {}
    for layer, logits in sorted(recorded.items()):
        parts = list(logits.split(lengths)) if network.per_token else list(logits)
        predictions = task.predictions(rows, data.encoded, [part.numpy() for part in parts])
        found[str(layer)] = round(task.metrics(rows, predictions)[task.metric], 4)
    recipe = read_recipe(run)
    kept = {key: recipe.get(key) for key in ("method", "options", "schedule")}
    return {"metric": task.metric, "model": model_name(predictor.model.base_model), "trained": kept, "exits": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of runs by exits, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", required=True, help="labelled rows")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    results = {Path(run).name: exit_scores(run, options.data) for run in options.runs}
    for name, one in results.items():
        print(f"{name:24}", *(f"{layer}:{100 * value:5.1f}" for layer, value in one["exits"].items()))
    data, split = data_and_split(options.data)
    header = {"what": "score of each exit if all rows exit there", "data": data, "split": split}
    header |= {"hardware": hardware(), "version": __version__, "date": datetime.date.today().isoformat()}
    if options.json:
        write_json(Path(options.json), {**header, "runs": results})


if __name__ == "__main__":
    main()
