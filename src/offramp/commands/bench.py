"""`offramp bench` as functions: the speed of a run and of other runtimes on this machine, and what speed leaves out."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offramp import __version__, engines
from offramp.data.readers import read
from offramp.errors import OfframpError
from offramp.evaluation.bench import Plan, Watcher, Where, run_bench
from offramp.evaluation.bench_figure import draw_bench
from offramp.evaluation.bench_file import versions
from offramp.evaluation.contenders import known, predictor
from offramp.evaluation.course import check_task
from offramp.evaluation.growth import Setup, growth, overhead, startup
from offramp.evaluation.peers import Ground, Variant
from offramp.evaluation.result_cells import model_name, place
from offramp.inference.predictor import Predictor
from offramp.utils.command_line import python_call
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

MEASUREMENTS = ("growth", "startup", "overhead")  # what `bench_other` measures


class SilentWatcher:
    """Ignores how far a benchmark is."""

    def phase(self, name: str, total: int) -> None:
        """Ignore the beginning of a phase."""

    def tick(self) -> None:
        """Ignore a step."""


def bench(
    run: str | Path,
    data: str | Path,
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    budgets: Sequence[str] = ("1.0", "0.5", "0.3"),
    engines: Sequence[str] = ("auto",),
    against: Sequence[str] = ("hf", "hf-compile", "onnxruntime", "openvino"),
    precisions: Sequence[str] = ("fp32", "bf16", "int8"),
    orders: Sequence[str] = ("given", "sorted"),
    rounds: int = 5,
    threads: int | None = None,
    rows: int | None = None,
    memory: bool = True,
    columns: Mapping[str, str] | None = None,
    json: str | Path | None = None,
    png: str | Path | None = None,
    watcher: Watcher | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure rows a second, latency, memory and score of a run at several budgets and of other runtimes.

    Args:
        run: a run folder.
        data: a file of labelled rows, of which the first `rows` are used.
        batch_sizes: rows in a batch; each is measured by itself.
        budgets: of the run: shares of compute, "default", "max-loss=0.01", "risk=0.01" or "latency=5ms".
        engines: Offramp's own engines: auto, openvino, torch.
        against: other runtimes: hf, hf-compile, onnxruntime, openvino.
        precisions: measured wherever a runtime has them.
        orders: of rows in batches: as given, sorted by length.
        rounds: interleaved rounds after the warm-up.
        threads: for every runtime; torch's own number if left out.
        memory: measure memory too, each runtime in a fresh process.
        json: write the bench file here; one that was cut short is continued.
        png: draw score against speed here.

    Returns the content of the bench file; its `rows` are empty where no runtime could be measured.
    """
    plan = Plan(
        tuple(batch_sizes),
        tuple(budgets),
        tuple(engines),
        tuple(against),
        tuple(precisions),
        tuple(orders),
        rounds,
        threads or torch.get_num_threads(),
        memory,
    )
    given = read(str(data), columns=columns or {}, limit=rows)
    with tempfile.TemporaryDirectory() as work:
        where = Where(Path(json) if json else None, work, command or python_call("bench", run, data=data))
        file = run_bench(str(run), given, str(data), plan, where, watcher or SilentWatcher())
    if png and file["rows"]:
        draw_bench(file, Path(png))
    return file


def bench_other(
    run: str | Path,
    data: str | Path,
    what: str,
    *,
    budget: str = "1.0",
    engines: Sequence[str] = ("auto",),
    precision: str = "fp32",
    batch_size: int = 32,
    rounds: int = 5,
    threads: int | None = None,
    rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    json: str | Path | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure what speed leaves out, for each engine: growth, startup or overhead.

    growth: time and memory of `offramp predict` against the number of rows. startup: from loading to the first
    prediction. overhead: what the loop costs by itself.
    """
    if what not in MEASUREMENTS:
        choices = ", ".join(("speed", *MEASUREMENTS))
        raise OfframpError("something to measure", f"--what {what}", f"use one of: {choices}")
    given = read(str(data), columns=columns or {}, limit=rows)
    if not given:
        raise OfframpError("rows to measure on", f"none in {data}", "give a file with rows")
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    model = Predictor.load(run, "torch")
    check_task(model)
    model.task.check_inputs(given, str(data))
    ground = Ground(str(run), model.task.auto_class, "", threads)
    measured = []
    for engine in _own_engines(engines):
        setup = Setup(ground, Variant(engine, precision), budget, batch_size, rounds)
        measured.append({"engine": engine, "precision": precision, **_measure(setup, given, what)})
    file = {
        "hardware": hardware(),
        "data": "/".join(place(str(data))),
        "model": model_name(model.model.base_model),
        "method": model.model.method.name,
        "measured": measured,
        "budget": budget,
        "batch_size": batch_size,
        "threads": threads,
        "command": command or python_call("bench_other", run, data=data, what=what),
        "version": __version__,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }
    if json:
        write_json(Path(json), file)
    return file


def _own_engines(names: Sequence[str]) -> list[str]:
    """Return the engines behind these names, each once; refuse a name that is not one of Offramp's engines."""
    known(names, [engines.AUTO, *engines.names()], "engines of ours")
    return list(dict.fromkeys(engines.choose(name, torch.device("cpu")) for name in names))


def _measure(setup: Setup, rows: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    if what == "growth":
        return growth(setup, rows)
    if what == "startup":
        return startup(setup, rows)
    return overhead(predictor(setup.ground, setup.variant), rows, setup.rounds)
