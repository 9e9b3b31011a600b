"""`offramp bench` as a function: the speed of a run and of other runtimes on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offramp.data.readers import read_rows
from offramp.evaluation.bench import (
    PEER_SAMPLES,
    BenchOutput,
    BenchPlan,
    BenchWatcher,
    PeerSamples,
    SilentWatcher,
    run_bench,
)
from offramp.evaluation.bench_figure import draw_bench
from offramp.inference.hub import local_folder
from offramp.inference.run_folder import remembered_columns
from offramp.utils.command_line import python_call
from offramp.utils.files import check_output_file


def bench(
    run: str | Path,
    data: str | Path,
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    budgets: Sequence[str] = ("1.0", "0.5", "0.3"),
    engines: Sequence[str] = ("auto",),
    against: Sequence[str] = ("hf", "hf-compile", "onnxruntime", "openvino", "ctranslate2"),
    precisions: Sequence[str] = ("fp32", "bf16", "int8"),
    orders: Sequence[str] = ("given", "sorted"),
    rounds: int = 5,
    threads: int | None = None,
    rows: int | None = None,
    memory: bool = True,
    peer_samples: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    json: str | Path | None = None,
    png: str | Path | None = None,
    watcher: BenchWatcher | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure rows a second, latency, memory and score of a run at several budgets and of other runtimes.

    Args:
        run: a run folder, or a name on the hub.
        data: a file of labelled rows, of which the first `rows` are used.
        batch_sizes: rows in a batch; each is measured by itself.
        budgets: of the run: shares of compute, "default", "max-loss=0.01", "risk=0.01" or "latency=5ms".
        engines: Offramp's own engines: auto, native, openvino, torch.
        against: other runtimes: hf, hf-compile, onnxruntime, openvino, ctranslate2; one that is not installed is
            reported as missing.
        precisions: measured wherever a runtime has them.
        orders: of rows in batches: as given, sorted by length.
        rounds: interleaved rounds after the warm-up.
        threads: for every runtime; torch's own number if left out.
        memory: measure memory too, each runtime in a fresh process.
        peer_samples: a file of rows on which runtimes that quantise statically measure the ranges of activations (the
            first 300 are used); the rows of `data` if left out.
        json: write the bench file here; one that was cut short is continued.
        png: draw score against speed here.

    Returns the content of the bench file; its `rows` are empty where no runtime could be measured.
    """
    folder = local_folder(run)
    check_output_file(json, data, folder)
    check_output_file(png, data, folder)
    plan = BenchPlan(
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
    remembered = remembered_columns(folder)
    given = read_rows(str(data), columns=columns, limit=rows, remembered=remembered)
    samples = None
    if peer_samples is not None:
        others = read_rows(str(peer_samples), columns=columns, limit=PEER_SAMPLES, remembered=remembered)
        samples = PeerSamples(others, str(peer_samples))
    with tempfile.TemporaryDirectory() as work:
        where = BenchOutput(Path(json) if json else None, work, command or python_call("bench", run, data=data))
        file = run_bench(str(folder), given, str(data), plan, where, watcher or SilentWatcher(), samples)
    if png and file["rows"]:
        draw_bench(file, Path(png))
    return file
