"""Time and memory against the number of rows, and the time from start to first prediction.

    python benchmarks/growth.py rows RUN --data rows.jsonl --json growth.json
    python benchmarks/growth.py startup RUN --data rows.jsonl --json startup.json

`rows` runs `offramp predict` over files of growing length, each in a process that has read the file once before; the
first reading is reported beside it, because compiled graphs see a number of tokens for the first time there. `startup`
measures load to first prediction in fresh processes with libraries imported, and `offramp --help`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp import __version__, engines
from offramp.commands.predict import PredictOptions, predict_stream
from offramp.data.readers import read_rows
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.evaluation.bench import package_versions
from offramp.evaluation.contenders import check_names, load_predictor, settings_for_budget
from offramp.evaluation.peers import BenchModel, EngineVariant
from offramp.evaluation.result_cells import data_and_split, hardware, model_name
from offramp.evaluation.subprocesses import run_fresh
from offramp.inference.predictor import Predictor
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import write_json, write_text

PROGRAM = "python benchmarks/growth.py"
SIZES = (1000, 2000, 4000, 8000, 16000)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class GrowthSetup:
    """What is measured, and how often."""

    model: BenchModel
    variant: EngineVariant
    budget: str = "1.0"
    batch_size: int = 32
    rounds: int = 3


def measure_growth(setup: GrowthSetup, rows: Sequence[Row], sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return seconds and memory of predicting files of growing length."""
    first: dict[int, list[float]] = {size: [] for size in sizes}
    again: dict[int, list[float]] = {size: [] for size in sizes}
    peaks: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        files = {size: _write_rows(Path(folder) / f"{size}.jsonl", rows, size) for size in sizes}
        for _, size in itertools.product(range(setup.rounds), sizes):
            given = (setup, [files[size]] * 2, str(Path(folder) / "out"))
            (opening, seconds), peak = run_fresh(predict_files, *given, library=setup.variant.engine)
            first[size].append(opening)
            again[size].append(seconds)
            peaks[size] += [] if peak is None else [peak]
    warm, cold = ({size: min(times) for size, times in taken.items()} for taken in (again, first))
    memory = {size: statistics.median(found) if found else None for size, found in peaks.items()}
    return {
        "what": "growth",
        "sizes": list(sizes),
        "seconds": list(warm.values()),
        **fit_line(warm),
        "seconds_each_round": list(again.values()),
        "peak_mb": list(memory.values()),
        **_memory_growth(memory),
        "seconds_first_time": list(cold.values()),
    }


def fit_line(seconds: Mapping[int, float]) -> dict[str, float]:
    """Fit a straight line (least relative squares); return its slope and the largest relative distance from it."""
    sizes, taken = np.array(list(seconds), dtype=np.float64), np.array(list(seconds.values()))
    design = np.stack([sizes, np.ones_like(sizes)], axis=1) / taken[:, None]
    (rate, start), *_ = np.linalg.lstsq(design, np.ones_like(taken), rcond=None)
    distance = np.abs((rate * sizes + start) / taken - 1.0)
    return {
        "ms_per_row": round(1000 * float(rate), 5),
        "departure_from_line": round(float(distance.max()), 5),
        "per_row_last_over_first": round(float((taken[-1] / sizes[-1]) / (taken[0] / sizes[0])), 5),
    }


def _memory_growth(memory: Mapping[int, float | None]) -> dict[str, Any]:
    first, *_, last = memory.values()
    return {"memory_last_over_first": None if first is None or last is None else round(last / first, 4)}


def _write_rows(path: Path, rows: Sequence[Row], size: int) -> str:
    chosen = itertools.islice(itertools.cycle(rows), size)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    return str(path)


def predict_files(setup: GrowthSetup, sources: Sequence[str], output: str) -> list[float]:
    """Predict one file after the other in a fresh process; return the seconds of each, without the start."""
    torch.set_num_threads(setup.model.threads)
    model = load_predictor(setup.model, setup.variant)
    settings, taken = settings_for_budget(model, setup.budget), []
    for source in sources:
        started = time.perf_counter()
        predict_stream(model, source, output, settings, PredictOptions(setup.batch_size))
        taken.append(time.perf_counter() - started)
    return taken


def measure_first_prediction(setup: GrowthSetup, rows: Sequence[Row]) -> dict[str, Any]:
    """Return seconds from load to first prediction in fresh processes; the first may have to compile."""
    times = [
        run_fresh(first_prediction, setup, rows[0], library=setup.variant.engine).result
        for _ in range(setup.rounds + 1)
    ]
    helps = [_seconds([sys.executable, "-m", "offramp.cli", "--help"]) for _ in range(setup.rounds)]
    return {
        "what": "startup",
        "first_seconds": round(times[0], 4),
        "second_seconds": round(times[1], 4),
        "best_seconds": round(min(times[1:]), 4),
        "help_seconds": round(min(helps), 4),
    }


def first_prediction(setup: GrowthSetup, row: Row) -> float:
    """Load the model and predict one row in a fresh process; return the seconds."""
    torch.set_num_threads(setup.model.threads)
    started = time.perf_counter()
    model = load_predictor(setup.model, setup.variant)
    encoded = model.prepare([row])
    model.finish([row], encoded, model.run(encoded, settings_for_budget(model, setup.budget), 1))
    return time.perf_counter() - started


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every engine; return what the JSON file holds."""
    rows = read_rows(options.data, columns=key_values(options.column, "--column"), limit=options.limit)
    if not rows:
        raise OfframpError("rows to measure on", f"none in {options.data}", "give a file with rows")
    names = [name.strip() for name in options.engines.split(",")]
    check_names(names, [engines.AUTO, *engines.names()], "engines of Offramp")
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    model, found = Predictor.load(options.run, "torch"), []
    model.task.check_inputs(rows, options.data)
    bench_model = BenchModel(options.run, model.task.auto_class, "", threads)
    how = EngineOptions(options.precision)
    chosen = [engines.choose(name, torch.device("cpu"), model.network.encoder, how) for name in names]
    for engine in dict.fromkeys(chosen):
        variant = EngineVariant(engine, options.precision)
        setup = GrowthSetup(bench_model, variant, options.budget, options.batch_size, options.rounds)
        numbers = (
            measure_first_prediction(setup, rows)
            if options.part == "startup"
            else measure_growth(setup, rows, options.sizes)
        )
        found.append({"engine": engine, "precision": options.precision, **numbers})
    return {
        "hardware": hardware(),
        "data": "/".join(data_and_split(options.data)),
        "model": model_name(model.model.base_model),
        "method": model.model.method.name,
        "measured": found,
        "budget": options.budget,
        "batch_size": options.batch_size,
        "threads": threads,
        "command": command_line(PROGRAM),
        "version": __version__,
        "versions": package_versions(),
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["rows", "startup"])
    parser.add_argument("run", help="a folder that `offramp train` wrote")
    parser.add_argument("--data", required=True, help="rows; labels are not needed")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(SIZES))
    parser.add_argument("--budget", default="1.0", help="a share, default, max-loss=0.01, risk=0.01 or latency=5ms")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--engines", default="auto", help="auto, openvino, torch")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    try:
        result = measure(options)
    except OfframpError as error:
        sys.exit(str(error))
    if options.json:
        write_json(Path(options.json), result)
    for numbers in result["measured"]:
        for name, value in numbers.items():
            print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    main()
