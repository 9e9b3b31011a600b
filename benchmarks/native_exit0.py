"""What a row costs that leaves at exit 0 of the C++ engine, from ids, and what loading takes.

    python benchmarks/native_exit0.py RUN [RUN …] --data test.jsonl --threads 1 --out results/….json

Thresholds are set so high that every row leaves before the first layer. Rows are timed alone and in batches of 32;
microseconds a row are the sum over calls of the median over rounds. `parts` are the least times of the steps of one
call: lists of ids to arrays, the C++ call, everything. Loading is that of a fresh `Predictor` in a process in which the
libraries are imported, with weights packed before. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offramp import __version__, engines, methods
from offramp.core.loop import rule_for_arrays
from offramp.core.packed import arrays_of_rows
from offramp.data.readers import read_rows
from offramp.data.tokenization import Encoded
from offramp.evaluation.bench import package_versions
from offramp.evaluation.result_cells import data_and_split, model_name
from offramp.evaluation.timing import time_in_turns
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import remembered_columns
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PRECISIONS: tuple[engines.Precision, ...] = ("fp32", "int8")


def settings_that_leave(predictor: Predictor) -> Any:
    """Return settings under which every row leaves at the first exit."""
    method = predictor.model.method
    threshold = 1.0 if method.name == "fastbert" else math.log(predictor.task.outputs)
    return methods.configure(method.settings, {"threshold": threshold}, method.name)


def microseconds(predictor: Predictor, settings: Any, rows: list[Encoded], size: int, rounds: int) -> float:
    """Return the time of a row in batches of a size."""
    calls = [rows[start : start + size] for start in range(0, len(rows), size)]
    taken = time_in_turns(lambda _, call: predictor.run(call, settings, len(call)), ["run"], calls, rounds)["run"]
    return round(1e6 * float(np.median(taken, axis=1).sum()) / len(rows), 2)


def least(run: Callable[[], Any], calls: int = 2000) -> float:
    """Return the least time of a call in microseconds."""
    best = math.inf
    for _ in range(calls):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return 1e6 * best


def parts(predictor: Predictor, settings: Any, rows: list[Encoded]) -> dict[str, float]:
    """Return the least times of the steps of a call, a row."""
    engine, network = predictor.engine, predictor.network
    heads = engine.compile_heads(network)
    rule = rule_for_arrays(engine, heads, predictor.model.method.policy(network, settings))
    assert rule is not None, "exits of these runs are rules"
    arrays = arrays_of_rows([row.ids for row in rows], [row.types for row in rows])
    steps = {
        "ids_to_arrays": lambda: arrays_of_rows([row.ids for row in rows], [row.types for row in rows]),
        "engine": lambda: engine.run_rule_arrays(rule, heads, arrays),
        "all": lambda: predictor.run(rows, settings, len(rows)),
    }
    return {name: round(least(step) / len(rows), 2) for name, step in steps.items()}


def measure(run: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one run in every precision."""
    found = []
    for precision in PRECISIONS:
        Predictor.load(run, "native", precision, options.threads)  # packs the weights
        loading = []
        for _ in range(5):
            started = time.perf_counter()
            predictor = Predictor.load(run, "native", precision, options.threads)
            loading.append(time.perf_counter() - started)
        rows = predictor.prepare(read_rows(options.data, limit=320, remembered=remembered_columns(run)))
        settings = settings_that_leave(predictor)
        assert not predictor.run(rows, settings).exit_layer.any(), "every row leaves at exit 0"
        entry = {
            "model": model_name(predictor.model.base_model),
            "method": predictor.model.method.name,
            "precision": precision,
            "tokens": round(float(np.mean([len(row.ids) for row in rows])), 1),
            "load_seconds": round(float(np.median(loading)), 4),
            "alone_us": microseconds(predictor, settings, rows, 1, options.rounds),
            "batches_of_32_us": microseconds(predictor, settings, rows, 32, options.rounds),
            "parts_alone": parts(predictor, settings, rows[:1]),
            "parts_in_batches": parts(predictor, settings, rows[:32]),
        }
        print(entry, flush=True)
        found.append(entry)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders with a classification")
    parser.add_argument("--data", required=True, help="rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(arguments)
    rows = [entry for run in options.runs for entry in measure(run, options)]
    data = "/".join(data_and_split(options.data))
    content = {
        "what": f"Rows of {data} that leave at exit 0 of the C++ engine: microseconds a row; and seconds of loading",
        "hardware": hardware(),
        "data": data,
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": None,
        "command": f"python benchmarks/native_exit0.py RUN --data {data} --threads {options.threads}",
        "version": __version__,
        "versions": package_versions(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    if options.out:
        write_json(Path(options.out), content)


if __name__ == "__main__":
    main()
